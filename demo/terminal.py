"""`dflash-hub demo`: a real target with its drafter against the same target alone, in a terminal."""

import time
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..modeling_dflash import DFlashDraftModel
from .smollm2 import smollm2

PROMPTS = [
    "A baker makes 24 rolls every morning. She sells 5 to each of 4 neighbours and freezes the rest. How many rolls does "
    "she freeze?\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "Tom has 3 boxes with 12 pencils each. He gives 8 pencils to his sister. How many pencils are left?\n"
    "Please reason step by step, and put your final answer within \\boxed{}.",
    "A train travels 60 miles in the first hour and 45 miles in the second. The ticket costs $2 for every 15 miles. What "
    "does the whole trip cost?\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "Why is the sky blue? Answer in two sentences.",
]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DRAFTED = "black on green"


def run(
    prompts: list[str] | None,
    target: str | None,
    drafter: str | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    dtype: str,
):
    """Stream each prompt's text with accepted drafted tokens coloured, then show what the drafter saved.

    Raises:
        ValueError: an unknown dtype, or a pair that does not fit.
        FileNotFoundError: no target could be found.
    """
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype!r} is none of {', '.join(DTYPES)}.")
    transformers.utils.logging.disable_progress_bar()
    console = Console(highlight=False)
    path, source = (target, target) if target else smollm2()
    drafter = drafter or str(Path(__file__).parent.parent)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype]).to(device)
    draft_model = DFlashDraftModel.from_pretrained(drafter, dtype=DTYPES[dtype]).to(device)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    console.print(
        f"target:  {source}\ndrafter: {drafter}\n{dtype} on {device}, transformers {transformers.__version__}"
    )
    console.print(Text("accepted drafted tokens", DRAFTED), "have this colour; the others the target chose itself\n")

    table = Table("#", "tokens", "target passes", "tau", "seconds", "plain s", "speed-up", "same text")
    for number, prompt in enumerate(prompts or PROMPTS, start=1):
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        ).to(device)
        prompt_length = inputs["input_ids"].shape[1]
        model.generate(**inputs, max_new_tokens=2, do_sample=False)  # warm-up
        model.generate(**inputs, max_new_tokens=4, do_sample=False, assistant_model=draft_model)

        console.print(Text(f"{number}. {prompt}", "bold"))
        streamer = DraftStreamer(tokenizer, console)
        torch.manual_seed(seed)
        output, seconds = _timed(
            model, inputs, max_new_tokens, sampling, assistant_model=draft_model, streamer=streamer
        )
        speculation = draft_model.last_speculation
        streamer.finish(speculation.accepted[0][-1] if speculation.accepted[0] else 0)
        torch.manual_seed(seed)
        plain, plain_seconds = _timed(model, inputs, max_new_tokens, sampling)

        identical = "sampled" if temperature else ("yes" if torch.equal(output, plain) else "NO")
        table.add_row(
            str(number),
            str(output.shape[1] - prompt_length),
            str(speculation.target_passes),
            f"{speculation.tau:.2f}",
            f"{seconds:.2f}",
            f"{plain_seconds:.2f}",
            f"{plain_seconds / seconds:.2f}x",
            identical,
        )
    console.print(table)
    if temperature:
        console.print("Sampled texts have the same distribution with and without a drafter, but other random numbers.")


def _timed(model, inputs, max_new_tokens: int, sampling: dict, **kwargs) -> tuple[torch.Tensor, float]:
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, **sampling, **kwargs)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return output, time.perf_counter() - start


class DraftStreamer:
    """Prints the text as it comes; a piece is one round: drafted tokens, then the target's own.

    Only the last round can end on a drafted token, so each piece waits for the next one, and the last for `finish`.
    """

    def __init__(self, tokenizer, console: Console):
        self.tokenizer = tokenizer
        self.console = console
        self.waiting: list[int] | None = None
        self.tokens: list[int] = []
        self.printed = 0
        self.prompt_seen = False

    def put(self, value: torch.Tensor):
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        if self.waiting is not None:
            self._print(self.waiting, len(self.waiting) - 1)
        self.waiting = value.flatten().tolist()

    def end(self):
        pass

    def finish(self, accepted: int):
        """Print the last piece, of which `accepted` tokens were drafted."""
        self._print(self.waiting, accepted)
        self.console.print("\n")

    def _print(self, tokens: list[int], drafted: int):
        for part, style in ((tokens[:drafted], DRAFTED), (tokens[drafted:], "")):
            self.tokens += part
            text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
            if not text.endswith("�"):  # half a character: wait for its other bytes
                self.console.print(Text(text[self.printed :], style), end="", soft_wrap=True)
                self.printed = len(text)
