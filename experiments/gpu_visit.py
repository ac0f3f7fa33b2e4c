"""One short visit to a machine with a GPU: what only a GPU can say, checked and measured in less than nine minutes.

    make gpu                                                                  # all parts, into build/gpu
    python -m dflash_hub.experiments.gpu_visit --toy --output build/gpu-toy   # every part at toy size, on a CPU

Each part is a process of its own and writes one file, a row at a time; a row that is there is not measured again. So a visit that
was cut short, or in which a row failed, goes on with the same command. The models are random, made on the device: nothing is
downloaded. Their greedy text is known, as each token's successor wins by far (`counting_pair`), so an oracle can propose it.
"""

import contextlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, CompileConfig, DynamicCache, Qwen3Config

from ..common.console import run_plainly
from ..common.provenance import environment, peak_bytes
from ..configuration_dflash import DFlashConfig
from ..drafter_candidates import DFlashProposer
from ..drafter_draft import Draft, Plan
from ..generation_dflash import speculative_generate
from ..hub_files import write_text
from ..modeling_dflash import DFlashDraftModel
from ..target_model import CACHE, hidden_states_request, target_hidden_states
from ..target_shift import to_device
from ..training.data import Collator, PackedRows
from ..training.losses import BlockLoss, default_gamma
from ..training.options import TrainOptions
from ..training.train import training_arguments
from ..training.trainer import DFlashTrainer

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Size:
    """Sizes of the models, and how much is measured."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    drafter_layers: int
    block: int
    dtype: torch.dtype
    compiled_layers: int  # compiling takes a second or more a layer and graph
    lengths: tuple[int, ...]  # tokens of single forward passes of the target
    trees: tuple[int, ...]
    batches: tuple[int, ...]
    accuracies: tuple[float, ...]
    prompt: int
    new: int
    repeats: int
    anchors: int
    row: int  # tokens of a training row


# Qwen3-8B and the paper's drafter for it (section 5.1), and something that a CPU runs in seconds.
PAPER = Size(
    4096, 12288, 36, 32, 8, 128, 151936, 5, 16, torch.bfloat16, 6, (1, 16, 32, 64), (15, 31, 63), (1, 4, 16), (0.6, 0.7, 0.8, 0.9),
    256, 96, 2, 512, 2048,
)  # fmt: skip
TOY = Size(64, 96, 3, 4, 2, 16, 512, 1, 4, torch.float32, 3, (1, 4), (7,), (1, 2), (0.8,), 8, 18, 1, 8, 64)


class Rows:
    """The results of one part, in a file that is whole after each row."""

    def __init__(self, name: str, output: Path):
        self.path = output / f"{name}.json"
        self.found = json.loads(self.path.read_text()) if self.path.exists() else {"part": name, "rows": {}}
        self.found |= environment()

    def add(self, name: str, measure: Callable[..., dict], *arguments) -> dict:
        """Measure one row, unless it is there. An error is a row, too: it must not cost the visit what comes after it."""
        row = self.found["rows"].get(name)
        if row is None or "error" in row:
            try:
                row = measure(*arguments)
            except Exception as error:
                traceback.print_exc()
                row = {"error": f"{type(error).__name__}: {error}"[:2000]}
            self.found["rows"][name] = row
            self.write()
            print(f"  {name}: " + ", ".join(f"{key} {shown(value)}" for key, value in row.items()), flush=True)
        return row

    def write(self):
        write_text(self.path, json.dumps(self.found, indent=1) + "\n")

    @property
    def errors(self) -> list[str]:
        return [name for name, row in self.found["rows"].items() if "error" in row]


def shown(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ------------------------------------------------------------------------------------------------------------------
# Models and drafts


def configs(size: Size, layers: int, spread: float = 0.02) -> tuple[Qwen3Config, DFlashConfig]:
    """Return the configs of a target and of its drafter, which reads layers from the second to the third last (paper, section 5.1)."""
    shape = {
        "vocab_size": size.vocab, "hidden_size": size.hidden, "intermediate_size": size.intermediate,
        "num_attention_heads": size.heads, "num_key_value_heads": size.kv_heads, "head_dim": size.head_dim,
        "max_position_embeddings": 40960, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "initializer_range": spread,
    }  # fmt: skip
    ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False}
    low, count = min(1, layers - 2), size.drafter_layers
    taps = {round(low + i * max(layers - 3 - low, 0) / max(count - 1, 1)) for i in range(count)}
    drafter = DFlashConfig(
        **shape, num_hidden_layers=size.drafter_layers, block_size=size.block, mask_token_id=size.vocab - 1, num_target_layers=layers,
        target_layer_ids=sorted(taps), num_draft_tokens=size.block - 1,
    )  # fmt: skip
    return Qwen3Config(**shape, **ends, num_hidden_layers=layers), drafter


def random_pair(size: Size, device, dtype=None, layers: int | None = None, spread: float = 0.02, attention="sdpa"):
    """Make a target and its drafter with random weights, where they are to stay."""
    config, drafter = configs(size, layers or size.layers, spread)
    torch.manual_seed(0)
    with torch.device(device):
        target = AutoModelForCausalLM.from_config(config, dtype=dtype or size.dtype, attn_implementation=attention)
        return target.eval(), DFlashDraftModel(drafter).to(target.dtype).eval()


@torch.no_grad()
def counting_pair(size: Size, device, **how):
    """Make a pair whose target counts upwards: the next token's logit is the largest by far, however passes round."""
    target, drafter = random_pair(size, device, **how)
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    head.copy_(embedding.roll(1, 0))
    embedding.mul_(1000)  # above what all layers add to it
    return target, drafter


def prompts(size: Size, batch: int, device) -> tuple[torch.LongTensor, torch.LongTensor]:
    """Return prompts (B, P) of a target that counts, and its text (B, P + new) after them."""
    length = size.prompt + size.new + size.block
    text = torch.arange(length)[None] + (torch.arange(batch)[:, None] * (size.vocab - length) // max(batch, 2)) + 1
    return text[:, : size.prompt].to(device), text


class KnownText(DFlashProposer):
    """Runs the drafter at its real cost, then proposes a known text, each token right with a given probability.

    In a tree those are the tokens of its best chain.

    Args:
        text: (B, length), prompts included.
    """

    def __init__(self, drafter, target, text: torch.LongTensor, accuracy: float):
        super().__init__(drafter, target)
        wrong = torch.rand(text.shape, generator=torch.Generator().manual_seed(0)) >= accuracy
        known = torch.where(wrong, (text + 7) % (self.num_tokens - 1), text)
        self.known = torch.nn.functional.pad(known, (0, self.block_size)).to(self.device)

    def propose(self, anchor: torch.LongTensor, plan: Plan, sampler) -> Draft:
        draft = super().propose(anchor, plan, sampler)
        chain = to_device(torch.tensor(draft.best_chain), self.device)
        places = to_device(torch.tensor(sampler.text.lengths), self.device)[:, None]
        index = places + torch.arange(len(chain), device=self.device)
        draft.tokens.index_copy_(1, chain, self.known.gather(1, index.clamp(max=self.known.shape[1] - 1)))
        return draft


# ------------------------------------------------------------------------------------------------------------------
# Measures


def timed(call: Callable) -> tuple[float, object]:
    """Return seconds of a call, and what it returned."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def median_ms(call: Callable, repeats: int) -> float:
    """Return the median of a call's milliseconds, after one that warms up."""
    return 1e3 * statistics.median([timed(call)[0] for _ in range(repeats + 1)][1:])


def waits(call: Callable) -> int:
    """Count what makes the host wait for the GPU, as torch sees it."""
    torch.set_warn_always(True)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.set_warn_always(False)
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in said)


def launches(call: Callable) -> int:
    """Count kernels and graphs that are launched; on a CPU, operations of torch."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with torch.profiler.profile(activities=activities) as profile:
        call()
    names = ("cudaLaunchKernel", "cudaGraphLaunch", "cuLaunchKernel") if torch.cuda.is_available() else ("aten::",)
    return sum(event.count for event in profile.key_averages() if event.key.startswith(names))


def speculate(target, drafter, size: Size, batch: int, accuracy: float, new: int, **call):
    """Generate `new` tokens with drafts of this accuracy: the statistics. A text that is not the target's is an error."""
    ids, text = prompts(size, batch, target.device)
    call = {"do_sample": False, "max_new_tokens": new, "num_assistant_tokens": size.block - 1} | call
    with torch.no_grad():
        output, speculation = speculative_generate(
            target, KnownText(drafter, target, text, accuracy), inputs=ids, attention_mask=torch.ones_like(ids), **call
        )
    if not output.cpu().equal(text[:, : size.prompt + new]):
        raise ValueError(f"another text than the target's own with drafts of accuracy {accuracy} in a batch of {batch}")
    return speculation


def plain(target, size: Size, batch: int, new: int, **call) -> torch.LongTensor:
    ids, _ = prompts(size, batch, target.device)
    return target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, **call)


def per_round(run: Callable[[int], object], size: Size, measure: Callable[[Callable], float]) -> float:
    """What a round adds to a measure: calls of two lengths apart, so that the prefill does not count."""
    short, long = size.new // 3, size.new
    made = {}

    def rounds(new: int) -> int:
        return max(map(len, made[new].drafted))

    def call(new: int):
        made[new] = run(new)

    figures = [measure(lambda new=new: call(new)) for new in (short, long)]
    return (figures[1] - figures[0]) / max(rounds(long) - rounds(short), 1)


# ------------------------------------------------------------------------------------------------------------------
# (a) The device tests, and equality


def device_tests(rows: Rows, size: Size, device):
    """Run `tests/hub/on_device.py`: on the GPU, or some of it on the tests' virtual one."""
    kind = "cuda" if torch.cuda.is_available() else "virtual"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/hub/on_device.py"]
    command += [] if kind == "cuda" else ["-k", "virtual_gpu_is_one"]

    def run() -> dict:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"DFLASH_TEST_DEVICE": kind}, capture_output=True, text=True
        )
        lines = done.stdout.splitlines()
        failed = [line.removeprefix("FAILED ") for line in lines if line.startswith(("FAILED", "ERROR"))]
        if done.returncode:
            print(done.stdout[-6000:] + done.stderr[-2000:])
            raise ValueError(f"{lines[-1:]} {failed}")
        return {"device": kind, "summary": lines[-1]}

    rows.add("tests/hub/on_device.py", run)


def attentions() -> list[str]:
    """List the attention backends that run here."""
    found = ["eager", "sdpa"]
    if torch.cuda.is_available():
        found += [name for name, package in FLASH.items() if importlib.util.find_spec(package)]
        found.append("flex_attention")  # the last one: it compiles
    return found


FLASH = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def equality(rows: Rows, size: Size, device):
    """Compare texts with plain `generate`'s: greedy ones, and sampled ones of one seed with good and with bad drafts."""
    small = Size(**{**vars(TOY), "dtype": size.dtype})
    for attention in attentions():
        rows.add(f"{attention}, {str(size.dtype).removeprefix('torch.')}", counted_texts, small, device, attention)
        if not attention.startswith("flash"):  # which has no float32
            rows.add(f"{attention}, float32, texts that vary", varied_texts, small, device, attention)


def counted_texts(size: Size, device, attention: str) -> dict:
    target, drafter = counting_pair(size, device, attention=attention)
    drafter.set_attn_implementation(attention)
    accepted = {}
    for batch in size.batches:
        speculation = speculate(target, drafter, size, batch, 0.7, size.new)
        accepted[f"accepted, batch {batch}"] = speculation.num_accepted
        if (
            not plain(target, size, batch, size.new)
            .cpu()
            .equal(prompts(size, batch, device)[1][:, : size.prompt + size.new])
        ):
            raise ValueError("plain `generate` does not count")
    return {"texts": "equal"} | accepted


def varied_texts(size: Size, device, attention: str) -> dict:
    target, drafter = random_pair(size, device, torch.float32, spread=0.3, attention=attention)
    drafter.set_attn_implementation(attention)
    ids, accepted = prompts(size, 2, device)[0], {}
    for sampled in (False, True):
        call = {
            "inputs": ids,
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": size.new,
            "do_sample": sampled,
            "top_k": 0,
        }

        def text_with(proposer, call=call):
            torch.manual_seed(5)
            return speculative_generate(target, proposer, num_assistant_tokens=size.block - 1, **call)

        with torch.no_grad():
            text, _ = text_with(DFlashProposer(drafter, target))
            again, speculation = text_with(KnownText(drafter, target, text.cpu(), 0.7))
        if not again.equal(text) or (not sampled and not target.generate(**call).equal(text)):
            raise ValueError(f"another {'sampled' if sampled else 'greedy'} text")
        accepted[f"accepted, {'sampled' if sampled else 'greedy'}"] = speculation.num_accepted
    return {"texts": "equal"} | accepted


# ------------------------------------------------------------------------------------------------------------------
# (b) What a round costs


def round_cost(rows: Rows, size: Size, device):
    """Time forward passes alone, then rounds, beside plain `generate`."""
    target, drafter = counting_pair(size, device)
    for batch in size.batches:
        passes = rows.add(f"batch {batch}, passes alone", passes_alone, target, drafter, size, batch)
        before = rows.add(f"batch {batch}, baseline", baseline_cost, target, size, batch)
        for accuracy in size.accuracies if batch == 1 else (0.8,):
            name = f"batch {batch}, chain, accuracy {accuracy}"
            rows.add(name, chain_cost, target, drafter, size, batch, accuracy, passes, before)
        rows.add(f"batch {batch}, counts of a round", counts, target, drafter, size, batch)
    for nodes in size.trees:
        rows.add(f"batch 1, tree of {nodes}", tree_cost, target, drafter, size, nodes)


@torch.no_grad()
def passes_alone(target, drafter, size: Size, batch: int) -> dict:
    """Time one pass of the target over some tokens, T(n), behind a prompt, and one of the drafter with embedding and head."""
    ids, text = prompts(size, batch, target.device)
    taps = drafter.config.target_layer_ids
    cache = DynamicCache(config=target.config)
    request = {CACHE: cache, "output_hidden_states": hidden_states_request(taps), "use_cache": True}
    states = target_hidden_states(target(ids, logits_to_keep=1, **request).hidden_states, target, taps)
    found = {}

    def verify(count: int):
        target(text[:, size.prompt : size.prompt + count].to(target.device), **request)
        cache.crop(-count)

    for count in size.lengths:
        found[f"T({count}) ms"] = median_ms(lambda count=count: verify(count), 5 * size.repeats)
    proposer = DFlashProposer(drafter, target)
    anchor, three = ids[:, -1:], [layer[:, :3] for layer in states]
    proposer.draft_logits(anchor, states, size.block - 1)
    found["drafter ms"] = median_ms(lambda: proposer.draft_logits(anchor, three, size.block - 1), 5 * size.repeats)
    return found


def baseline_cost(target, size: Size, batch: int, **call) -> dict:
    short, long = size.new // 3, size.new
    times = [median_ms(lambda new=new: plain(target, size, batch, new, **call), size.repeats) for new in (short, long)]
    return {"ms a token": (times[1] - times[0]) / (long - short)}


def chain_cost(target, drafter, size: Size, batch: int, accuracy: float, passes: dict, before: dict, **call) -> dict:
    """Time a round of chains, and the speedup that follows."""

    def run(new: int):
        return speculate(target, drafter, size, batch, accuracy, new, **call)

    ms = per_round(run, size, lambda one: median_ms(one, size.repeats))
    tokens = run(size.new).tau
    found = {"ms a round": ms, "tokens a round": tokens}
    if "error" not in before:
        found["speedup"] = before["ms a token"] * tokens / ms
    if (verified := f"T({size.block}) ms") in passes:
        found["over the two passes"] = ms / (passes[verified] + passes["drafter ms"])
    return found


def counts(target, drafter, size: Size, batch: int) -> dict:
    """Count waits and launches of a round of chains."""

    def run(new: int):
        return speculate(target, drafter, size, batch, 0.8, new)

    run(size.new)
    found = {"launches": per_round(run, size, launches)}
    return found | ({"waits": per_round(run, size, waits)} if torch.cuda.is_available() else {})


def tree_cost(target, drafter, size: Size, nodes: int) -> dict:
    def run(new: int):
        return speculate(target, drafter, size, 1, 0.8, new, num_tree_nodes=nodes)

    found = {
        "ms a round": per_round(run, size, lambda one: median_ms(one, size.repeats)),
        "tokens a round": run(size.new).tau,
    }
    return found | ({"waits": per_round(run, size, waits)} if torch.cuda.is_available() else {})


# ------------------------------------------------------------------------------------------------------------------
# (c) Compiled


def compiled(rows: Rows, size: Size, device):
    """Compare calls with a static KV cache, compiled, and eager ones with a dynamic one: speed, graphs and recompilations."""
    torch._dynamo.config.recompile_limit = 32
    target, drafter = counting_pair(size, device, layers=size.compiled_layers)
    config = CompileConfig()
    if not torch.cuda.is_available():
        config = CompileConfig(backend="eager", mode=None)
        config._compile_all_devices = True
    room = {"max_cache_len": size.prompt + size.new + max(size.trees) + 1}
    fast = room | {"cache_implementation": "static", "compile_config": config}
    before = rows.add("baseline, eager", baseline_cost, target, size, 1)
    rows.add("chain, eager", chain_cost, target, drafter, size, 1, 0.8, {}, before)
    rows.add("chain, compiled", lambda: warmed(lambda: chain_cost(target, drafter, size, 1, 0.8, {}, before, **fast)))
    rows.add("baseline, compiled", lambda: warmed(lambda: baseline_cost(target, size, 1, **fast)))

    def tree() -> dict:
        def run(new: int):
            return speculate(target, drafter, size, 1, 0.8, new, num_tree_nodes=min(size.trees), **fast)

        return {"ms a round": per_round(run, size, lambda one: median_ms(one, size.repeats))}

    rows.add(f"tree of {min(size.trees)}, compiled", lambda: warmed(tree))


def warmed(measure: Callable[[], dict]) -> dict:
    """Measure twice: compiling happens in the first turn, and nothing in the second."""
    seconds, _ = timed(measure)
    graphs = counters["stats"]["unique_graphs"]
    row = measure() | {"seconds of the first turn": seconds, "graphs so far": graphs}
    if again := counters["stats"]["unique_graphs"] - graphs:
        raise ValueError(f"{again} graphs were compiled after the warm-up: {row}")
    return row


# ------------------------------------------------------------------------------------------------------------------
# (d) Training


def training(rows: Rows, size: Size, device):
    """Time training steps with FlexAttention, compiled, beside SDPA with a mask, and take their peaks of memory."""
    target, _ = random_pair(size, device)
    for attention in (
        ("flex_attention", "sdpa") if torch.cuda.is_available() else ("sdpa",)
    ):  # flex needs a GPU to train
        rows.add(f"{attention}, {size.anchors} anchors", training_step, target, size, device, attention)


def training_step(target, size: Size, device, attention: str) -> dict:
    """Measure steps of one row, as `experiments/training_cost.py` does, after two that compile and allocate."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    row = {
        "id": "random",
        "turn": 0,
        "prompt_ids": [*range(size.row // 4)],
        "response_ids": [*range(3 * size.row // 4)],
    }
    with torch.device(device):
        drafter = DFlashDraftModel(configs(size, size.layers)[1])
    drafter.set_attn_implementation(attention)
    with tempfile.TemporaryDirectory() as folder:
        options = TrainOptions(
            "random", [], folder, block_size=size.block, max_steps=2, batch_size=1, bf16=size.dtype != torch.float32
        )
        arguments = training_arguments(options, 1, Path(folder), fixed=True)
        arguments.eval_strategy = arguments.save_strategy = "no"
        trainer = DFlashTrainer(
            drafter, target, arguments, PackedRows([row] * 4, None, 0), Collator(None, size.row), BlockLoss("ce", default_gamma(size.block)),
            size.anchors, [], 0, 8,
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        seconds, _ = timed(trainer.train)
    return {
        "seconds a step": seconds / 2,
        "anchors a second": 2 * size.anchors / seconds,
        "peak GiB": peak_bytes() / 2**30,
    }


# ------------------------------------------------------------------------------------------------------------------
# The visit

# Seconds that are kept for a part, together less than nine minutes; what one leaves, the next may use.
PARTS = {device_tests: 120, equality: 70, round_cost: 150, compiled: 130, training: 60}
NAMES = {part.__name__: part for part in PARTS}


def run_part(name: str, output: Path, toy: bool) -> list[str]:
    """Run one part in this process: names of rows with errors."""
    transformers.logging.set_verbosity_error()
    rows = Rows(name, output)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    start = time.perf_counter()
    NAMES[name](rows, TOY if toy else PAPER, device)
    rows.found |= {"finished": not rows.errors, "seconds": rows.found.get("seconds", 0) + time.perf_counter() - start}
    rows.write()
    return rows.errors


def finished(output: Path, name: str) -> bool:
    path = output / f"{name}.json"
    return path.exists() and json.loads(path.read_text()).get("finished", False)


def in_a_process(name: str, output: Path, toy: bool, limit: float) -> str | None:
    """Run one part in a process that is ended after `limit` seconds, with its own: what went wrong, if something did."""
    command = [sys.executable, "-m", "dflash_hub.experiments.gpu_visit", "--one", name, "--output", str(output)]
    process = subprocess.Popen(command + ["--toy"] * toy, start_new_session=True)
    try:
        return f"{name}: rows with errors" if process.wait(limit) else None
    except subprocess.TimeoutExpired:
        return f"{name}: not finished after {limit:.0f} s; what it found so far is kept"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def main(
    output: Annotated[Path | None, typer.Option(help="Where results go. Default: $OUT, else build/gpu.")] = None,
    toy: Annotated[bool, typer.Option("--toy", help="Small models, which a CPU runs, too.")] = False,
    part: Annotated[list[str] | None, typer.Option(help=f"{', '.join(NAMES)}; repeatable. Default: all.")] = None,
    seconds: Annotated[float, typer.Option(help="For all parts together.")] = 530,
    one: Annotated[str | None, typer.Option(hidden=True)] = None,
):
    """Run the parts that have no result yet, print each as it ends, and say what failed."""
    if not toy and not torch.cuda.is_available():
        raise ValueError("there is no GPU here. Add --toy to try every part at toy size on a CPU.")
    output = output or Path(os.environ.get("OUT") or ROOT / "build" / "gpu")
    output.mkdir(parents=True, exist_ok=True)
    if one is not None:
        raise SystemExit(bool(run_part(one, output, toy)))
    if unknown := sorted(set(part or []) - set(NAMES)):
        raise ValueError(f"--part {unknown[0]!r} is none of {', '.join(NAMES)}.")
    end, wrong = time.monotonic() + seconds, []
    due = [name for name in part or NAMES if not finished(output, name)]
    for name in [name for name in part or NAMES if name not in due]:
        print(f"{name}: done before, in {output}", flush=True)
    for number, name in enumerate(due):
        left, kept = end - time.monotonic(), [PARTS[NAMES[other]] for other in due[number:]]
        if left < 10:
            wrong.append(f"{name}: no time left")
            continue
        print(name, flush=True)
        wrong += filter(None, [in_a_process(name, output, toy, max(left - sum(kept[1:]), min(left, kept[0])))])
    print("\n".join([*wrong, f"results: {output}" + "; the same command goes on" * bool(wrong)]), flush=True)
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    run_plainly(typer.run, main)
