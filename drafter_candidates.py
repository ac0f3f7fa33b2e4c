"""The drafter at work: features of the accepted text in, draft logits out, and what it keeps between passes and calls.

Legend of shapes: B rows, C new context tokens, P context tokens in the drafter's cache, K block, H hidden, T tapped layers,
n drafted tokens, V vocabulary.
"""

import weakref
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import CandidateGenerator

from .drafter_masks import is_flash, ragged_masks
from .target_cache import move_right, trim_left
from .target_model import device_of, embedding_rows, raw_embeddings, tap_request, tapped


@dataclass
class Features:
    """Tapped states of accepted tokens that the drafter has not read yet.

    Args:
        states: one tensor (B, C, H) a tap; a row's real tokens come first.
        counts: real tokens by row; None where all are.
    """

    states: list[torch.Tensor]
    counts: list[int] | None = None

    @property
    def width(self) -> int:
        return self.states[0].shape[1]

    @classmethod
    def of_prompt(cls, states: list[torch.Tensor], mask: torch.Tensor | None) -> "Features":
        """From the states of a pass over the prompt and its attention mask (B, C): what is masked is no context."""
        if mask is None or bool((mask != 0).all()):
            return cls(states)
        real = (mask != 0).to(states[0].device)
        counts = real.sum(dim=1).tolist()
        order = (~real).long().argsort(dim=1, stable=True)[:, : max(counts)]
        chosen = [
            layer.gather(1, order.to(layer.device)[..., None].expand(-1, -1, layer.shape[-1])) for layer in states
        ]
        return cls(chosen, None if min(counts) == max(counts) else counts)

    @classmethod
    def joined(cls, parts: list["Features"]) -> "Features":
        """One after the other, in order."""
        if len(parts) == 1:
            return parts[0]
        states = [torch.cat(layers, dim=1) for layers in zip(*(part.states for part in parts))]
        if all(part.counts is None for part in parts):
            return cls(states)
        real = [_first(part.counts or [part.width] * states[0].shape[0], part.width) for part in parts]
        return cls.of_prompt(states, torch.cat(real, dim=1))


def _first(counts: list[int], width: int) -> torch.Tensor:
    """(B, width) true at the first `counts[r]` columns of row r."""
    return torch.arange(width) < torch.tensor(counts)[:, None]


class DFlashCandidateGenerator(CandidateGenerator):
    """Runs the drafter: features in, draft logits out. State of one call: the drafter's cache.

    A transformers `CandidateGenerator`: our loop calls `draft_logits`, transformers' own loop `get_candidates`.

    Args:
        drafter: a `DFlashDraftModel`.
        target: borrowed are its embedding and head, which are called, never read: a quantised one has no dense weight.
        num_draft_tokens: tokens to draft a round, at most `block_size - 1`.
        max_length: of the text, the prompt included; None for no limit.
    """

    requires_model_outputs = True

    def __init__(self, drafter, target: PreTrainedModel, num_draft_tokens: int, max_length: int | None = None):
        self.drafter, self.device = drafter, drafter.device
        self.target = target
        self.target_layer_ids = drafter.config.target_layer_ids
        self.block_size = drafter.config.block_size
        self.num_draft_tokens = num_draft_tokens
        self.max_length = max_length
        self.model_kwargs_overrides = {"output_hidden_states": tap_request(self.target_layer_ids)}

        self.cache = DynamicCache(config=drafter.config)
        self.cache.activate_past_recording()
        self.seen: list[int] | None = None  # context tokens in the cache by row, once rows differ
        self.start = 0  # position of the first context token; not 0 where a prefix was left out
        self.embedding, self.head = target.get_input_embeddings(), target.get_output_embeddings()
        self.vocab_rows = embedding_rows(target)
        self.mask_embeds: torch.Tensor | None = None  # (1, block_size - 1, H)

    def draft_logits(
        self,
        anchor: torch.LongTensor,
        context: list[torch.Tensor],
        num_draft: int,
        attention_mask: torch.Tensor | None = None,
        counts: list[int] | None = None,
    ) -> torch.Tensor:
        """Logits (B, n, V) of the next `num_draft` tokens (paper, section 4.1).

        Args:
            anchor: (B, 1) the newest token of every row; its own features do not exist yet.
            context: tapped states, each (B, new, H), of the tokens before the anchor that this drafter has not seen.
            attention_mask: (1, tokens before the anchor) with 0 at padding, or None; for one row.
            counts: how many of the new tokens are real in each row, which come first; None where all are.
        """
        if self.mask_embeds is None:
            self._borrow(context[-1].device)
        # The block is always whole: its length is part of what the drafter was trained on.
        anchor_embeds = raw_embeddings(self.embedding, anchor.to(self.embedding_device)).to(self.device)
        noise_embeds = torch.cat([anchor_embeds, self.mask_embeds.expand(len(anchor), -1, -1)], dim=1)  # (B, K, H)
        context_hidden_states = torch.cat([states.to(self.device) for states in context], dim=-1)  # (B, new, T * H)

        hidden = self._read(noise_embeds, context_hidden_states, attention_mask, counts)
        hidden = hidden.to(self.head_device, context[-1].dtype)
        # Of all slots: the head's weight is read once in any case, and kernels like blocks of 8 or 16 rows better than 7 or 15.
        logits = self.drafter.draft_logits(hidden, self.head)[:, 1 : num_draft + 1]  # slot 0 is the anchor's own
        if logits.shape[-1] > self.vocab_rows:  # a head padded beyond the tokens that the target can embed
            logits[..., self.vocab_rows :] = -torch.inf
        return logits

    def _borrow(self, otherwise: torch.device):
        """What is the same in every round: where the target's embedding and head are, and the mask tokens' embeddings."""
        self.embedding_device = device_of(self.embedding, otherwise)
        self.head_device = device_of(self.head, otherwise)
        mask_token_id = self.drafter.config.mask_token_id
        mask_ids = torch.full((1, self.block_size - 1), mask_token_id, device=self.embedding_device)
        self.mask_embeds = raw_embeddings(self.embedding, mask_ids).to(self.device)

    def absorb(self, context: list[torch.Tensor], counts: list[int] | None = None):
        """Read context without drafting: of a long prompt only keys and values stay, a chunk at a time."""
        states = torch.cat([layer.to(self.device) for layer in context], dim=-1)
        noise = states.new_zeros(states.shape[0], self.block_size, self.drafter.config.hidden_size)
        self._read(noise, states, None, counts)

    def _read(self, noise_embeds, context_hidden_states, attention_mask, counts) -> torch.Tensor:
        """Hidden states (B, K, H) of a block. The context's keys and values stay in the cache, the block's own leave it."""
        rows, new = context_hidden_states.shape[:2]
        if counts is not None and self.seen is None:
            self.seen = [self.cache.get_seq_length()] * rows
        position_ids = None
        if self.seen is not None:
            attention_mask, position_ids = self._rows_apart(counts or [new] * rows, new, context_hidden_states.device)
        elif attention_mask is not None:
            # Positions count real tokens, as the target's do.
            attention_mask = attention_mask.to(context_hidden_states.device)
            position_ids = self._continued(new, context_hidden_states.device) - (attention_mask == 0).sum()
            position_ids = position_ids.clamp(min=0)
            attention_mask = torch.cat([attention_mask, attention_mask.new_ones(1, self.block_size)], dim=1)
        elif self.start:
            position_ids = self._continued(new, context_hidden_states.device)

        hidden = self.drafter(
            noise_embeds, context_hidden_states, attention_mask, position_ids=position_ids, cache=self.cache
        ).last_hidden_state
        if counts is not None:
            self._move_rows(counts, new)
        elif self.seen is not None:
            self.seen = [seen + new for seen in self.seen]
        # Context keys and values stay for good; the block's own were a guess.
        self.cache.crop(-self.block_size)
        if counts is not None:
            self._trim()
        return hidden

    def _continued(self, new: int, device) -> torch.Tensor:
        past = self.cache.get_seq_length() + self.start
        return torch.arange(past, past + new + self.block_size, device=device)[None]

    def _rows_apart(self, counts: list[int], new: int, device):
        """Masks and positions (B, C + K) of rows that hold different numbers of tokens.

        A row's old context ends at the last of the P cached columns; of its new columns the first are real. What a slot
        sees is decided by positions, as it would be in that row alone.
        """
        config, past = self.drafter.config, self.cache.get_seq_length()
        seen, real_new = (torch.tensor(values, device=device)[:, None] for values in (self.seen, counts))  # (B, 1)
        old = seen - past + torch.arange(past, device=device)  # (B, P), negative at padding
        column = torch.arange(new, device=device)
        block = seen + real_new + torch.arange(self.block_size, device=device)
        fresh = torch.cat([seen + column, block], dim=1)  # (B, C + K)
        positions = torch.cat([old, fresh], dim=1)
        real = torch.cat([old >= 0, column < real_new, torch.ones_like(block, dtype=torch.bool)], dim=1)
        if is_flash(config._attn_implementation):  # it takes padding out of the rows, and no ready mask
            return real.long(), fresh + self.start
        kinds = [*zip(config.windows, config.block_causal)]
        return ragged_masks(positions, real, block, past, kinds), fresh + self.start

    def _move_rows(self, counts: list[int], new: int):
        """Bring rows of different counts back to left-padded form, before the block leaves the cache."""
        behind = torch.tensor([new - count for count in counts])
        for layer in self.cache.layers:
            move_right(layer, behind, self.block_size, conv=False)
        self.seen = [seen + count for seen, count in zip(self.seen, counts)]

    def _trim(self):
        if trim := self.cache.get_seq_length() - max(self.seen):
            for layer in self.cache.layers:
                trim_left(layer, trim)

    def get_candidates(self, input_ids, model_kwargs=None, model_outputs=None, is_first_iteration=False, **kwargs):
        """Candidates for transformers' loop: (1, length + n) ids, and None for the logits, so that the target chooses."""
        length = input_ids.shape[1]
        num_draft = self.num_draft_tokens
        if self.max_length is not None:
            num_draft = min(num_draft, self.max_length - length - 1)
        if is_first_iteration or num_draft < 1:
            return input_ids, None
        # All tokens but the anchor are in the target's cache; those that the drafter lacks came with the last pass.
        new = length - 1 - self.cache.get_seq_length()
        context = [
            states[:, :new] for states in tapped(model_outputs.hidden_states, self.target, self.target_layer_ids)
        ]
        attention_mask = model_kwargs.get("attention_mask")
        if attention_mask is not None:
            attention_mask = attention_mask[:, : length - 1]
        logits = self.draft_logits(input_ids[:, -1:], context, num_draft, attention_mask)
        return torch.cat([input_ids, logits.argmax(dim=-1).to(input_ids.device)], dim=1), None

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        """Part of transformers' interface; the number of drafted tokens is chosen by our loop, or fixed."""


# ------------------------------------------------------------------------------------------------------------------
# The drafter's context between calls.


@dataclass
class KeptContext:
    """What a drafter knows of the tokens in a target's cache.

    Args:
        drafter: whose it is; not kept alive by this.
        ids: (B, tokens) the text that the cache holds.
        unread: features that came too late for a draft pass.
    """

    drafter: weakref.ref
    ids: torch.LongTensor
    cache: DynamicCache
    seen: list[int] | None
    start: int
    unread: list[Features]


# By the target's cache object: it dies with it.
_KEPT: "weakref.WeakKeyDictionary[Cache, KeptContext]" = weakref.WeakKeyDictionary()


def keep_context(cache: Cache, candidates: DFlashCandidateGenerator, ids: torch.LongTensor, unread: list[Features]):
    """Remember the drafter's context beside the target's cache, for a later call that is handed the same cache."""
    kept = KeptContext(
        weakref.ref(candidates.drafter), ids, candidates.cache, candidates.seen, candidates.start, unread
    )
    _KEPT[cache] = kept


def take_context(
    cache: Cache, candidates: DFlashCandidateGenerator, prefix: torch.LongTensor | None, rows: int, length: int
) -> KeptContext | None:
    """Give `candidates` what its drafter knows of the `length` tokens of each row in `cache`, if it knows all of them.

    Args:
        prefix: (B, length) their ids, where the caller passed them.
    """
    kept = _KEPT.pop(cache, None)  # the call that takes it goes on with it; another at the same time reads anew
    if kept is None or kept.drafter() is not candidates.drafter or kept.ids.shape != (rows, length):
        return None
    if prefix is not None and not torch.equal(prefix, kept.ids):
        return None
    candidates.cache, candidates.seen, candidates.start = kept.cache, kept.seen, kept.start
    return kept
