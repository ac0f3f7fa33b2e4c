"""The target during one call: what its forward passes are fed, its KV cache, and the way back to the accepted tokens.

Every forward pass after the prefill goes through `TargetRunner.read`, which checks that the target read what it was asked to read.

Legend of shapes: B sequences, V vocabulary.
"""

import inspect
from dataclasses import dataclass, replace

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicSlidingWindowLayer, StaticSlidingWindowLayer

from .target_cache import CacheRollback, cached_length, refuse_unknown
from .target_check import (
    PassCheck,
    check_block,
    check_fed,
    check_read,
    checks_of,
    difference,
    is_same,
    num_fed,
    tolerance,
)
from .target_compiled import FixedShapes
from .target_model import CACHE, PassLimits, RoundInputs
from .target_ranks import TargetRanks
from .target_shift import RowShift
from .target_snapshot import CacheSnapshot
from .target_tree import MASK_FORMS, TreeShape, layer_types, tree_inputs, why_no_tree

SHORT = 8  # tokens of a prompt
BEFORE_5_24 = CACHE != "cache"


@dataclass
class Path:
    """The rows of a verified forward pass whose tokens became text, from the anchor on.

    Args:
        rows: by sequence, rising. The target's own next token is no row.
        fed: rows of the pass.

    Attributes:
        counts: by sequence, how many rows it keeps; `longest` is the most.
        branches: whether rows between the kept ones are left out, as on a path of a tree.
    """

    rows: list[list[int]]
    fed: int

    def __post_init__(self):
        self.counts = [len(rows) for rows in self.rows]
        self.longest = max(self.counts)
        self.branches = any(rows and rows[-1] != len(rows) - 1 for rows in self.rows)

    def select(self, states: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return the path's part of what a forward pass gave for its last `fed` tokens: `longest` of them along `dim`."""
        start = states.shape[dim] - self.fed
        if self.branches:  # of one sequence
            return states.index_select(dim, torch.tensor(self.rows[0], device=states.device) + start)
        return states.narrow(dim, start, self.longest)

    @property
    def even(self) -> bool:
        """Whether all sequences keep as many rows."""
        return min(self.counts) == max(self.counts)


class TargetRunner:
    """Runs the target for the loop and keeps its KV cache at the accepted tokens.

    Args:
        model_kwargs: as prepared by `generate`.
        input_ids: (B, prompt).
        passed_cache: the caller's cache, who may go on with it although the call fails; None without one.
        ranks: the processes that share the target.

    Attributes:
        num_passes, num_check_passes, num_replay_passes: forward passes made; the latter two are among the first.
        reached: rows of the newest verified pass whose logits the text has come to: plain `generate` has fed these.
        fixed: how forward passes run beside a static KV cache; None beside another one.
        mask_form: how the target takes the mask of a draft tree; None until `check_trees` has found out.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        model_kwargs: dict,
        input_ids: torch.LongTensor,
        passed_cache: Cache | None,
        ranks: TargetRanks,
    ):
        self.target, self.prompt, self.ranks = target, input_ids, ranks
        self.batch, self.device = input_ids.shape[0], input_ids.device
        self.passed_cache = passed_cache
        self.cache: Cache | None = model_kwargs.get(CACHE)
        self.limits = PassLimits(target)
        self.num_passes = self.num_check_passes = self.num_replay_passes = 0
        self.inputs: RoundInputs | None = None
        self.rollback: CacheRollback | None = None
        self.ragged = False  # whether sequences advance by counts of their own
        # While the caller's cache holds what may have to leave it: the cache as it was before.
        self.before: CacheSnapshot | None = None
        self.verified: torch.LongTensor | None = None  # what the newest verified pass was given
        self.fed, self.reached = 0, []
        self.mask_form: str | None = None
        self.fixed: FixedShapes | None = None
        self.guard()

    def guard(self):
        """Note how the caller's cache is before a forward pass changes it; see `close`."""
        if self.cache is not None and self.cache is self.passed_cache and self.before is None:
            refuse_unknown(self.cache, self.target)
            self.before = CacheSnapshot(self.cache)

    def begin(self, model_kwargs: dict, cache: Cache, prompt_length: int, columns: int, config: GenerationConfig):
        """Go on after the prefill, whose `cache` holds the prompt: `columns` tokens of each sequence."""
        self.cache = cache
        columns = cached_length(cache) or columns
        self.inputs = RoundInputs(model_kwargs, self.batch, prompt_length, columns, self.device)
        self.rollback = CacheRollback(cache, self.target)
        alone = self.rollback.recurrent is None and not self.ranks.shared
        self.fixed = FixedShapes.of(self.target, cache, config, columns + config.max_length - prompt_length, alone)

    # ---- how far a forward pass may reach

    def longest_position(self, lengths: list[int], finished: list[bool]) -> int:
        """Return the position of the newest token of the longest sequence that the next forward pass goes on with.

        In lockstep the pass feeds finished sequences too, at positions that grow like the others'.
        """
        fed = [row for row in range(self.batch) if not (self.ragged and finished[row])]
        return max(self.inputs.position(lengths[row], row) for row in fed)

    def room(self, position: int, wanted: int) -> int:
        """Tell how many of `wanted` draft tokens target and cache have room for behind an anchor at `position`."""
        positions = [position]
        if "position_ids" not in self.inputs.grown:  # it counts by the mask, or by the cache's columns
            positions.append(self.inputs.columns)
        wanted = min(self.limits.most_drafts(place, wanted) for place in positions)
        return self.rollback.most_drafts(wanted, self.inputs.columns)

    def past_drafting(self, lengths: list[int], longest: int) -> bool:
        """Tell whether the pass before these lengths, which added `longest` tokens, was past the boundary of a dynamic NTK."""
        return self.limits.past_drafting(max(self.inputs.position(n, row) for row, n in enumerate(lengths)) - longest)

    # ---- forward passes

    def verify(self, ids: torch.LongTensor, count: int, finished: list[bool], shape: TreeShape | None = None):
        """Run one forward pass over anchors and draft tokens, the last `count` of `ids`.

        Args:
            ids: (B, length) the whole text in lockstep, as some targets look at it; (B, count) in a ragged batch.
            shape: of a draft tree; None for chains.
        """
        self.fed, self.reached, self.verified = count, [], ids
        self.guard()
        with self.rollback.verifying():
            outputs = self.read(ids, count, finished, shape=shape, forward=self.fixed and self.fixed.forward)
        if outputs[CACHE] is not self.cache:  # Phi-3 starts a new one at the boundary of its RoPE
            self.rollback.close()
            self.cache, self.before, self.fixed = outputs[CACHE], None, None
            self.rollback = CacheRollback(self.cache, self.target)
        self.reached = [0]
        return outputs

    def read(
        self, ids: torch.LongTensor, count: int, finished: list[bool] = (), at_start: bool = False, shape: TreeShape | None = None,
        forward=None,
    ):  # fmt: skip
        """Run the target over the last `count` tokens of `ids`; `at_start` as if they stood at position 0."""
        held, model_inputs = self.inputs.columns, self.model_inputs(ids, count, finished, at_start)
        check_fed(self.target, model_inputs, count, self.cache, held)
        if shape is not None:
            padding = self.inputs.grown.get("attention_mask") if any(self.inputs.padding) else None
            model_inputs |= tree_inputs(self.target, self.cache, shape, held, model_inputs, padding, self.mask_form)
        if model_inputs.get(CACHE) is None:
            # Phi-3 starts a new cache at the boundary of its RoPE, with drafts in its first pass: sliding layers must keep
            # what those push out of the window, as only a cache that exists before the pass can be told.
            model_inputs[CACHE] = DynamicCache(config=self.target.config.get_text_config(decoder=True))
            model_inputs[CACHE].activate_past_recording()
        self.num_passes += 1
        outputs = (forward or self.target)(**model_inputs, return_dict=True)
        check_read(self.target, model_inputs, outputs, count, held)
        return outputs

    def model_inputs(
        self, ids: torch.LongTensor, count: int, finished: list[bool] = (), at_start: bool = False
    ) -> dict:
        """Build what the target's forward is given for the last `count` tokens of `ids`."""
        resting = [row for row, ended in enumerate(finished) if self.ragged and ended]
        ahead = self.inputs.ahead(count, self.cache, resting)
        if at_start:
            ahead["position_ids"] = torch.zeros_like(ahead["position_ids"])
        model_inputs = self.target.prepare_inputs_for_generation(
            ids, next_sequence_length=count, is_first_iteration=False, **ahead
        )
        if "logits_to_keep" in model_inputs:
            model_inputs["logits_to_keep"] = count
        return model_inputs

    # ---- what is kept of them

    def keep(self, path: Path):
        """Keep the accepted rows of the last pass in the KV cache; all others leave it."""
        shift = RowShift.of(path.counts, self.device)
        self._roll_back(path, shift)
        if trim := self.inputs.commit(path.counts, shift):
            self.rollback.trim(trim)

    def kept_ids(self, path: Path) -> torch.LongTensor:
        """Return the tokens (B, longest) of the path, anchors first; those of a sequence that keeps fewer come first."""
        return path.select(self.verified)

    def select(self, path: Path, states: torch.Tensor) -> torch.Tensor:
        """Return the path's part of hidden states of the last pass; a copy where the next one would write over them."""
        selected = path.select(states)
        return selected.clone() if self.fixed is not None and self.fixed.compile is not None else selected

    def _roll_back(self, path: Path, shift: RowShift | None = None):
        self.reached = []  # whoever interrupts a rollback has the cache as it was before the pass
        counts = path.counts
        recurrent, most = self.rollback.recurrent, max(counts)
        if path.branches:
            self.rollback.gather(self.fed, path.rows[0], self.inputs.columns)
        if recurrent is not None and 0 < most < self.fed and not recurrent.can_rerun:
            if self.ragged:
                checks_of(self.target).clear()
                raise ValueError(
                    f"the recurrent layers of {type(self.target).__name__} can no longer be seen at work, as they could in an "
                    "earlier call (was it compiled since?), and the sequences of this batch advance by counts of their own. "
                    "Call `generate` again: they will advance in lockstep."
                )
            self._replay(most)
        else:
            self.rollback.commit(self.fed, counts, shift)
        self.before = None

    def _replay(self, count: int):
        """Read accepted tokens once more, from before the pass that verified them."""
        self.rollback.commit(self.fed, [0] * self.batch)
        self.guard()
        with self.rollback.verifying():
            self.read(self.verified[:, : self.verified.shape[1] - self.fed + count], count)
        self.rollback.commit(count, [count] * self.batch)
        self.num_replay_passes += 1

    def keys_alone(self) -> list[tuple[int, int] | int | None]:
        """List by layer with keys what a pass over the next token alone would see; see `OutputRecorder.add_states`."""

        def seen(layer):
            if layer.is_compileable:
                return layer.max_cache_len if isinstance(layer, StaticSlidingWindowLayer) else None
            return self.inputs.columns + 1, getattr(layer, "sliding_window", 1 << 62)

        return [seen(layer) for layer, linear in zip(self.cache.layers, self.cache.is_linear) if not linear]

    def close(self):
        """Leave target and cache as others expect them, whatever happened.

        Where a processor, a criterion or a streamer raised, a cache that the caller passed holds the text so far; where a
        forward pass or a rollback was interrupted, it is as it was before.
        """
        try:
            if self.before is not None:
                try:
                    # Mixers of a target that ranks share run on all of them or on none, and the error may be of this one only.
                    if self.reached and not (self.ranks.shared and self.rollback.recurrent is not None):
                        self._roll_back(Path([self.reached] * self.batch, self.fed))
                finally:
                    if self.before is not None:
                        self.before.restore()
        finally:
            if self.rollback is not None:
                self.rollback.close()

    # ---- ragged batches, and what is checked of a target before the first token

    def can_be_ragged(self) -> bool:
        """Tell whether target and cache have a way for sequences of different counts, as far as their kinds say."""
        takes_mask = "attention_mask" in inspect.signature(self.target.forward).parameters
        can_move = self.rollback.moves_rows and not self.limits.by_length
        # Older transformers cannot read on in a window whose past was not cropped, which the check of a move has to do.
        if BEFORE_5_24 and any(isinstance(layer, DynamicSlidingWindowLayer) for layer in self.cache.layers):
            can_move = False
        return self.batch > 1 and takes_mask and can_move

    def set_ragged(self):
        """Let sequences advance by counts of their own from here on."""
        self.ragged = True
        self.inputs.set_apart()

    def check(
        self, logits: torch.Tensor, most: int, left: int, num_tokens: int, with_attentions: bool
    ) -> PassCheck | None:
        """Check that this target reads several tokens as it reads them one by one, before the first token of the text.

        The inputs of a forward pass are looked at in every call, its logits once a target.

        Args:
            logits: (B, 1, V) of the first token.
            most: draft tokens that a round may have.
            left: tokens that the text may still have behind its first one and the target's own.
            num_tokens: that the target can embed.
            with_attentions: whether the target is asked for attentions, for which it may take another path.

        Returns:
            What was seen; None where this call leaves no room for a draft.

        Raises:
            ValueError: the target counts in another way, or its logits differ.
        """
        length = self.prompt.shape[1]
        most_drafts = self.room(
            self.longest_position([length] * self.batch, [False] * self.batch) + 1, min(most, max(left, 0))
        )
        if most_drafts < (most if self.rollback.fixed_lengths else 1):
            return None
        count = most_drafts + 1
        first = logits[:, -1, :num_tokens].argmax(-1, keepdim=True)
        last = self.prompt[:, -1:] if length else first
        text = torch.cat([self.prompt, first.to(self.device), last.expand(-1, most_drafts)], dim=1)
        text = self.ranks.share(text)
        checks, can_be_ragged = checks_of(self.target), self.can_be_ragged()
        kind = (self.batch > 1, can_be_ragged, with_attentions, self.target.config._attn_implementation)
        found = checks.get(kind)
        if found is None:
            before = self.num_passes
            found = self._compare_passes(text, count, can_be_ragged, with_attentions)
            self.num_check_passes += self.num_passes - before
            if self.rollback.recurrent is None or length >= SHORT:  # a state of few tokens hides much
                checks[kind] = found
        else:
            check_fed(self.target, self.model_inputs(text, count), count, self.cache, self.inputs.columns)
        # Code that looks at the whole text to know what to feed has it in lockstep only.
        if found.ragged and num_fed(self.model_inputs(text[:, -count:], count)) != count:
            return replace(found, ragged=False)
        return found

    def _compare_passes(
        self, text: torch.LongTensor, count: int, can_be_ragged: bool, with_attentions: bool
    ) -> PassCheck:
        """Read the last `count` tokens of `text` (B, length) together, and the first two of them one by one.

        Where sequences can be apart, the first one is read once more after every other sequence has moved.
        """
        rollback, inputs, start = self.rollback, self.inputs, text.shape[1] - count
        with rollback.verifying():
            outputs = self.read(text, count)
            block = outputs.logits[:, :2].clone()
            states = outputs.get("hidden_states") or ()
            dtype = next((state.dtype for state in states if state is not None), self.target.dtype)
            del outputs
            can_rerun = rollback.recurrent is None or rollback.recurrent.can_rerun
            if can_be_ragged:
                moved = torch.tensor([count * (row % 2) for row in range(self.batch)])
                rollback.move(moved)
                self.inputs = inputs.moved(moved.tolist(), count)
                again = self.read(text[:, start : start + 1], 1).logits
                self.inputs = inputs
                rollback.move(count + 1 - moved, back=True)
        if not can_be_ragged:
            rollback.commit(count, [0] * self.batch)
        # A window has lost what the first token pushed out of it once the second is read: a snapshot brings it back.
        snapshot, singles = CacheSnapshot(self.cache), []
        for end, kept in ((start + 1, 1), (start + 2, 0)):
            with rollback.verifying():
                outputs = self.read(text[:, :end], 1)
            singles.append(outputs.logits)
            if outputs[CACHE] is self.cache:  # Phi-3 reads into a new one at the boundary of its RoPE
                rollback.commit(1, [kept] * self.batch)
            inputs.columns += kept
        inputs.columns -= 1
        snapshot.restore()
        with self.ranks.alone():
            recurrent = rollback.recurrent is not None
            check_block(self.target, block, torch.cat(singles, dim=1), dtype, recurrent, with_attentions)
        ragged = can_be_ragged and is_same(again[1::2], singles[0][1::2], block[1::2, :1], dtype)
        if ragged and torch.finfo(dtype).bits < 32:  # rounding could hide that the target counts the cache's columns
            ragged = self._heeds_positions(text[:, : start + 1], singles[0], block[:, :1])
        (ragged,) = self.ranks.agree([int(ragged)])  # each rank has rounded in its own way
        return PassCheck(can_rerun, bool(ragged))

    def _heeds_positions(self, text: torch.LongTensor, single: torch.Tensor, block: torch.Tensor) -> bool:
        """Tell whether the last token of `text` (B, length) has other logits at position 0; its own are given, read in two ways."""
        if "position_ids" not in self.inputs.grown:
            return False
        with self.rollback.verifying():
            elsewhere = self.read(text, 1, at_start=True).logits
        self.rollback.commit(1, [0] * self.batch)
        return difference(elsewhere, single) > 4 * difference(block, single)

    # ---- trees

    def check_trees(self, first: torch.LongTensor, with_attentions: bool) -> str | None:
        """Find out whether this target reads a draft tree as it reads the tree's paths, and in which form it takes the mask.

        Args:
            first: (1, 1) the first token of the text.
            with_attentions: whether attentions are returned.

        Returns:
            Why it cannot; None where it can.
        """
        if reason := why_no_tree(self.target, self.cache, self.batch, with_attentions):
            return reason
        if self.rollback.most_drafts(3, self.inputs.columns) < 3:
            return "the KV cache has no room for a tree"
        checks = checks_of(self.target)
        static = bool(self.cache.is_compileable)
        kind = ("tree", static, self.target.config._attn_implementation)
        if kind not in checks:
            before = self.num_passes
            checks[kind] = self._find_mask_form(first)
            self.num_check_passes += self.num_passes - before
        self.mask_form = checks[kind]
        return None if self.mask_form else f"{type(self.target).__name__} reads a tree in another way than its paths"

    def _find_mask_form(self, first: torch.LongTensor) -> str | None:
        """Read two tokens behind `first` as a chain, and beside a third one as a tree: the form that gives the same logits."""
        one, two = (self.prompt[:, -1:], self.prompt[:, :1]) if self.prompt.shape[1] else (first, first)
        behind = torch.cat([one, two], dim=1)
        snapshot, text = CacheSnapshot(self.cache), torch.cat([self.prompt, first.to(self.device)], dim=1)
        with self.rollback.verifying():
            chain = self.read(torch.cat([text, behind], dim=1), 3).logits
        snapshot.restore()
        shape = TreeShape([-1, -1, 1])  # the token beside them comes first, where a causal mask would show it
        ids = torch.cat([text, two, behind], dim=1)
        several = len(set(layer_types(self.target, self.cache))) > 1
        for self.mask_form in MASK_FORMS if several else (*reversed(MASK_FORMS),):
            try:
                with self.rollback.verifying():
                    tree = self.read(ids, 4, shape=shape).logits
                if difference(tree[:, [0, 2, 3]], chain) < tolerance(self.target.dtype):
                    return self.mask_form
            except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError):
                pass  # it takes the mask in another form, or in none
            finally:
                snapshot.restore()
        return None
