"""Run another package's DFlash 2 on a drafter in z-lab's layout; saves hidden states and, of z-lab's class, a walked path.

.venv-peers/bin/python tests/helpers/dflash2_forward.py zlab|nemo FOLDER INPUTS.pt OUTPUTS.pt
"""

import sys

import torch

package, folder, inputs_path, outputs_path = sys.argv[1:]
if package == "zlab":
    from dflash.model import DFlash2DraftModel as Model
else:
    from nemo_automodel.components.speculative.dflash.draft_qwen3_dflash2 import Qwen3DFlash2DraftModel as Model
inputs = torch.load(inputs_path)
model = Model.from_pretrained(folder, dtype=torch.float32).eval()
block, context = inputs["block"], inputs["context"]
positions = torch.arange(block.shape[1] + context.shape[1])[None]
with torch.no_grad():
    hidden = model(position_ids=positions, noise_embedding=block, target_hidden=context)
    outputs = {"hidden": hidden}
    if package == "zlab":
        head = torch.nn.Linear(*inputs["head"].shape[::-1], bias=False)
        head.weight.copy_(inputs["head"])
        outputs["path"] = model.propose(hidden[:, 1:], inputs["anchor"][:, 0], head, 0.0)[0]
torch.save(outputs, outputs_path)
