"""What the caller asked to get back beside the text, recorded on the way."""

import torch
from transformers import GenerationConfig

from .target_model import COUNTS_EMBEDDING


def selected_layers(output_hidden_states: bool | int | list[int] | None) -> list[int] | None:
    """List those that the caller chose of the hidden states; None where it is a flag, as a number is for older transformers."""
    flags = (bool, type(None)) if COUNTS_EMBEDDING else (bool, type(None), int)
    if isinstance(output_hidden_states, flags):
        return None
    return [output_hidden_states] if isinstance(output_hidden_states, int) else list(output_hidden_states)


class OutputRecorder:
    """What the caller asked to get back beside the text, one entry an emitted token, as plain `generate` gives it."""

    def __init__(self, generation_config: GenerationConfig):
        wanted = generation_config.return_dict_in_generate
        self.scores = () if wanted and generation_config.output_scores else None
        self.logits = () if wanted and generation_config.output_logits else None
        self.attentions = () if wanted and generation_config.output_attentions else None
        self.hidden_states = () if wanted and generation_config.output_hidden_states else None
        self.layers = selected_layers(generation_config.output_hidden_states)  # None: all

    @property
    def wants_scores(self) -> bool:
        return self.scores is not None or self.logits is not None

    @property
    def wants_states(self) -> bool:
        return self.attentions is not None or self.hidden_states is not None

    def add(self, scores: torch.Tensor | None, logits: torch.Tensor):
        """Of one step, each (B, V), scores only where they are recorded; a copy frees the rows of the block that were rejected."""
        if self.scores is not None:
            self.scores += (scores.clone(),)
        if self.logits is not None:
            self.logits += (logits.clone(),)

    def heed_choice(self, states: tuple | None, proposers: list[int]):
        """Return all hidden states where the target ignores a choice of them, as older families do.

        Args:
            states: of a pass, by layer; None for those that the target left out.
            proposers: indices of those that the proposer asked for.
        """
        if self.hidden_states is not None and self.layers is not None:
            asked = {i % len(states) for i in (*proposers, *self.layers)}
            if any(state is not None for i, state in enumerate(states) if i not in asked):
                self.layers = None

    def add_states(self, outputs, fed: int, rows: list[int], lengths: list | None):
        """Record hidden states and attentions of some tokens of a forward pass.

        Args:
            fed, rows: the pass was over `fed` tokens, of which these became text.
            lengths: by layer with keys, how many a pass over the first token alone would see, and how many at most; a window
                of fixed size as a number; None for room of fixed size. In place of the list None for the prompt's pass, of
                which everything is kept.
        """
        if self.hidden_states is not None:
            states = outputs.hidden_states
            if self.layers is not None:
                layers = {i % len(states) for i in self.layers if -len(states) <= i < len(states)}
                states = tuple(layer if i in layers else None for i, layer in enumerate(states))
            if lengths is None:
                self.hidden_states += (states,)
            else:
                first = next(layer.shape[1] for layer in outputs.hidden_states if layer is not None) - fed
                self.hidden_states += tuple(
                    tuple(None if layer is None else layer[:, first + i : first + i + 1].clone() for layer in states)
                    for i in rows
                )
        if self.attentions is not None:
            if lengths is None:
                self.attentions += (outputs.attentions,)
            else:
                self.attentions += tuple(
                    tuple(
                        None if layer is None else _attention_of_one(layer, fed, i, keys)
                        for layer, keys in zip(outputs.attentions, lengths)
                    )
                    for i in rows
                )


def _attention_of_one(weights: torch.Tensor, fed: int, i: int, keys: tuple[int, int] | int | None) -> torch.Tensor:
    """The weights (B, heads, 1, keys) that token `i` of `fed` would have alone, of those of the block's pass."""
    start, end = 0, weights.shape[-1]
    if isinstance(keys, int):
        if end != keys:  # a block that fills the window, or moves it on, sees the keys before it and its own
            end = end - fed + i + 1
            start = max(end - keys, 0)
        own = weights[:, :, i : i + 1, start:end]
        return torch.nn.functional.pad(own, (0, keys - own.shape[-1]))
    if keys is not None:
        end = end - fed + i + 1
        start = end - min(keys[0] + i, keys[1])
    return weights[:, :, i : i + 1, start:end].clone()
