"""Run z-lab's own package on prompts, in its own environment; prints output ids and rounds as JSON.

.venv-peers/bin/python tests/helpers/zlab_rounds.py DRAFTER_FOLDER TARGET_FOLDER PROMPTS.json MAX_NEW_TOKENS
"""

import json
import sys
import time

import dflash.model
import torch
from dflash.model import DFlashDraftModel, dflash_generate
from transformers import AutoModelForCausalLM

drafter_path, target_path, prompts_path, max_new_tokens = sys.argv[1:]
dflash.model._cuda_time = time.perf_counter  # it reports acceptance only together with times from a GPU's clock
target = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32)
drafter = DFlashDraftModel.from_pretrained(drafter_path, dtype=torch.float32).eval()
rows = []
with open(prompts_path) as file:
    prompts = json.load(file)
for prompt_ids in prompts:
    out = dflash_generate(
        drafter,
        target=target,
        input_ids=torch.tensor([prompt_ids]),
        max_new_tokens=int(max_new_tokens),
        stop_token_ids=[target.config.eos_token_id],
        return_stats=True,
    )
    rows.append({"output_ids": out.output_ids[0, len(prompt_ids) :].tolist(), "rounds": out.acceptance_lengths})
print(json.dumps(rows))
