"""`dflash-hub bench`: methods side by side in one run, prompt by prompt, into a folder that can be resumed.

A folder holds `settings.json` (what was measured, and with what), `records-R.jsonl` (one line a text; R is the process),
and the report that is made of them.
"""

import dataclasses
import itertools
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import accelerate
import torch
import transformers

from ..common.chat import check_written, first_turn, in_mode, own_turn, turns_of
from ..common.console import duration, progress_bar, size
from ..common.files import appending, complete_lines, read_json, refuse_repeated
from ..common.identity import identify
from ..common.loading import drafter_config, dtype_of, load_tokenizer, room_for_answer
from ..common.provenance import environment, peak_bytes
from ..common.server import Server
from ..common.target_source import TargetSource
from ..hub_files import check_finite, write_text
from ..modeling_dflash import DFlashDraftModel
from .baselines.eagle3_loading import load_eagle3
from .methods import drafted_by, make_method
from .rows import with_new_name

TIE = 1e-4  # float32: two passes that differ by rounding may choose differently between scores this close


class Bench:
    """The models of one run, loaded once, and the generation settings that all methods share."""

    def __init__(
        self,
        target: str | TargetSource,
        drafter: str | None,
        assistant: str | None,
        dtype: str,
        max_new_tokens: int,
        temperature: float,
        thinking: bool | None,
        chat_template: str | None = None,
        servers: Sequence[Server] = (),
        eagle3: str | None = None,
    ):
        self.state = accelerate.PartialState(cpu=not torch.accelerator.is_available())
        self.source, self.drafter_path = TargetSource.of(target), drafter
        self.assistant_path, self.eagle3_path = assistant, eagle3
        load = {"dtype": dtype_of(dtype), "device_map": {"": self.state.device}}
        if drafter:
            drafter_config(drafter)
        self.drafter = DFlashDraftModel.from_pretrained(drafter, **load).eval() if drafter else None
        if self.drafter is not None:
            check_finite(dict(self.drafter.named_parameters()), drafter)
            self.source = self.source.for_drafter(self.drafter.config)
        self.tokenizer = load_tokenizer(self.source, chat_template)
        self.target = self.source.model(**load).eval()
        self.assistant = (
            transformers.AutoModelForCausalLM.from_pretrained(assistant, **load).eval() if assistant else None
        )
        self.eagle3 = load_eagle3(eagle3, self.target, load["dtype"]) if eagle3 else None
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        self.settings = {"max_new_tokens": max_new_tokens, **sampling}
        if thinking is None and self.drafter is not None:
            thinking = self.drafter.config.target_thinking  # in another mode it would accept little
        self.thinking = thinking
        self.servers = servers
        self._zlab = None

    def template_settings(self, row: dict) -> dict:
        """Keyword arguments of the chat template for a prompt."""
        return in_mode(self.thinking) | ({"tools": row["tools"]} if row.get("tools") else {})

    def inputs(self, row: dict, messages: list[dict] | None = None) -> dict:
        """Model inputs of a prompt's first turn, or of `messages`, its conversation so far.

        Raises:
            ValueError: the target has too few positions for it and the new tokens (every method must write as many), or its
                chat template leaves a part of it out.
        """
        messages, settings = messages or first_turn(row), self.template_settings(row)
        check_written(self.tokenizer, messages, settings)
        encoded = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt", **settings
        )
        length, new = encoded["input_ids"].shape[1], self.settings["max_new_tokens"]
        room = room_for_answer(self.target, length)
        if room is not None and room < new:
            raise ValueError(
                f"a prompt has {length} tokens ({messages[-1]['content'][:40]!r}), which leaves the target {room} positions for "
                f"an answer of {new}; lower --max-new-tokens, or leave the prompt out."
            )
        return dict(encoded.to(self.target.device))

    def weights(self) -> dict[str, str | None]:
        """Fingerprints of the models: a drafter that is trained on in its folder is another one."""
        models = {"target": self.target, "drafter": self.drafter, "assistant": self.assistant, "eagle3": self.eagle3}
        return {f"{name} weights": model and identify(model)["weights"] for name, model in models.items()}

    def zlab_folder(self) -> str:
        """The drafter in z-lab's layout, written to a temporary folder that lives as long as the run."""
        from ..convert.exporting import export_drafter

        self._zlab = tempfile.TemporaryDirectory()
        folder = Path(self._zlab.name) / "drafter"
        export_drafter(self.drafter_path, folder)
        return str(folder)

    def resolved(self) -> dict:
        """The generation config that every method runs with, the target's own defaults included."""
        config, _ = self.target._prepare_generation_config(None, **self.settings)
        return config.to_diff_dict() | self.settings

    def tie_gap(self, inputs: dict, text: list[int], other: list[int]) -> float:
        """How close the baseline's two best scores lie where another output first differs from it (a teacher-forced pass)."""
        at = next((i for i, pair in enumerate(zip(text, other)) if pair[0] != pair[1]), min(len(text), len(other)))
        ids = torch.cat([inputs["input_ids"], torch.tensor([text[:at]], device=self.target.device)], dim=1)
        with torch.no_grad():
            best = self.target(ids).logits[0, -1].float().topk(2).values
        return float(best[0] - best[1])


def run_bench(
    output: Path,
    bench: Bench,
    methods: list[str],
    sets: list[tuple[str, list[dict]]],
    choice_seed: int | None,
    seed: int,
    command: str,
) -> None:
    """Measure what `output` does not hold yet. Methods take turns on every prompt, so that drift of the machine hits all.

    Args:
        sets: of `load_prompts`; `choice_seed` is what they were chosen with.

    Raises:
        ValueError: the folder holds a run with other settings, weights or code, something is named twice, a prompt is too
            long, or a method cannot run; says which.
    """
    # Records are told apart by these names.
    refuse_repeated("method", methods)
    refuse_repeated("prompt set", [name for name, _ in sets])
    for name, rows in sets:
        refuse_repeated(f"id in {name}", [row["id"] for row in rows])
        for row in rows:
            bench.inputs(row)
    runners = {name: make_method(name, bench) for name in methods}
    stamp = provenance(command, bench)
    settings = {
        "target": bench.source.path,
        **({"target_revision": bench.source.revision} if bench.source.revision else {}),
        "drafter": bench.drafter_path,
        "drafted_by": {name: drafted_by(name, bench) for name in methods},
        **bench.weights(),
        **({"servers": [f"{server.model} at {server.root}" for server in bench.servers]} if bench.servers else {}),
        "commit": stamp["commit"],
        "methods": methods,
        "sets": {name: [row["id"] for row in rows] for name, rows in sets},
        "dtype": str(bench.target.dtype),
        "generation": bench.resolved(),
        "thinking": bench.thinking,
        "choice_seed": choice_seed,
        "seed": seed,
    }
    if bench.state.is_main_process:
        _open_folder(output, settings, stamp)
    bench.state.wait_for_everyone()
    done = {(r["method"], r["set"], r["id"], r["turn"]) for r in read_records(output)}

    # A prompt of each set in turn, so that drift of the machine hits all sets alike too.
    by_set = [[(name, row) for row in rows] for name, rows in sets]
    work = [item for turn in itertools.zip_longest(*by_set) for item in turn if item is not None]
    with (
        bench.state.split_between_processes(work) as mine,
        progress_bar(disable=not bench.state.is_main_process) as bar,
        appending(output / f"records-{bench.state.process_index}.jsonl") as file,
    ):
        task = bar.add_task("prompts", total=len(mine))
        warm = False
        for set_name, row in mine:
            bar.update(task, description=f"{set_name} {row['id']}"[:40])
            missing = any(
                (m, set_name, row["id"], t) not in done for m in methods for t in range(len(turns_of(row["messages"])))
            )
            if missing:
                if not warm:
                    seconds = _warm_up(bench, runners, row)  # for a token, by every method
                    warm = True
                    if bench.state.is_main_process:
                        print(forecast(mine, seconds, methods, bench.settings["max_new_tokens"], output), flush=True)
                for record in measure(bench, runners, set_name, row, seed):
                    if (record["method"], set_name, row["id"], record["turn"]) not in done:
                        file.write(json.dumps(record) + "\n")
                file.flush()
            bar.advance(task)
    bench.state.wait_for_everyone()


def measure(bench: Bench, runners: dict, set_name: str, row: dict, seed: int):
    """Yield one record a method and turn. The order of methods is shuffled by prompt; the baseline goes first."""
    messages, greedy = [], not bench.settings["do_sample"]
    order = [name for name in runners if name != "baseline"]
    random.Random(row["id"]).shuffle(order)
    order = ["baseline"] * ("baseline" in runners) + order
    for number, turn in enumerate(turns_of(row["messages"])):
        messages += turn.messages
        inputs = bench.inputs(row, messages)
        baseline_ids = answer = None
        for name in order:
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            run = runners[name].run(inputs, bench.settings, seed, baseline_ids)
            answer = answer or run.new_ids
            if name == "baseline":
                baseline_ids = run.new_ids
            same = run.new_ids == baseline_ids if greedy and baseline_ids is not None else None
            record = {
                "method": name, "set": set_name, "id": row["id"], "turn": number,
                "prompt_tokens": inputs["input_ids"].shape[1], "same_text": same, "peak_bytes": peak_bytes(),
            }  # fmt: skip
            if same is False:
                record["tie_gap"] = bench.tie_gap(inputs, baseline_ids, run.new_ids)
            yield record | dataclasses.asdict(run)
        messages += turn.kept or [own_turn(bench.tokenizer, messages, answer, bench.template_settings(row))]


def forecast(work: list[tuple[str, dict]], seconds: float, methods: list[str], limit: int, output: Path) -> str:
    """Say what a run will take: tokens, time, memory and disk, of this process."""
    outputs = sum(len(turns_of(row["messages"])) for _, row in work)
    return (
        f"{outputs} outputs by {len(methods)} methods, at most {outputs * len(methods) * limit:,} tokens\n"
        f"time: at most {duration(outputs * limit * seconds)} (measured on a few tokens of the first prompt; what is in {output} "
        f"already comes off)\nmemory: {size(peak_bytes())} until now\ndisk: at most {size(outputs * len(methods) * limit * 20)}"
    )


def _warm_up(bench: Bench, runners: dict, row: dict) -> float:
    """Run every method once; returns the seconds that all of them took for a token."""
    inputs = bench.inputs(row)
    baseline_ids, seconds = None, 0.0
    for name, runner in runners.items():
        run = runner.run(inputs, bench.settings | {"max_new_tokens": 12}, 0, baseline_ids)
        baseline_ids = run.new_ids if name == "baseline" else baseline_ids
        seconds += run.seconds / max(1, len(run.new_ids))
    return seconds


def _open_folder(output: Path, settings: dict, origin: dict):
    path = output / "settings.json"
    if path.exists():
        before, now = read_settings(output)["settings"], json.loads(json.dumps(settings))
        changed = [
            _difference(name, before.get(name), value) for name, value in now.items() if before.get(name) != value
        ]
        if changed:
            raise ValueError(
                f"{output} holds a run with other {', '.join(changed)}; resume with the same, or pass another --output."
            )
        return
    output.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({"settings": settings, "provenance": origin}, indent=1) + "\n")


def _difference(name: str, before, now) -> str:
    """The name, and both values where they are short."""
    short = all(value is None or (isinstance(value, (str, int)) and len(str(value)) < 80) for value in (before, now))
    return f"{name} ({before}, now {now})" if short else name


def read_settings(folder: Path) -> dict:
    path = folder / "settings.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no benchmark run (no settings.json).")
    return read_json(path, "settings", "provenance")


def read_records(folder: Path) -> list[dict]:
    """Read all complete lines; a line that an interruption cut is measured again."""
    records = [record for path in sorted(folder.glob("records-*.jsonl")) for record in complete_lines(path)]
    return [with_new_name(record) for record in records]


def provenance(command: str, bench: Bench) -> dict:
    """Where a number comes from: it stands beside every report."""
    return {"command": command, **environment(), "processes": bench.state.num_processes}
