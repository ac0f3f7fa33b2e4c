"""DFlash as a proposer: a block of draft tokens in one forward pass, with the hidden states and KV cache that it keeps.

Legend of shapes: B sequences, C new context tokens, P context tokens in the drafter's KV cache, K block, H hidden, T target
layers, n draft tokens, V vocabulary.
"""

import itertools
import weakref
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import CandidateGenerator

from .drafter_draft import AcceptedTokens, Draft, Plan
from .drafter_fixed import FixedContext
from .drafter_heads import Candidates
from .drafter_paths import MostLikely, edges, path_head, walk
from .drafter_tree import MAX_SIBLINGS
from .drafter_vocabulary import make_head, whole_head_reason
from .target_cache import move_right, trim_left
from .target_identity import check_identity
from .target_masks import is_flash, ragged_masks
from .target_model import (
    check_pair,
    device_of,
    embedding_rows,
    hidden_states_request,
    raw_embeddings,
    target_hidden_states,
)
from .target_shift import RowShift, to_device


class DFlashProposer:
    """Runs a DFlash drafter: hidden states of accepted tokens in, a block of draft tokens out (paper, section 4.1).

    Args:
        drafter: a `DFlashDraftModel`.
        target: its embedding and LM head are borrowed. They are called, never read: a quantized one has no dense weight.
    """

    def __init__(self, drafter, target: PreTrainedModel):
        self.drafter, self.device = drafter, device_of(drafter, target.device)
        self.target_layer_ids = drafter.config.target_layer_ids
        self.block_size = drafter.config.block_size
        self.max_draft_tokens = drafter.config.drafts_per_block
        self.num_passes = 0

        self.cache: DynamicCache | FixedContext = DynamicCache(config=drafter.config)
        self.cache.activate_past_recording()
        self.unread: list[AcceptedTokens] = []
        self.seen: list[int] | None = None  # context tokens in the KV cache by sequence, once these differ
        self.start = 0  # position of the first context token; not 0 where a prefix was left out
        self.embedding = target.get_input_embeddings()
        self.num_tokens = embedding_rows(target)
        self.head = path_head(drafter, make_head(drafter, target, self.num_tokens))
        reason = whole_head_reason(drafter, target)
        self.notes = [] if reason is None else [reason]
        self.no_trees = None
        if self.head.carries_state:
            self.no_trees = "the drafter has a Markov head of kind 'rnn', whose scores depend on the whole path"
        self.mask_embeds: torch.Tensor | None = None  # (1, block_size - 1, H)

    # ---- the loop's side

    def check(self, target: PreTrainedModel):
        """Refuse a target that the drafter was not made for."""
        check_pair(self.drafter, target)
        check_identity(self.drafter, target)

    def read(self, accepted: AcceptedTokens):
        """Keep accepted tokens until the next draft."""
        self.unread.append(accepted)

    def propose(self, anchor: torch.LongTensor, plan: Plan, sampler) -> Draft:
        """Draft a chain of `plan.num_draft_tokens` tokens behind the anchor (B, 1), or a tree as deep as that."""
        accepted, self.unread = AcceptedTokens.joined(self.unread), []
        self.see(accepted, AcceptedTokens(anchor, []))
        if FixedContext.fits(self.drafter, plan.fixed, accepted, self.cache):
            self.cache = FixedContext(self.drafter, self.cache, self.seen, self.start, plan.fixed, len(anchor))
        candidates = self.candidates(anchor, accepted.states, plan.num_draft_tokens, counts=accepted.counts)
        if plan.num_nodes is not None and self.no_trees is None:
            ids, log_probs = self._ranked(candidates, anchor, sampler, min(plan.num_nodes, MAX_SIBLINGS))
            if log_probs is not None:
                return Draft.of_tree(ids, log_probs, plan.num_nodes)
        if self.head.looks_back:
            return walk(self.head, candidates, anchor, sampler)
        tokens, finite = sampler.propose(candidates)
        return Draft(tokens, finite=finite, confidence=candidates.confidence)

    def _ranked(self, candidates: Candidates, anchor: torch.LongTensor, sampler, most: int):
        """Return what a tree is made of: ids (n, C), and log probabilities for `best_first`, None where some are nan."""
        if self.head.looks_back:
            ids, log_probs = edges(self.head, candidates, anchor, sampler, min(most, self.head.num_candidates))
        else:
            ids, log_probs = sampler.rank(candidates, most)
            log_probs = [log_probs]
        finite = not any(bool(part.isnan().any()) for part in log_probs)
        return ids, [row for part in log_probs for row in part.tolist()] if finite else None

    def absorb(self):
        """Read the context so far without drafting: of a long prompt only keys and values stay, chunk by chunk."""
        if not self.unread:
            return
        accepted, self.unread = AcceptedTokens.joined(self.unread), []
        self.see(accepted)
        states = torch.cat([layer.to(self.device) for layer in accepted.states], dim=-1)
        noise = states.new_zeros(states.shape[0], self.block_size, self.drafter.config.hidden_size)
        self._denoise(noise, states, None, accepted.counts)

    def skip(self, count: int, prefix: AcceptedTokens | None):
        """Start behind `count` tokens of which there are no hidden states."""
        self.start = count
        if prefix is not None:
            self.see(prefix)

    def see(self, *added: AcceptedTokens):
        """Show the head what was added to the text, where that makes candidates."""
        if self.head.reads_text:
            self.head.see([[*itertools.chain(*parts)] for parts in zip(*(part.tokens() for part in added))])

    def keep(self, cache: Cache, ids: torch.LongTensor):
        """Remember the context beside the target's KV cache, for a later call that is handed the same cache."""
        if self.unread:
            own = [[*tokens] for tokens in self.head.own] if self.head.reads_text else []
            context = self.cache.unfixed() if isinstance(self.cache, FixedContext) else self.cache
            _KEPT[cache] = KeptContext(weakref.ref(self.drafter), ids, context, self.seen, self.start, self.unread, own)

    def resume(self, cache: Cache, prefix: torch.LongTensor | None, batch: int, length: int) -> torch.LongTensor | None:
        """Take up the context that was kept beside a cache, if it is of this drafter and of all tokens in the cache.

        Args:
            prefix: (B, length) their ids, where the caller passed them.
        """
        kept = _KEPT.pop(cache, None)  # the call that takes it goes on with it; another at the same time reads anew
        if kept is None or kept.drafter() is not self.drafter or kept.ids.shape != (batch, length):
            return None
        if prefix is not None and not torch.equal(prefix, kept.ids):
            return None
        self.cache, self.seen, self.start, self.unread = kept.cache, kept.seen, kept.start, kept.unread
        if self.head.reads_text and kept.own:
            self.head.see(kept.own)
        return kept.ids

    # ---- the drafter's side

    def candidates(
        self,
        anchor: torch.LongTensor,
        context: list[torch.Tensor],
        num_draft: int,
        attention_mask: torch.Tensor | None = None,
        counts: list[int] | None = None,
    ) -> Candidates:
        """Return the candidates (B, n, C) of the next `num_draft` positions.

        Args:
            anchor: (B, 1) the newest token of every sequence; its own hidden states do not exist yet.
            context: hidden states by target layer, each (B, C, H), of the tokens before the anchor that were not read yet.
            attention_mask: (1, tokens before the anchor) with 0 at padding, or None; for one sequence.
            counts: how many of the new tokens are real in each sequence, which come first; None where all are.
        """
        if self.mask_embeds is None:
            self._borrow(context[-1].device)
        # The block is always whole: its length is part of what the drafter was trained on.
        anchor_embeds = raw_embeddings(self.embedding, anchor.to(self.embedding_device)).to(self.device)
        noise_embeds = torch.cat([anchor_embeds, self.mask_embeds.expand(len(anchor), -1, -1)], dim=1)  # (B, K, H)
        context_hidden_states = torch.cat([states.to(self.device) for states in context], dim=-1)  # (B, new, T * H)

        hidden = self._denoise(noise_embeds, context_hidden_states, attention_mask, counts)
        hidden = hidden.to(self.head_device, context[-1].dtype)
        # All positions: the head's weight is read once in any case, and kernels prefer 8 or 16 rows to 7 or 15. The first
        # position may be the anchor's own.
        first = self.block_size - self.max_draft_tokens
        return self.head(hidden).at(slice(first, first + num_draft))

    def draft_logits(self, *args, **kwargs) -> torch.Tensor:
        """Return the logits (B, n, V) of the whole vocabulary; takes what `candidates` takes."""
        return self.candidates(*args, **kwargs).over_vocabulary(self.num_tokens)

    def _borrow(self, otherwise: torch.device):
        """Note what is the same in every round: where embedding and head are, and the mask tokens' embeddings."""
        self.embedding_device = device_of(self.embedding, otherwise)
        self.head_device = device_of(self.head.module, otherwise)
        mask_token_id = self.drafter.config.mask_token_id
        mask_ids = torch.full((1, self.block_size - 1), mask_token_id, device=self.embedding_device)
        self.mask_embeds = raw_embeddings(self.embedding, mask_ids).to(self.device)

    def _denoise(self, noise_embeds, context_hidden_states, attention_mask, counts) -> torch.Tensor:
        """Run the drafter: hidden states (B, K, H) of a block. The context's keys and values stay in the KV cache, the block's leave it."""
        self.num_passes += 1
        rows, new = context_hidden_states.shape[:2]
        if isinstance(self.cache, FixedContext):
            self.seen = None if self.seen is None else [seen + new for seen in self.seen]
            return self.cache.denoise(noise_embeds, context_hidden_states)
        if counts is not None and self.seen is None:
            self.seen = [self.cache.get_seq_length()] * rows
        position_ids = shift = None
        if self.seen is not None:
            seen, behind = self._numbers(counts or [new] * rows, new, context_hidden_states.device)
            attention_mask, position_ids = self._rows_apart(seen, behind, new)
            shift = RowShift(behind[:, 0])
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
            # Back to left-padded form, before the block leaves the cache.
            for layer in self.cache.layers:
                move_right(layer, shift, conv=False)
            self.seen = [seen + count for seen, count in zip(self.seen, counts)]
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

    def _numbers(self, counts: list[int], new: int, device) -> torch.LongTensor:
        """Bring what the host counts to the device: (2, B, 1) of context tokens seen, and of new columns without a token."""
        return to_device(torch.tensor([self.seen, [new - count for count in counts]]), device)[..., None]

    def _rows_apart(self, seen: torch.LongTensor, behind: torch.LongTensor, new: int):
        """Build masks and positions (B, C + K) of rows that hold different numbers of tokens.

        A row's old context ends at the last of the P cached columns; of its new columns the last `behind` (B, 1) are not real.
        What a draft position sees is decided by positions, as it would be in that row alone.
        """
        config, past = self.drafter.config, self.cache.get_seq_length()
        column = torch.arange(past + new + self.block_size, device=seen.device)
        positions = column + (seen - past)  # (B, P + C + K), negative at padding
        block = positions[:, past + new :].sub_(behind)
        fresh = positions[:, past:] + self.start
        # A new column without a token lies at the block's positions.
        positions[:, past : past + new].masked_fill_(column[past : past + new] >= past + new - behind, -1)
        real = positions >= 0
        if is_flash(config._attn_implementation):  # it takes padding out of the rows, and no ready mask
            return real.long(), fresh
        kinds = [*zip(config.windows, config.block_causal)]
        return ragged_masks(positions, real, block, past, kinds), fresh

    def _trim(self):
        if trim := self.cache.get_seq_length() - max(self.seen):
            for layer in self.cache.layers:
                trim_left(layer, trim)


class DFlashCandidateGenerator(CandidateGenerator):
    """DFlash for transformers' own assisted decoding; our loop asks `DFlashProposer` itself.

    Args:
        drafter: a `DFlashDraftModel`.
        target: the model that it drafts for.
        num_draft_tokens: tokens to draft a round, at most `drafts_per_block` of the drafter's config.
        max_length: of the text, the prompt included; None for no limit.
    """

    requires_model_outputs = True

    def __init__(self, drafter, target: PreTrainedModel, num_draft_tokens: int, max_length: int | None = None):
        self.proposer, self.target = DFlashProposer(drafter, target), target
        self.num_draft_tokens, self.max_length = num_draft_tokens, max_length
        self.model_kwargs_overrides = {"output_hidden_states": hidden_states_request(self.proposer.target_layer_ids)}

    def get_candidates(self, input_ids, model_kwargs=None, model_outputs=None, is_first_iteration=False, **kwargs):
        """Return (1, length + n) ids, and None for the logits, so that the target chooses."""
        length = input_ids.shape[1]
        num_draft = self.num_draft_tokens
        if self.max_length is not None:
            num_draft = min(num_draft, self.max_length - length - 1)
        if is_first_iteration or num_draft < 1:
            return input_ids, None
        # All tokens but the anchor are in the target's cache; those that the drafter lacks came with the last pass.
        new = length - 1 - self.proposer.cache.get_seq_length()
        self.proposer.see(AcceptedTokens(input_ids[:, length - 1 - new :], []))
        context = [
            states[:, :new]
            for states in target_hidden_states(model_outputs.hidden_states, self.target, self.proposer.target_layer_ids)
        ]
        attention_mask = model_kwargs.get("attention_mask")
        if attention_mask is not None:
            attention_mask = attention_mask[:, : length - 1]
        candidates = self.proposer.candidates(input_ids[:, -1:], context, num_draft, attention_mask)
        if self.proposer.head.looks_back:
            tokens = walk(self.proposer.head, candidates, input_ids[:, -1:], MostLikely).tokens
        else:
            tokens = candidates.best()
        return torch.cat([input_ids, tokens.to(input_ids.device)], dim=1), None

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        """Do nothing, where transformers lets a generator adapt: the number of draft tokens is fixed."""


@dataclass
class KeptContext:
    """What a drafter knows of the tokens in a target's KV cache, between two calls.

    Args:
        drafter: whose it is; not kept alive by this.
        ids: (B, tokens) the text that the cache holds.
        unread: tokens that were accepted after the last draft.
        own: by sequence, tokens of the text that the head has seen and its draft vocabulary does not list.
    """

    drafter: weakref.ref
    ids: torch.LongTensor
    cache: DynamicCache
    seen: list[int] | None
    start: int
    unread: list[AcceptedTokens]
    own: list[list[int]]


# By the target's cache object: it dies with it.
_KEPT: "weakref.WeakKeyDictionary[Cache, KeptContext]" = weakref.WeakKeyDictionary()
