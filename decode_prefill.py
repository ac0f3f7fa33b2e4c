"""Prefill: the target reads the prompt, and the proposer is handed its hidden states.

Legend of shapes: B sequences, V vocabulary.
"""

import torch
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from .decode_state import Call, DecodeState
from .drafter_draft import AcceptedTokens, Proposer
from .target_cache import cached_length
from .target_check import check_fed, check_grown
from .target_model import (
    CACHE,
    RoundInputs,
    contiguous_head,
    encoder_outputs_by_chunk,
    hidden_states_request,
    holds_media,
    target_hidden_states,
)
from .target_runner import TargetRunner


class Prefill:
    """Reads the prompt of one call, whole or in chunks, and what a passed cache holds of it.

    Args:
        proposer: None where the call drafts nothing; no hidden states are asked for then.
    """

    def __init__(self, runner: TargetRunner, proposer: Proposer | None, state: DecodeState, call: Call):
        self.runner, self.target, self.proposer, self.state, self.call = runner, runner.target, proposer, state, call
        self.kwargs, self.prompt = call.model_kwargs, state.prompt
        self.layer_ids = [] if proposer is None else proposer.target_layer_ids
        self.past = cached_length(self.kwargs.get(CACHE))
        mask = self.kwargs.get("attention_mask")
        known = mask.shape[1] if mask is not None else getattr(call.config, "_mask_length", self.prompt.shape[1])
        # With a cache the caller may pass the whole text, what is cached included, or only what is new.
        self.whole = self.past > 0 and known == self.prompt.shape[1]
        self.new = self.prompt.shape[1] - self.past * self.whole

    def run(self) -> torch.Tensor:
        """Read the prompt.

        Returns:
            Logits (B, 1, V) in float32 of the first token of the text.
        """
        self._ask_for_states()
        prefix_ids = self.prompt[:, : self.past] if self.whole else None
        if self.past and self.proposer is not None:
            self._read_prefix(prefix_ids)
        if self.call.config.prefill_chunk_size is not None and "inputs_embeds" not in self.kwargs:
            outputs = self._read_chunks(self.prompt[:, self.prompt.shape[1] - self.new :])
        else:
            with contiguous_head(self.target):
                outputs = self.target._prefill(self.prompt, self.call.config, self.kwargs)
            self._checked(outputs)
            embeds = self.kwargs.get("inputs_embeds")
            new = self.new if embeds is None else embeds.shape[1] - self.past
            check_grown(self.target, outputs[CACHE], new, self.past)
            self._hand_over(self.prompt, outputs, self.kwargs.get("attention_mask"))
        recorder = self.state.recorder
        if recorder.wants_states:
            recorder.heed_choice(outputs.get("hidden_states"), hidden_states_request(self.layer_ids))
            recorder.add_states(outputs, self.new, [], None)
        self.runner.begin(self.kwargs, outputs[CACHE], self.prompt.shape[1], self.past + self.new, self.call.config)
        # The logits of a whole prompt can be large: a copy of the last ones lets go of the others.
        return outputs.logits[:, -1:].to(device=self.state.device, dtype=torch.float32, copy=True)

    def _ask_for_states(self):
        """Ask the target for the hidden states that the proposer reads, and those that the caller wants back."""
        recorder = self.state.recorder
        if self.layer_ids:
            self.kwargs["output_hidden_states"] = hidden_states_request(self.layer_ids)
            if recorder.hidden_states is not None:
                chosen = recorder.layers
                self.kwargs["output_hidden_states"] = (
                    True if chosen is None else hidden_states_request(self.layer_ids) + chosen
                )
        elif recorder.hidden_states is None:
            self.kwargs.pop("output_hidden_states", None)

    def _checked(self, outputs):
        name = type(self.target).__name__
        self.runner.num_passes += 1
        if outputs.get(CACHE) is None:
            raise ValueError(f"{name} returns no cache, without which a DFlash drafter cannot be used.")
        if self.layer_ids and outputs.get("hidden_states") is None:
            raise ValueError(f"{name} does not return hidden states, which a DFlash drafter needs.")
        return outputs

    def _hand_over(self, ids: torch.LongTensor, outputs, mask: torch.Tensor | None):
        """Hand the tokens that were read, and their hidden states, to the proposer; padding is left out."""
        if self.proposer is None:
            return
        states = target_hidden_states(outputs.hidden_states, self.target, self.layer_ids) if self.layer_ids else []
        length = states[0].shape[1] if states else ids.shape[1]
        missing = length - ids.shape[1]
        if missing > 0:  # what was passed as embeddings has no id
            ids = torch.nn.functional.pad(ids, (missing, 0), value=-1)
        mask = None if mask is None else mask[:, -length:]
        self.proposer.read(AcceptedTokens.of_prompt(ids[:, ids.shape[1] - length :], states, mask))

    def _read_prefix(self, prefix: torch.LongTensor | None):
        """Give the proposer the tokens in a passed cache: as kept with it, or read from the text once more."""
        kept = self.proposer.resume(self.runner.cache, prefix, self.state.batch, self.past)
        self.state.prefix = prefix if kept is None else kept
        if kept is not None:
            return
        if prefix is None or not self.call.read_prefix or holds_media(self.target, prefix):
            mask = self.kwargs.get("attention_mask")
            mask = None if mask is None else mask[:, : self.past]
            self.proposer.skip(self.past, None if prefix is None else AcceptedTokens.of_prompt(prefix, [], mask))
            return
        names = [name for name in RoundInputs.PER_TOKEN if self.kwargs.get(name) is not None]
        inputs = {name: self.kwargs[name][..., : self.past] for name in names}
        inputs |= {"input_ids": prefix, "output_hidden_states": hidden_states_request(self.layer_ids)}
        if "logits_to_keep" in self.kwargs:
            inputs["logits_to_keep"] = 1
        outputs = self.target(**inputs, use_cache=False, return_dict=True)
        self.runner.num_passes += 1
        self.state.speculation.prefix_passes += 1
        self._hand_over(prefix, outputs, inputs.get("attention_mask"))

    def _read_chunks(self, ids: torch.LongTensor):
        """Read the prompt in chunks, as `prefill_chunk_size` asks; the proposer absorbs each before the next."""
        chunks = ids.split(self.call.config.prefill_chunk_size, dim=1)
        encoded = encoder_outputs_by_chunk(self.target, self.kwargs.pop("mm_encoder_outputs", None), ids, chunks)
        images = [name for name in MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL if self.kwargs.get(name) is not None]
        if images and len(chunks) > 1:
            raise ValueError(f"`prefill_chunk_size` cannot split {images} into chunks; leave it unset.")
        columns = self.past + ids.shape[1]
        inputs = RoundInputs(self.kwargs, self.state.batch, self.prompt.shape[1], columns, self.state.device)
        inputs.columns, cache = self.past, self.kwargs.get(CACHE)
        for chunk, features_of_images in zip(chunks, encoded):
            if self.proposer is not None:
                self.proposer.absorb()
            ahead = inputs.ahead(chunk.shape[1], cache)
            model_inputs = self.target.prepare_inputs_for_generation(chunk, is_first_iteration=True, **ahead)
            model_inputs |= features_of_images
            check_fed(self.target, model_inputs, chunk.shape[1], cache, inputs.columns)
            outputs = self._checked(self.target(**model_inputs, return_dict=True))
            cache = outputs[CACHE]
            check_grown(self.target, cache, chunk.shape[1], inputs.columns)
            self._hand_over(chunk, outputs, ahead.get("attention_mask"))
            inputs.commit([chunk.shape[1]] * self.state.batch)
        return outputs
