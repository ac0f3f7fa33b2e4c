"""How a drafter should propose when the target samples: acceptance of four ways, side by side.

    python -m dflash_hub.experiments.sampling_proposals --max-new-tokens 128 --seeds 2

The text's distribution is the target's in all of them, so only the rounds count:
- shared noise: ours; drafter and target draw with the same Gumbel noise
- argmax: the drafter's most likely token
- independent: the drafter draws with noise of its own
- rejection: independent draws, accepted with probability min(1, p / q) (transformers' own DFlash route)
"""

import json
import statistics
from typing import Annotated

import torch
import transformers
import typer

from ..common.console import run_plainly
from ..common.prompts import DEMO_PROMPTS, load_prompts
from ..common.smollm2 import smollm2
from ..decode_choice import GumbelNoise
from ..drafter_candidates import DFlashProposer
from ..drafter_draft import Draft
from ..generation_dflash import speculative_generate
from ..modeling_dflash import DFlashDraftModel


class Greedy(DFlashProposer):
    """Proposes the drafter's most likely token."""

    def propose(self, anchor, plan, sampler) -> Draft:
        return super().propose(anchor, plan, sampler.with_noises(None))


class Independent(DFlashProposer):
    """Draws with noise of its own."""

    own = None

    def propose(self, anchor, plan, sampler) -> Draft:
        if self.own is None:
            shared, start = sampler.noises[0], sampler.text.lengths[0]
            seed = shared.generator.initial_seed() ^ 0x5DEECE66D
            self.own = [GumbelNoise(seed, start, shared.span, sampler.text.ids.device)]
        return super().propose(anchor, plan, sampler.with_noises(self.own))


WAYS = {"shared noise": DFlashProposer, "argmax": Greedy, "independent": Independent, "rejection": None}


def run(
    target: Annotated[str | None, typer.Option(help="Default: SmolLM2-135M-Instruct.")] = None,
    drafter: Annotated[str, typer.Option(help="Repository or folder.")] = ".",
    temperature: float = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 128,
    seeds: Annotated[int, typer.Option(min=1)] = 1,
):
    """Print tau of each way, with its standard error over prompts, as a Markdown table."""
    path, source = (target, target) if target else smollm2()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    draft_model = DFlashDraftModel.from_pretrained(drafter, dtype=torch.float32)
    passes = []
    model.register_forward_pre_hook(lambda *args: passes.append(1))
    taus = {way: [] for way in WAYS}
    _, rows = load_prompts(str(DEMO_PROMPTS), 12, None)
    for row in rows:
        inputs = tokenizer.apply_chat_template(
            row["messages"], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        for way, propose in WAYS.items():
            tokens = rounds = 0
            for seed in range(seeds):
                torch.manual_seed(seed)
                passes.clear()
                settings = {
                    **inputs, "max_new_tokens": max_new_tokens, "do_sample": True, "temperature": temperature, "top_k": 0,
                    "num_assistant_tokens": draft_model.config.block_size - 1,
                }  # fmt: skip
                if propose is None:
                    output = model.generate(**settings, assistant_model=draft_model, speculation_type="dflash")
                else:
                    output, _ = speculative_generate(model, propose(draft_model, model), **settings)
                tokens += output.shape[1] - inputs["input_ids"].shape[1] - 1
                rounds += len(passes) - 1
            taus[way].append(tokens / rounds if rounds else float("nan"))
    print(f"target {source}, drafter {drafter}, temperature {temperature}, {max_new_tokens} tokens, {seeds} seed(s)")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, float32 on cpu\n")
    print("| proposal | tau | standard error over prompts |\n|---|---|---|")
    for way, values in taus.items():
        print(f"| {way} | {statistics.mean(values):.2f} | {statistics.stdev(values) / len(values) ** 0.5:.2f} |")
    print("\n" + json.dumps(taus))


if __name__ == "__main__":
    run_plainly(typer.run, run)
