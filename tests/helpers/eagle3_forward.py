"""Run other packages' EAGLE-3 classes on a head of ours, in their own environment: logits of a chain's steps by full passes.

.venv-peers/bin/python tests/helpers/eagle3_forward.py {specforge,nemo} FOLDER INPUTS.safetensors OUTPUT.safetensors

Each step unrolls the pass that these packages train with, and reads its last column.
"""

import json
import os
import sys
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

package, folder, inputs, output = sys.argv[1:]
stated = json.loads((Path(folder) / "config.json").read_text())
config = LlamaConfig(**{name: value for name, value in stated.items() if name not in ("architectures", "model_type")})
config.pretraining_tp, config.pad_token_id = 1, 0
if package == "specforge":
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3, prepare_decoder_attention_mask

    model = LlamaForCausalLMEagle3(config)
else:
    from nemo_automodel.components.speculative.eagle.draft_llama import LlamaEagle3DraftModel

    model = LlamaEagle3DraftModel(config)
weights = load_file(Path(folder) / "model.safetensors")
given = load_file(inputs)
embedding = "embed_tokens.weight" if package == "specforge" else "model.embed_tokens.weight"
model = model.float()  # before weights come: some parts are made in a narrower type
model.load_state_dict(weights | {embedding: given["embedding"]}, strict=True)
model = model.eval()

tokens, drafted = given["tokens"], given["drafted"]  # (1, length + 1), (1, steps - 1)
length = tokens.shape[1] - 1
hidden = model.project_hidden_states(given["features"])  # (1, length, H)
logits, cache, ids = [], [[], []], tokens[:, 1:]
ones = torch.ones(1, length, dtype=torch.bool)
with torch.no_grad():
    for step in range(drafted.shape[1] + 1):
        if step:  # all columns move on by a token; the last one's is the drafted token
            ids = torch.cat([ids[:, 1:], drafted[:, step - 1 : step]], dim=1)
        if package == "specforge":
            mask = prepare_decoder_attention_mask(ones, (1, length), hidden, 0)
            position_ids = torch.arange(length)[None]
            hidden = model.backbone(model.embed_input_ids(ids), hidden, cache, mask, position_ids)
        else:
            hidden = model(ids, hidden, ones.long(), cache_hidden=cache)
        logits.append(model.compute_logits(hidden)[:, -1])
save_file({"logits": torch.stack(logits, dim=1).contiguous()}, output)
