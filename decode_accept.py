"""Acceptance: the target chooses each token, and a draft token that equals the choice is kept.

The walk starts at the anchor. At each token of the verified pass the target's choice becomes text; where the draft has it as
the next token (chain) or as a child (tree), the walk goes on from there. One rule for greedy decoding and for sampling.

Legend of shapes: B sequences, n draft tokens of a round, F tokens of the pass, V vocabulary.
"""

import threading
from contextlib import contextmanager

import torch

from .decode_choice import Sampler
from .decode_clock import RoundClock
from .decode_state import Call, DecodeState
from .drafter_draft import Draft
from .target_runner import Path, TargetRunner


class Acceptance:
    """Appends the target's choices to the text, token by token and in order, as plain `generate` does.

    Args:
        call: its streamer is handed the tokens.
        clock: does not count the streamer's time.
    """

    def __init__(self, state: DecodeState, sampler: Sampler, runner: TargetRunner, call: Call, clock: RoundClock):
        self.state, self.sampler, self.runner, self.streamer, self.clock = state, sampler, runner, call.streamer, clock

    def walk(self, draft: Draft, logits: torch.Tensor) -> tuple[Path, list[int]]:
        """Append every draft token that equals the target's choice, and the target's own next token.

        Args:
            logits: (B, F, V) of the anchor and the draft tokens.

        Returns:
            (path, accepted): rows of the pass that the text has come to, and by sequence how many draft tokens became text.
        """
        state, text = self.state, self.state.text
        logits = logits.to(state.device, torch.float32)
        tokens, choices, scores = self._read_choices(draft, logits)
        # By the block, but where somebody's code looks at each step.
        by_token = state.batch > 1 or state.stopping.foreign or choices is None
        write = choices is None or draft.parents is not None
        rows, accepted, written = [[] for _ in range(state.batch)], [0] * state.batch, []
        for group in state.groups:
            if not state.lockstep and state.resting[group.start]:
                continue
            at: int | None = 0  # the anchor
            while at is not None:
                for sequence in range(state.batch)[group]:
                    rows[sequence].append(at)
                self.runner.reached = rows[group.start]
                if choices is None:
                    # What is recorded is what a processor that works in place makes of it, as in plain `generate`.
                    step_logits = logits[:, at].contiguous()
                    step_scores, step = self._choose_next(step_logits)
                else:
                    step_logits, step_scores = logits[:, at], None if scores is None else scores[:, at]
                    step = [choice[at] for choice in choices[group]]
                step = self._append(group, step, write)
                following = [draft.child(own, at, token) for own, token in zip(tokens[group], step)]
                for sequence, child in zip(range(state.batch)[group], following):
                    accepted[sequence] += child is not None
                if state.recorder.wants_scores:
                    state.recorder.add(step_scores, step_logits)
                state.stopping(group, text.view(group), step, state.recorder.scores)
                if by_token:
                    self._stream(step)
                else:
                    written += step
                at = None if all(state.stopping.ended[group]) or None in following else following[0]
        if written:
            self._stream(written)
        return Path(rows, logits.shape[1]), accepted

    def _read_choices(self, draft: Draft, logits: torch.Tensor):
        """Choose after every token of the pass and read draft and choices: the one synchronization of a round.

        Returns:
            (tokens, choices, scores): by sequence, -1 where no token is possible; scores (B, F, V) if they are recorded.
            Choices are None where each depends on the tokens before it: where processors keep state, and in a tree also where
            they look at the text.
        """
        state, count, sampler = self.state, len(draft), self.sampler
        read = [draft.tokens] if draft.finite is None else [draft.tokens, draft.finite]
        scores, by_block = None, sampler.stateless if draft.parents is None else sampler.scores_only
        if by_block and draft.parents is None:
            choices, scores = sampler.choose_block(draft.tokens, logits, state.recorder.scores is not None)
            read.append(choices)
        elif by_block:
            choices, scores = sampler.choose_nodes(logits, draft.shape.depths)
            read.append(choices)
        both = state.ranks.share(torch.cat(read, dim=1))  # bool becomes 0 or 1
        if by_block and draft.parents is None:
            for group in state.groups:  # what will be rejected lies behind the text's end
                state.text.write_ahead(group, both[group, -count - 1 :])
        fetched = both.tolist()
        tokens = [row[:count] for row in fetched]
        if draft.finite is not None:
            finite = [row[count : 2 * count] for row in fetched]
            state.speculation.stopped_drafting = any(0 in row for row, ended in zip(finite, state.resting) if not ended)
            # What came of logits that are not finite is no draft token, and equals no choice.
            tokens = [[token if sound else -1 for token, sound in zip(*row)] for row in zip(tokens, finite)]
        choices = [row[-count - 1 :] for row in fetched] if by_block else None
        return tokens, choices, scores

    def _choose_next(self, logits: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Choose one token with processors that keep state: they see each emitted token's logits (B, V) once, in order."""
        with self._counted_passes():
            choices, scores = self.sampler.choose_next(logits)
        return scores, self.state.ranks.agree(choices.tolist())

    @contextmanager
    def _counted_passes(self):
        """Count the target's passes that processors make, in this thread."""
        mine = threading.get_ident()

        def count(*args):
            self.state.speculation.processor_passes += threading.get_ident() == mine

        hook = self.runner.target.register_forward_pre_hook(count)
        try:
            yield
        finally:
            hook.remove()

    def _append(self, group: slice, tokens: list[int], write: bool) -> list[int]:
        """Append one token to each sequence of a group: the tokens; a finished sequence is padded.

        Args:
            write: whether the tokens have to be written, and are not in the buffer already.
        """
        state, text, final = self.state, self.state.text, []
        for row, token in zip(range(state.batch)[group], tokens):
            length, padded = text.lengths[row], state.stopping.resting(row)
            if padded:
                token = text.pad_token_id
            elif token < 0:
                raise ValueError(
                    f"no token is possible at position {length}: its processed scores hold a nan, or nothing but -inf."
                )
            if write or padded:
                text.ids[row, length] = token
            text.lengths[row] += 1
            final.append(token)
        return final

    def _stream(self, tokens: list[int]):
        if self.streamer is not None:
            with self.clock.elsewhere():
                self.streamer.put(torch.tensor(tokens))
