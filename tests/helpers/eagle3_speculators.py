"""Make a random EAGLE-3 head with the `speculators` package, save it as the package does, and run its own pass on random features.

.venv-speculators/bin/python tests/helpers/eagle3_speculators.py OPTIONS.json FOLDER OUTPUT.safetensors
"""

import json
import os
import sys

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

options, folder, output = sys.argv[1:]
stated = json.loads(options)
kind = Qwen3Config if stated.pop("model_type") == "qwen3" else LlamaConfig
layer, listed = kind(**stated.pop("layer")), torch.tensor(stated.pop("listed"))
layer._attn_implementation = "eager"  # with flex attention its own pass needs rows of whole blocks
made_for = SpeculatorsConfig(
    algorithm="eagle3", proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)], default_proposal_method="greedy",
    verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
)  # fmt: skip
config = Eagle3SpeculatorConfig(
    transformer_layer_config=layer, draft_vocab_size=len(listed), speculators_config=made_for, **stated
)
model = Eagle3DraftModel(config).float().eval()
torch.manual_seed(0)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(std=0.3)
t2d = torch.zeros(layer.vocab_size, dtype=torch.bool)
t2d[listed] = True
model.load_vocab_mappings(t2d, listed - torch.arange(len(listed)))
model.save_pretrained(folder)

length = 12
features = torch.randn(1, length, len(config.eagle_aux_hidden_state_layer_ids) * layer.hidden_size)
tokens = torch.randint(3, layer.vocab_size, (1, length + 1))
logits = []
model.lm_head.register_forward_hook(lambda module, args, found: logits.append(found))
with torch.no_grad():
    model(features, tokens[:, 1:], torch.zeros(1, length, dtype=torch.long), ttt_steps=2)
save_file(
    {
        "features": features, "tokens": tokens, "first": logits[0].contiguous(), "second": logits[1].contiguous(),
        "embedding": model.embed_tokens.weight.detach().clone(),
    },
    output,
)  # fmt: skip
