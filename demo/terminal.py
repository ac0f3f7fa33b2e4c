"""`dflash-hub demo`: a real target with its drafter against the same target alone, in a terminal."""

import time

import torch
import transformers
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..common.target_source import TargetSource
from .pair import DraftStreamer, Pair

PROMPTS = [
    "A baker makes 24 rolls every morning. She sells 5 to each of 4 neighbours and freezes the rest. How many rolls does "
    "she freeze?\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "Tom has 3 boxes with 12 pencils each. He gives 8 pencils to his sister. How many pencils are left?\n"
    "Please reason step by step, and put your final answer within \\boxed{}.",
    "A train travels 60 miles in the first hour and 45 miles in the second. The ticket costs $2 for every 15 miles. What "
    "does the whole trip cost?\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "Why is the sky blue? Answer in two sentences.",
]
DRAFTED = "black on green"


def run(
    prompts: list[str] | None,
    target: TargetSource | None,
    drafter: str | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    dtype: str,
):
    """Stream each prompt's text with accepted draft tokens colored, then show what the drafter saved.

    Raises:
        ValueError: an unknown dtype, a pair that does not fit, an empty prompt, or one that leaves the target no position.
        FileNotFoundError: no target could be found.
    """
    prompts = prompts or PROMPTS
    if not all(prompt.strip() for prompt in prompts):
        raise ValueError("the prompt is empty; pass --prompt TEXT, or leave it out for a few of ours.")
    console = Console(highlight=False)
    pair = Pair(target, drafter, dtype)
    model, draft_model = pair.target, pair.drafter
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    console.print(
        f"target:  {pair.source}\ndrafter: {pair.drafter_path}\n"
        f"{dtype} on {pair.device}, transformers {transformers.__version__}"
    )
    console.print(Text("accepted draft tokens", DRAFTED), "have this color; the others the target chose itself\n")

    table = Table("#", "tokens", "forward passes", "acceptance length", "seconds", "baseline s", "speedup", "same text")
    encoded = [pair.encode([{"role": "user", "content": prompt}]) for prompt in prompts]
    settings = [pair.fitting({"max_new_tokens": max_new_tokens} | sampling, inputs) for inputs in encoded]
    for number, (prompt, inputs, call) in enumerate(zip(prompts, encoded, settings), start=1):
        prompt_length = inputs["input_ids"].shape[1]
        warm_up = {"max_new_tokens": min(4, call["max_new_tokens"]), "do_sample": False}
        model.generate(**inputs, **warm_up)
        model.generate(**inputs, **warm_up, assistant_model=draft_model)

        console.print(Text(f"{number}. {prompt}", "bold"))
        streamer = DraftStreamer(pair.tokenizer, colored(console))
        torch.manual_seed(seed)
        output, seconds = _timed(model, inputs, call, assistant_model=draft_model, streamer=streamer)
        speculation = draft_model.last_speculation
        streamer.finish(speculation)
        console.print("\n")
        torch.manual_seed(seed)
        baseline, baseline_seconds = _timed(model, inputs, call)

        identical = "sampled" if temperature else ("yes" if torch.equal(output, baseline) else "NO")
        table.add_row(
            str(number),
            str(output.shape[1] - prompt_length),
            str(speculation.target_passes),
            f"{speculation.tau:.2f}" if speculation.acceptance_lengths[0] else "-",
            f"{seconds:.2f}",
            f"{baseline_seconds:.2f}",
            f"{baseline_seconds / seconds:.2f}x",
            identical,
        )
    console.print(table)
    if temperature:
        console.print("Sampled texts have the same distribution with and without a drafter, but other random numbers.")


def colored(console: Console):
    """What shows a part of the text in the color of who chose it."""

    def show(text: str, drafted: bool):
        console.print(Text(text, DRAFTED if drafted else ""), end="", soft_wrap=True)

    return show


def _timed(model, inputs, settings: dict, **kwargs) -> tuple[torch.Tensor, float]:
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    output = model.generate(**inputs, **settings, **kwargs)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return output, time.perf_counter() - start
