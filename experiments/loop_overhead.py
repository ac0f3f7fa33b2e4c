"""What the loop itself costs: seconds of a call over seconds of the same passes alone, and our throughput over others'.

    python -m dflash_hub.experiments.loop_overhead --max-new-tokens 64 --repeats 3

The passes alone are replayed right after each call: the same lengths, contexts and rounds, without choosing, comparing or
stopping. Ratios are medians over prompts and repeats, taken in turns on one machine.
"""

import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer

from ..benchmark.bench import Bench, provenance
from ..benchmark.methods import ZLAB_PYTHON, make_method
from ..common.console import run_plainly
from ..common.prompts import DEMO_PROMPTS, load_prompts
from ..common.smollm2 import smollm2
from ..drafter_candidates import DFlashProposer
from ..target_model import CACHE, hidden_states_request, target_hidden_states


@torch.no_grad()
def passes_alone(bench: Bench, prompt: torch.Tensor, new_ids: list[int], drafted: list[int], added: list[int]) -> float:
    """Seconds of the passes of one text: the prompt's, then each round's draft and verification."""
    target, layer_ids = bench.target, bench.drafter.config.target_layer_ids
    proposer = DFlashProposer(bench.drafter, target)
    text = torch.cat([prompt[0], torch.tensor(new_ids + [0] * max(drafted, default=0), device=prompt.device)])[None]
    cache = transformers.DynamicCache(config=target.config.get_text_config(decoder=True))
    request = {"output_hidden_states": hidden_states_request(layer_ids), "use_cache": True, CACHE: cache}
    if prompt.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    context = target_hidden_states(target(prompt, logits_to_keep=1, **request).hidden_states, target, layer_ids)
    cache.activate_past_recording()
    length = prompt.shape[1] + 1
    for num_draft, num_added in zip(drafted, added):
        if num_draft:
            proposer.draft_logits(text[:, length - 1 : length], context, num_draft)  # (1, n, V)
        states = target(text[:, length - 1 : length + num_draft], **request).hidden_states
        cache.crop(num_added - (num_draft + 1))
        context = [layer[:, :num_added] for layer in target_hidden_states(states, target, layer_ids)]
        length += num_added
    if prompt.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(bench: Bench, rows: list[dict], repeats: int, zlab: bool) -> dict[str, list[float]]:
    """Ratios by name; each repeat of each prompt gives one of every kind."""
    ours = f"ours-{bench.drafter.config.block_size - 1}"  # the passes of a fixed number can be replayed alone
    names = ["baseline", ours, "ceiling-1.0", "native"] + ["zlab"] * zlab
    methods = {name: make_method(name, bench) for name in names}
    ratios = {
        "oracle: call / passes alone": [],
        "shipped drafter: call / passes alone": [],
        "ours / native, tokens per second": [],
    }
    if zlab:
        ratios["ours / zlab, tokens per second"] = []
    for row in rows:
        inputs = bench.inputs(row)
        plain = methods["baseline"].run(inputs, bench.settings, 0, None).new_ids
        for repeat in range(repeats + 1):
            runs = {name: methods[name].run(inputs, bench.settings, 0, plain) for name in names[1:]}
            alone = {
                name: passes_alone(bench, inputs["input_ids"], plain, runs[name].drafted, runs[name].rounds)
                for name in ("ceiling-1.0", ours)
            }
            if repeat == 0:
                continue  # warm-up
            ratios["oracle: call / passes alone"].append(runs["ceiling-1.0"].seconds / alone["ceiling-1.0"])
            ratios["shipped drafter: call / passes alone"].append(runs[ours].seconds / alone[ours])
            ratios["ours / native, tokens per second"].append(runs["native"].seconds / runs[ours].seconds)
            if zlab:
                ratios["ours / zlab, tokens per second"].append(runs["zlab"].seconds / runs[ours].seconds)
    return ratios


def run(
    target: Annotated[str | None, typer.Option(help="Default: SmolLM2-135M-Instruct.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Default: the shipped one.")] = None,
    dtype: str = "float32",
    max_new_tokens: int = 64,
    count: Annotated[int, typer.Option(min=2, help="Prompts.")] = 4,
    repeats: int = 3,
):
    """Print the ratios as a Markdown table, with what they were measured on."""
    root = Path(__file__).parent.parent
    bench = Bench(target or smollm2()[0], drafter or str(root), None, dtype, max_new_tokens, 0.0, None)
    _, rows = load_prompts(str(DEMO_PROMPTS), count, None)
    print("| ratio | median | quartiles |\n|---|---|---|")
    for name, values in measure(bench, rows, repeats, ZLAB_PYTHON.exists()).items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"| {name} | {middle:.3f} | {low:.3f} to {high:.3f} |")
    command = f"python -m dflash_hub.experiments.loop_overhead --max-new-tokens {max_new_tokens} --count {count} --repeats {repeats}"
    print("\n" + ", ".join(f"{name} {value}" for name, value in provenance(command, bench).items()))


if __name__ == "__main__":
    run_plainly(typer.run, run)
