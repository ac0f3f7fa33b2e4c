"""Stand-ins for drafter classes of other stacks: their config fields, attributes and tensor names, and no forward.

A test may put this file as `dflash.py` beside a config, so it imports torch and transformers only.
"""

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3PreTrainedModel,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)


def add_drafter(model: nn.Module, decoder: Qwen3Config, num_taps: int):
    """Add what every stack's drafter consists of."""
    hidden, eps = decoder.hidden_size, decoder.rms_norm_eps
    model.fc = nn.Linear(num_taps * hidden, hidden, bias=False)
    model.hidden_norm, model.norm = Qwen3RMSNorm(hidden, eps=eps), Qwen3RMSNorm(hidden, eps=eps)
    model.layers = nn.ModuleList(Qwen3DecoderLayer(decoder, i) for i in range(decoder.num_hidden_layers))
    model.rotary_emb = Qwen3RotaryEmbedding(decoder)


class DFlashDraftModel(Qwen3PreTrainedModel):
    """As z-lab's and SpecForge's: a Qwen3 configuration with `dflash_config`."""

    config_class = Qwen3Config

    def __init__(self, config):
        super().__init__(config)
        add_drafter(self, config, len(config.dflash_config["target_layer_ids"]))
        self.post_init()


class Qwen3DFlashDraftModel(DFlashDraftModel):
    """As NeMo AutoModel's, which has the name of its own class in the config."""


class DFlash2DraftModel(DFlashDraftModel):
    """As z-lab's second method: a selector of paths after the head."""

    def __init__(self, config):
        super().__init__(config)
        self.candidate_selector = nn.ModuleDict({"hidden_projection": nn.Linear(config.hidden_size, 4, bias=False)})


class MarkovDraftModel(DFlashDraftModel):
    """As SpecForge's DSpark, where only the tensors tell: a Markov head."""

    def __init__(self, config):
        super().__init__(config)
        self.markov_head = nn.Linear(config.hidden_size, 4, bias=False)


class SpeculatorConfig(PreTrainedConfig):
    """As the speculators package's: the decoder's own configuration lies inside, and there is no `model_type`."""

    def to_dict(self):
        stated = super().to_dict()
        return {name: value for name, value in stated.items() if name != "model_type"}


class DFlashSpeculator(PreTrainedModel):
    """As the speculators package's: with copies of the target's embedding and head, perhaps of a part of its vocabulary."""

    config_class = SpeculatorConfig

    def __init__(self, config):
        super().__init__(config)
        decoder = Qwen3Config(**config.transformer_layer_config)
        add_drafter(self, decoder, len(config.aux_hidden_state_layer_ids))
        vocabulary, hidden, drafted = decoder.vocab_size, decoder.hidden_size, config.draft_vocab_size
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.lm_head = nn.Linear(hidden, drafted, bias=False)
        self.verifier_lm_head, self.verifier_norm = nn.Linear(hidden, drafted, bias=False), Qwen3RMSNorm(hidden)
        reduced = drafted != vocabulary
        self.register_buffer("d2t", torch.zeros(drafted, dtype=torch.long) if reduced else None)
        self.register_buffer("t2d", torch.zeros(vocabulary, dtype=torch.bool) if reduced else None)
        self.post_init()
