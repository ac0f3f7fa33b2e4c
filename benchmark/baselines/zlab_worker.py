"""Runs z-lab's own package in its own environment: a JSON request a line in, a JSON answer a line out."""

import json
import sys
import time

import dflash.model
import torch
from dflash.model import DFlashDraftModel, dflash_generate
from transformers import AutoModelForCausalLM

drafter_path, target_path, dtype = sys.argv[1:]
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    dflash.model._cuda_time = time.perf_counter  # it reports acceptance only with times from a GPU's clock
target = AutoModelForCausalLM.from_pretrained(target_path, dtype=getattr(torch, dtype)).to(device)
drafter = DFlashDraftModel.from_pretrained(drafter_path, dtype=getattr(torch, dtype)).eval().to(device)
stop = target.generation_config.eos_token_id
stop = [stop] if isinstance(stop, int) else stop
for line in sys.stdin:
    request = json.loads(line)
    prompt = torch.tensor([request["prompt_ids"]], device=device)
    start = time.perf_counter()
    out = dflash_generate(
        drafter,
        target=target,
        input_ids=prompt,
        max_new_tokens=request["max_new_tokens"],
        stop_token_ids=stop,
        return_stats=True,
    )
    answer = {
        "new_ids": out.output_ids[0, prompt.shape[1] :].tolist(),
        "seconds": time.perf_counter() - start,
        "first_token": out.time_to_first_token,
        "prompt_tokens_added": 1,
        "rounds": out.acceptance_lengths,
    }
    print(json.dumps(answer), flush=True)
