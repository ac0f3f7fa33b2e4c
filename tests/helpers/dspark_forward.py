"""Run NeMo's DSpark on a drafter in DSpark's layout; saves hidden states, the walked path and its confidences.

.venv-peers/bin/python tests/helpers/dspark_forward.py FOLDER INPUTS.pt OUTPUTS.pt
"""

import sys

import torch
from nemo_automodel.components.speculative.dspark.draft_qwen3 import Qwen3DSparkModel

folder, inputs_path, outputs_path = sys.argv[1:]
inputs = torch.load(inputs_path)
model, info = Qwen3DSparkModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
assert set(info["missing_keys"]) <= {"embed_tokens.weight", "lm_head.weight"} and not info["unexpected_keys"], info
model.eval()
block, context, anchor = inputs["block"], inputs["context"], inputs["anchor"][:, 0]
positions = torch.arange(block.shape[1] + context.shape[1])[None].expand(len(block), -1)
with torch.no_grad():
    model.lm_head.weight.copy_(inputs["head"])
    hidden = model._forward_backbone(position_ids=positions, noise_embedding=block, target_hidden_states=context)
    outputs = {"hidden": hidden}
    outputs["path"], _ = model.sample_draft_tokens(
        model.compute_logits(hidden), first_prev_token_ids=anchor, hidden_states=hidden
    )
    before = torch.cat([anchor[:, None], outputs["path"][:, :-1]], dim=1)
    confidence = model.predict_confidence_step(hidden, before)
    outputs["confidence"] = None if confidence is None else confidence.view(before.shape).sigmoid()
torch.save(outputs, outputs_path)
