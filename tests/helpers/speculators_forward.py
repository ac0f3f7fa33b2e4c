"""Run the `speculators` package on our export, in its own environment: what its drafter makes of random features, and the
folder that it saves itself.

.venv-speculators/bin/python tests/speculators_forward.py FOLDER OUTPUT.safetensors SAVED_FOLDER
"""

import sys

import torch
from safetensors.torch import save_file
from speculators import SpeculatorModelConfig
from speculators.models.dflash import DFlashDraftModel

folder, output, saved = sys.argv[1:]
config = SpeculatorModelConfig.from_pretrained(folder)
config.transformer_layer_config._attn_implementation = "eager"
drafter = DFlashDraftModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
hidden, taps = config.transformer_layer_config.hidden_size, len(config.aux_hidden_state_layer_ids)

torch.manual_seed(0)
length = 24
features = torch.randn(1, length, taps * hidden)
input_ids = torch.randint(3, 90, (1, length))
with torch.no_grad():
    made, logits, _, _, block_indices = drafter._backbone_forward(
        features,
        input_ids,
        torch.ones(1, length),
        torch.randn(1, length, hidden),
        torch.zeros(1, length, dtype=torch.long),
        max_anchors=4,
    )
save_file(
    {
        "features": features, "input_ids": input_ids, "hidden": made.contiguous(), "logits": logits.contiguous(),
        "block_indices": block_indices.contiguous(), "embed_tokens": drafter.embed_tokens.weight.detach().clone(),
        "lm_head": drafter.lm_head.weight.detach().clone(),
    },
    output,
)  # fmt: skip
drafter.save_pretrained(saved)
