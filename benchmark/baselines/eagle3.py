"""EAGLE-3 as a proposer for our loop: chains, and EAGLE-2's dynamic trees. Verification, choice and clocks are those of DFlash.

A pair is a token's target hidden states and the token after it; it stands at the first one's position. The draft model's KV cache
holds pairs of accepted tokens only. What it made of its own output while it drafted leaves the cache before the next draft.

Legend of shapes: B sequences, C pairs of a pass, S pairs in the KV cache, H width of the draft model, n draft tokens, K beams.
"""

import torch
from transformers import DynamicCache, PreTrainedModel

from ...drafter_draft import AcceptedTokens, Draft, Plan
from ...target_model import device_of, embedding_rows, embedding_width, raw_embeddings
from ...target_shift import to_device
from .eagle3_model import Eagle3DraftModel

NUM_BEAMS = 10  # branches a step, and beams that go on, as EAGLE-2 is published
MAX_DRAFT_TOKENS = 8  # levels of its tree; a chain of as many


class Eagle3Proposer:
    """Runs an EAGLE-3 draft model for one call; the methods are those of `Proposer`.

    Args:
        target: lends its embedding where the draft model has none.
        max_draft_tokens: positions that a draft has at most; each takes a forward pass.
        num_beams: of a tree.
    """

    def __init__(
        self,
        model: Eagle3DraftModel,
        target: PreTrainedModel,
        max_draft_tokens: int = MAX_DRAFT_TOKENS,
        num_beams: int = NUM_BEAMS,
    ):
        self.model, self.max_draft_tokens, self.num_beams = model, max_draft_tokens, num_beams
        self.target_layer_ids = model.options.target_layer_ids
        self.device, self.num_passes = device_of(model, target.device), 0
        self.embedding = model.embed_tokens or target.get_input_embeddings()
        self.embedding_device = device_of(self.embedding, self.device)
        listed = model.options.draft_vocab_size
        self.notes = (
            [f"{model.name} drafts {listed} of {embedding_rows(target)} tokens"] if model.options.listed else []
        )

        self.cache = DynamicCache()
        self.positions: torch.Tensor | None = None  # (B, S) of the pairs in the KV cache, -1 at padding
        self.seen: list[int] | None = None  # pairs by sequence
        self.next: torch.Tensor | None = None  # (B, 1) position of the next pair
        self.start = 0  # position of the first pair; not 0 where a prefix was left out
        self.unread: list[AcceptedTokens] = []

    # ---- the loop's side

    def check(self, target: PreTrainedModel):
        """Refuse a target that the draft model does not fit.

        Raises:
            ValueError: names the draft model, what it was made for and what the target has.
        """
        options, text = self.model.options, target.config.get_text_config(decoder=True)
        pair = f"the EAGLE-3 draft model {self.model.name!r} does not fit {type(target).__name__}"
        if options.target_hidden_size != text.hidden_size:
            raise ValueError(
                f"{pair}: it reads hidden states of width {options.target_hidden_size}, the target's have {text.hidden_size}."
            )
        # The last layer's output is known after the target's final norm only.
        if self.target_layer_ids[-1] >= text.num_hidden_layers - 1:
            raise ValueError(
                f"{pair}: it reads the outputs of layers {self.target_layer_ids}, the target has layers 0 to "
                f"{text.num_hidden_layers - 1}, and the last one's output is not kept as it was trained on."
            )
        if self.model.config.vocab_size > embedding_rows(target):
            raise ValueError(
                f"{pair}: it was made for a vocabulary of {self.model.config.vocab_size}, the target embeds "
                f"{embedding_rows(target)} tokens."
            )
        width = embedding_width(target)
        if self.model.embed_tokens is None and width != self.model.config.hidden_size:
            raise ValueError(
                f"{pair}: it has no embedding of its own and a width of {self.model.config.hidden_size}, the target's embedding has "
                f"{width}."
            )

    def read(self, accepted: AcceptedTokens):
        """Keep accepted tokens until the next draft.

        Raises:
            ValueError: the prompt was passed as embeddings; the draft model embeds tokens itself.
        """
        if self.seen is None and not self.unread and bool((accepted.ids < 0).any()):
            raise ValueError("EAGLE-3 reads the ids of the prompt's tokens; pass `input_ids`, not `inputs_embeds`.")
        self.unread.append(accepted)

    def absorb(self):
        """Read all tokens but the last, whose pair needs the next one. The padded prompts of a batch are kept as they are."""
        accepted = AcceptedTokens.joined(self.unread) if self.unread else None
        if accepted is None or accepted.counts is not None or accepted.ids.shape[1] < 2:
            return
        before = AcceptedTokens(accepted.ids[:, :-1], [layer[:, :-1] for layer in accepted.states])
        self._read_pairs(before, accepted.ids[:, -1:])
        self.unread = [AcceptedTokens(accepted.ids[:, -1:], [layer[:, -1:] for layer in accepted.states])]

    def skip(self, count: int, prefix: AcceptedTokens | None):
        """Start behind `count` tokens of which there are no hidden states."""
        self.start = count

    def keep(self, cache, ids: torch.LongTensor):
        """Keep nothing: a call that is handed the cache reads its tokens once more."""

    def resume(self, cache, prefix, batch: int, length: int) -> None:
        """Return None, see `keep`."""

    def propose(self, anchor: torch.LongTensor, plan: Plan, sampler) -> Draft:
        """Draft a chain of `plan.num_draft_tokens` tokens behind the anchor (B, 1), or a tree as deep as that."""
        accepted, self.unread = AcceptedTokens.joined(self.unread), []
        hidden = self._read_pairs(accepted, anchor)
        held = self.cache.get_seq_length()
        draft = self._chain if plan.num_nodes is None else self._tree
        draft = draft(hidden, plan, sampler)
        if provisional := self.cache.get_seq_length() - held:
            self.cache.crop(-provisional)
        return draft

    # ---- the draft model's side

    def _embed(self, tokens: torch.LongTensor) -> torch.Tensor:
        return raw_embeddings(self.embedding, tokens.to(self.embedding_device)).to(self.device)

    def _run(self, hidden, tokens, position_ids, mask) -> torch.Tensor:
        self.num_passes += 1
        return self.model(hidden, self._embed(tokens), position_ids, mask, self.cache)

    def _read_pairs(self, accepted: AcceptedTokens, anchor: torch.LongTensor) -> torch.Tensor:
        """Read the pairs of accepted tokens, the last of which is with the anchor: its output (B, 1, H)."""
        rows, new = accepted.ids.shape
        counts = accepted.counts or [new] * rows
        first = [self.start + seen for seen in self.seen or [0] * rows]
        self.seen = [seen + count for seen, count in zip(self.seen or [0] * rows, counts)]
        # What the host counts comes to the device in one copy, which nothing waits for.
        numbers = [first, counts, [max(count - 1, 0) for count in counts], [self.start + seen for seen in self.seen]]
        first, counts, last, self.next = to_device(torch.tensor(numbers), self.device)[..., None]  # each (B, 1)
        anchor = anchor.to(self.device)
        following = torch.cat([accepted.ids[:, 1:].to(self.device), anchor], dim=1).scatter(1, last, anchor)

        column = torch.arange(new, device=self.device)
        position_ids = first + column
        fresh = position_ids.masked_fill(column >= counts, -1)
        self.positions = fresh if self.positions is None else torch.cat([self.positions, fresh], dim=1)
        keys = self.positions[:, None, None]  # (B, 1, 1, S + C)
        mask = (keys >= 0) & (keys <= position_ids[:, None, :, None])
        hidden = self._run(self.model.fuse(accepted.states), following, position_ids, mask)
        return hidden.gather(1, last[..., None].expand(-1, 1, hidden.shape[-1]))

    def _chain(self, hidden: torch.Tensor, plan: Plan, sampler) -> Draft:
        """Draft one token a pass from the output (B, 1, H) of the last pair."""
        held = self.positions >= 0  # (B, S)
        tokens, finite = [], []
        for step in range(plan.num_draft_tokens):
            if step:
                held = torch.nn.functional.pad(held, (0, 1), value=True)
                hidden = self._run(hidden, tokens[-1], self.next + step - 1, held[:, None, None])
            best, sound = sampler.shortlist(self.model.candidates(hidden), 1, step)
            tokens.append(sampler.pick(best, step))
            finite.append(sound)
        return Draft(torch.cat(tokens, dim=1), finite=torch.cat(finite, dim=1))

    def _tree(self, hidden: torch.Tensor, plan: Plan, sampler) -> Draft:
        """Grow a tree level by level from the output (1, 1, H) of the last pair: the best beams go on, the best nodes are kept.

        A node's score is the sum of log probabilities along its path.
        """
        tokens, scores, sound = self._children(hidden, 0, sampler)  # (1, K)
        tree = GrowingTree(tokens[0], scores[0])
        held = self.positions >= 0  # (1, S)
        seen = held.expand(tree.width, -1)  # which columns a beam's path has read, by beam
        hidden = hidden.expand(-1, tree.width, -1)  # of each beam's parent
        for level in range(1, plan.num_draft_tokens):
            own = torch.eye(tree.width, dtype=torch.bool, device=self.device)
            seen = torch.cat([seen, own], dim=1)
            positions = (self.next + level - 1).expand(-1, tree.width)
            hidden = self._run(hidden, tree.tokens[tree.beams][None], positions, seen[None, None])
            tokens, scores, good = self._children(hidden, level, sampler)
            sound = sound & good
            parents = tree.grow(tokens, scores, self.num_beams).to(self.device)  # (K) among the beams before
            hidden, seen = hidden[:, parents], seen[parents]
        if not bool(sound):  # the target would be handed tokens that mean nothing
            return Draft(tree.tokens[None, :1], finite=torch.zeros_like(tree.tokens[None, :1], dtype=torch.bool))
        return tree.best(plan.num_nodes)

    def _children(self, hidden: torch.Tensor, level: int, sampler):
        """Return the likeliest tokens behind each output (1, K, H), their log probabilities, each (K, C), and if all are finite."""
        candidates = self.model.candidates(hidden)
        best = sampler.likeliest(candidates, self.num_beams, level)
        if sampler.noises is not None:  # it is known, and decides what the target will choose
            log_probs = sampler.log_probs(best.logits)
        else:
            total = candidates.logits[0].float().logsumexp(dim=-1, keepdim=True)
            log_probs = best.logits - total.to(best.logits.device)
        return best.ids, log_probs.clamp(max=0.0), ~log_probs.isnan().any()


class GrowingTree:
    """EAGLE-2's tree while it grows: all candidates so far, and those that go on as beams.

    Args:
        tokens, scores: (K) of the first level.

    Attributes:
        tokens, scores, parents: (M) of all candidates; a parent is an index among them, -1 for the anchor.
        beams: (K) indices of those that go on.
    """

    def __init__(self, tokens: torch.LongTensor, scores: torch.Tensor):
        self.tokens, self.scores = tokens, scores
        self.parents = torch.full_like(tokens, -1)
        self.beams = torch.arange(len(tokens), device=tokens.device)

    @property
    def width(self) -> int:
        """K of this level."""
        return len(self.beams)

    def grow(self, tokens: torch.LongTensor, log_probs: torch.Tensor, num_beams: int) -> torch.LongTensor:
        """Add the children (K, C) of the beams. The best of them go on: returns the index of each one's parent among the beams."""
        scores = (self.scores[self.beams, None] + log_probs).flatten()
        best = scores.topk(min(num_beams, len(scores))).indices
        self.parents = torch.cat([self.parents, self.beams.repeat_interleave(tokens.shape[1])])
        self.beams = len(self.tokens) + best
        self.tokens, self.scores = torch.cat([self.tokens, tokens.flatten()]), torch.cat([self.scores, scores])
        return best // tokens.shape[1]

    def best(self, num_nodes: int) -> Draft:
        """Return the best candidates as a draft. A parent scores no less than its children and comes before them, so it is there."""
        order = self.scores.sort(descending=True, stable=True).indices[:num_nodes]
        indices, parents, scores = torch.stack(
            [order.double(), self.parents[order].double(), self.scores[order].double()]
        ).tolist()
        count = sum(score > -torch.inf for score in scores)  # those that are no token come last
        places = {-1: -1} | {index: place for place, index in enumerate(indices)}
        return Draft(self.tokens[order][None, :count], [places[parent] for parent in parents[:count]], scores[:count])
