"""Measuring: what is counted is what happened, runs resume, and reports say where their numbers come from."""

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
from dflash_hub import DFlashDraftModel
from dflash_hub.benchmark import bench as bench_module
from dflash_hub.benchmark import report
from dflash_hub.benchmark.bench import Bench, read_records, run_bench
from dflash_hub.benchmark.methods import check_methods, make_method
from dflash_hub.benchmark.server import acceptance_length, measure_server
from dflash_hub.cli.app import app
from dflash_hub.common import provenance, tables
from dflash_hub.common.prompts import SETS, load_prompts, read_prompts
from dflash_hub.common.server import Server
from dflash_hub.demo.pair import Pair
from dflash_hub.experiments.loop_overhead import measure as measure_loop
from helpers.eagle3 import tiny_head, write_head
from helpers.folders import save_target
from helpers.tiny import tiny_drafter
from transformers import AutoTokenizer
from typer.testing import CliRunner

METHODS = ["baseline", "lookup", "assistant", "native", "ours", "ours-2", "ceiling-1.0", "ceiling-0.5"]


@pytest.fixture
def models(tmp_path):
    """A target with a tokenizer, a drafter for it, and a small assistant, as folders."""
    target = save_target(tmp_path / "target", words=97)
    target.generation_config.eos_token_id = 2
    target.save_pretrained(tmp_path / "target")
    tiny_drafter(num_target_layers=8).save_pretrained(tmp_path / "drafter")
    save_target(tmp_path / "assistant", words=97)
    with (tmp_path / "words.jsonl").open("w") as file:
        for i in range(4):
            turns = [f"w{i} w{i + 7} w{3 * i}", "w5 w6"][: 1 + (i == 3)]
            messages = [{"role": "user", "content": turn} for turn in turns]
            file.write(json.dumps({"id": f"words-{i}", "messages": messages}) + "\n")
    return tmp_path


def bench_of(models, temperature=0.0, max_new_tokens=12):
    return Bench(
        str(models / "target"), str(models / "drafter"), str(models / "assistant"), "float32", max_new_tokens, temperature, None
    )  # fmt: skip


def run(models, output, methods=METHODS, count=3, **kwargs):
    run_bench(
        output,
        bench_of(models, **kwargs),
        methods,
        [load_prompts(str(models / "words.jsonl"), count, None)],
        None,
        0,
        "the command",
    )
    return read_records(output)


def test_pitfall_47_what_is_counted_is_what_happened(models):
    """Pitfall 47: the time to the first token is a figure of its own."""
    records = {(r["method"], r["id"]): r for r in run(models, models / "run")}
    assert len(records) == len(METHODS) * 3
    for (method, row_id), r in records.items():
        plain = records["baseline", row_id]
        assert r["new_ids"] == plain["new_ids"] and r["same_text"] is True
        assert sum(r["rounds"]) == len(r["new_ids"]) - r["prompt_tokens_added"]
        assert r["prompt_tokens_added"] == 1 or method in ("lookup", "assistant")
        assert 0 < r["first_token"] < r["seconds"] and 0 < r["target_seconds"] < r["seconds"]
        assert r["target_passes"] == len(r["rounds"]) + 1
        if method == "baseline":
            assert r["rounds"] == [1] * (len(r["new_ids"]) - 1) and r["drafter_passes"] == 0
        if method in ("ours", "native"):
            assert r["drafter_passes"] > 0 and r["draft_seconds"] > 0
        if method == "ours":
            assert (
                r["rounds"] == records["native", row_id]["rounds"]
                or r["rounds"][:-1] == records["native", row_id]["rounds"][:-1]
            )
        if method == "ours-2":
            assert max(r["drafted"]) == 2
        if method == "ceiling-1.0":
            assert r["accepted"][:-1] == r["drafted"][:-1]
            assert len(r["rounds"]) < len(plain["rounds"])
    halves = [records["ceiling-0.5", f"words-{i}"] for i in range(3)]
    accepted, drafted = sum(sum(r["accepted"]) for r in halves), sum(sum(r["drafted"]) for r in halves)
    assert 0 < accepted < drafted


def test_eagle3_stands_beside_the_others_under_its_name(models):
    """In one table with prompt lookup and assisted generation, on the same texts, with chains and both sizes of trees."""
    listed = [token for token in range(97) if token % 5]
    head = write_head(models / "some-head", "specforge", tiny_head(listed=listed, target_layer_ids=[1, 3, 4]))
    methods = ["baseline", "lookup", "assistant", "ours", "eagle3", "eagle3-2", "eagle3-tree16", "eagle3-tree60"]
    for temperature, measured in ((0.0, methods), (0.9, ["eagle3", "eagle3-tree16"])):
        output = models / f"run {temperature}"
        bench = Bench(
            str(models / "target"), str(models / "drafter"), str(models / "assistant"), "float32", 12, temperature, None,
            eagle3=str(head),
        )  # fmt: skip
        run_bench(output, bench, measured, [load_prompts(str(models / "words.jsonl"), 2, None)], None, 0, "the command")
        records = [r for r in read_records(output) if r["method"].startswith(("eagle3", "baseline"))]
        texts = {(r["method"], r["id"]): r["new_ids"] for r in records}
        for r in records:
            assert r["same_text"] is (True if temperature == 0 else None)
            if r["method"] == "baseline":
                continue
            # Sampled texts depend on the seed, and not on who drafts or in what shape.
            assert r["new_ids"] == texts["eagle3", r["id"]]
            assert (
                r["drafted"][0] <= {"eagle3": 7, "eagle3-2": 2}.get(r["method"], 8)
                and 0 < r["draft_seconds"] < r["seconds"]
            )
            # A pass a position; a tree takes all levels before it knows which nodes are the best.
            passes, drafted = r["drafter_passes"], sum(r["drafted"])
            assert passes > drafted if "tree" in r["method"] else passes == drafted
            assert r["outside"] == sum(token not in listed for token in r["new_ids"])
        text = report.write_report(output)
        names = {"lookup": "the text itself", "assistant": "[^|]*/assistant", "ours": "[^|]*/drafter", "baseline": "-"}
        assert all(re.search(rf"\| {name} \| {names.get(name, '[^|]*/some-head')} \|", text) for name in measured)
        assert "not in the draft vocabulary of" in text


def test_eagle3_needs_a_head_that_fits(models):
    with pytest.raises(ValueError, match="the method 'eagle3-tree60' needs --eagle3"):
        check_methods(["baseline", "eagle3-tree60"], None, None)
    head = write_head(models / "wide", "specforge", tiny_head(target_hidden_size=48), target_hidden_size=48)
    bench = Bench(str(models / "target"), None, None, "float32", 8, 0.0, None, eagle3=str(head))
    with pytest.raises(ValueError, match="hidden states of width 48, the target's have 32"):
        make_method("eagle3", bench)


def test_both_turns_are_measured(models):
    records = run(models, models / "run", ["baseline", "ours"], count=4)
    turns = {(r["id"], r["turn"]) for r in records}
    assert turns == {(f"words-{i}", 0) for i in range(4)} | {("words-3", 1)}
    lengths = {r["turn"]: r["prompt_tokens"] for r in records if r["id"] == "words-3"}
    assert lengths[1] > lengths[0] + 2


def test_an_interrupted_run_resumes_and_other_settings_are_refused(models):
    output = models / "run"
    before = run(models, output, ["baseline", "ours"], count=2)
    path = output / "records-0.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:2]) + "\n" + lines[2][:40])  # cut in the middle of a line
    again = run(models, output, ["baseline", "ours"], count=2)
    key = lambda r: (r["method"], r["id"])  # noqa: E731
    assert sorted(map(key, again)) == sorted(map(key, before))
    assert path.read_text().splitlines()[:3] == [*lines[:2], lines[2][:40]]
    assert run(models, output, ["baseline", "ours"], count=2) == again  # and nothing is measured once more
    with pytest.raises(ValueError, match="holds a run with other sets"):
        run(models, output, ["baseline", "ours"], count=3)
    with pytest.raises(ValueError, match="holds a run with other generation"):
        run(models, output, ["baseline", "ours"], count=2, max_new_tokens=20)


def test_a_drafter_that_was_trained_on_or_other_code_is_another_run(models, monkeypatch):
    """Else one table would hold two drafters under one path."""
    run(models, models / "run", ["baseline", "ours"], count=2)
    drafter = DFlashDraftModel.from_pretrained(models / "drafter")
    with torch.no_grad():
        drafter.norm.weight += 1e-3
    drafter.save_pretrained(models / "drafter")
    with pytest.raises(ValueError, match=r"other drafter weights \(\w{16}, now \w{16}\); resume with the same"):
        run(models, models / "run", ["baseline", "ours"], count=2)
    tiny_drafter(num_target_layers=8).save_pretrained(models / "drafter")
    monkeypatch.setattr(provenance, "commit", lambda: "abc123")
    with pytest.raises(ValueError, match=r"other commit \(.+, now abc123\)"):
        run(models, models / "run", ["baseline", "ours"], count=2)


def test_what_is_named_twice_or_does_not_fit_is_refused_before_anything_is_written(models):
    prompts, bench = str(models / "words.jsonl"), bench_of(models, max_new_tokens=510)
    for methods, sources, sentence in (
        (["baseline", "baseline"], [prompts], "several times the method 'baseline'"),
        (["baseline"], [prompts, prompts], "several times the prompt set 'words'"),
        (["baseline"], [prompts], r"leaves the target \d+ positions for an answer of 510; lower --max-new-tokens"),
    ):
        with pytest.raises(ValueError, match=sentence):
            run_bench(
                models / "run",
                bench,
                methods,
                [load_prompts(source, 2, None) for source in sources],
                None,
                0,
                "the command",
            )
    (models / "twice.jsonl").write_text('{"id": "a", "messages": [{"role": "user", "content": "w1"}]}\n' * 2)
    with pytest.raises(ValueError, match="several times the id in twice 'a'"):
        run_bench(
            models / "run",
            bench,
            ["baseline"],
            [load_prompts(str(models / "twice.jsonl"), 2, None)],
            None,
            0,
            "the command",
        )
    bench.settings["max_new_tokens"] = 8
    with pytest.raises(ValueError, match="no method ' ours'"):
        run_bench(models / "run", bench, [" ours"], [load_prompts(prompts, 2, None)], None, 0, "the command")
    assert not (models / "run").exists()


def test_the_command_strips_names_and_refuses_rows_that_nothing_takes(models, monkeypatch):
    called = []
    monkeypatch.setattr(
        bench_module, "Bench", lambda *args: SimpleNamespace(state=SimpleNamespace(is_main_process=False))
    )
    monkeypatch.setattr(bench_module, "run_bench", lambda output, bench, methods, *args: called.append(methods))
    arguments = ["bench", "--target", "t", "--output", str(models / "run"), "--methods"]
    assert CliRunner().invoke(app, [*arguments, "baseline, ours"]).exit_code == 0 and called == [["baseline", "ours"]]
    done = CliRunner().invoke(app, [*arguments, "lookup", "--rows", "2"])
    assert isinstance(done.exception, ValueError) and "--rows measures baseline and ours" in str(done.exception)
    assert len(called) == 1


def test_sampled_methods_are_not_compared_by_text(models):
    records = run(models, models / "run", ["baseline", "ours", "native"], count=2, temperature=0.9)
    assert {r["same_text"] for r in records} == {None}


@pytest.mark.parametrize(
    ("name", "sentence"),
    (
        ("theirs", "no method 'theirs'"),
        ("ceiling-2", "no method 'ceiling-2'"),
        ("assistant", "needs --assistant"),
        ("ours", "needs --drafter"),
    ),
)
def test_unknown_methods_and_missing_models_are_named(name, sentence, models):
    bench = Bench(str(models / "target"), None, None, "float32", 8, 0.0, None)
    with pytest.raises(ValueError, match=sentence):
        make_method(name, bench)


def test_an_oracle_needs_plain_before_it(models):
    with pytest.raises(ValueError, match="run `baseline` before it"):
        run(models, models / "run", ["ceiling-0.5"], count=2)


# ------------------------------------------------------------------------------------------------- prompts


def test_prompts_in_z_labs_formats_with_the_ids_of_local_files(monkeypatch, tmp_path):
    import types

    rows = {
        "gsm8k": {"question": "Q?"},
        "math500": {"problem": "P", "unique_id": "test/algebra/1.json"},
        "aime25": {"problem": "P"},
        "humaneval": {"prompt": "def f():\n", "task_id": "HumanEval/0"},
        "mbpp": {"prompt": "Write f.", "task_id": 11},
        "livecodebench": {"question_content": "Do it.", "question_id": "abc_1"},
        "mt-bench": {"prompt": ["One", "Two"], "prompt_id": 81, "category": "writing"},
        "alpaca": {"instruction": "Do", "input": "this"},
    }
    loaded = []

    def load_dataset(*args, split):
        loaded.append(args)
        return [next(row for name, row in rows.items() if SETS[name].load == args)] * 2

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    boxed = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    expected = {
        "gsm8k": ("gsm8k-test-0", ["Q?" + boxed]),
        "math500": ("test/algebra/1.json", ["P" + boxed]),
        "humaneval": (
            "HumanEval/0",
            [
                "Write a solution to the following problem and make sure that it passes the tests:\n```python\ndef f():\n\n```"
            ],
        ),
        "mbpp": ("mbpp-11", ["Write f."]),
        "mt-bench": ("mt_bench-81-writing", ["One", "Two"]),
        "alpaca": ("alpaca-0", ["Do\n\nInput:\nthis"]),
    }
    for name in SETS:
        _, got = load_prompts(name, 2, None)
        if name in expected:
            row_id, turns = expected[name]
            assert got[0] == {"id": row_id, "messages": [{"role": "user", "content": turn} for turn in turns]}
    assert len(loaded) == len(SETS)


def test_bad_prompts_are_named(tmp_path):
    with pytest.raises(ValueError, match="no file and none of the prompt sets gsm8k"):
        load_prompts("nowhere", 4, None)
    (tmp_path / "x.jsonl").write_text('{"id": "a", "messages": [{"role": "user", "content": "x"}]}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match=r"x.jsonl, line 2: expected"):
        load_prompts(str(tmp_path / "x.jsonl"), 2, None)
    (tmp_path / "y.jsonl").write_text("no JSON\n")
    with pytest.raises(ValueError, match=r"y.jsonl, line 1: expected .* got 'no JSON'"):
        load_prompts(str(tmp_path / "y.jsonl"), 2, None)
    with pytest.raises(ValueError, match="one prompt proves nothing"):
        load_prompts(str(tmp_path / "x.jsonl"), 1, None)


@pytest.mark.parametrize(
    "line",
    (
        "[1]", "5", '{"id": "a", "messages": 3}', '{"id": "a", "messages": []}', '{"id": "a", "messages": [3]}',
        '{"id": "a", "messages": [{"role": "user", "content": 5}]}', '{"id": "a", "messages": [{"role": "user"}]}',
        '{"id": ["a"], "messages": [{"role": "user", "content": "x"}]}',
        '{"id": "a", "messages": [{"role": "system", "content": "x"}]}', '{"id": "a", "messages": [{"role": "sage", "content": "x"}]}',
    ),
)  # fmt: skip
@pytest.mark.parametrize("read", (read_prompts, lambda path: load_prompts(path, 2, None)))
def test_a_row_of_another_shape_is_named(line, read, tmp_path):
    (tmp_path / "x.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"x.jsonl, line 1: .*expected .* got "):
        read(str(tmp_path / "x.jsonl"))


def test_training_knows_the_sets_by_name_and_takes_other_splits_of_them(monkeypatch):
    calls = []

    def load_dataset(*name, split):
        calls.append((name, split))
        if name == ("none",):
            raise RuntimeError("no data here\nand more")
        return [{"question": "Q?"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_prompts("gsm8k") == load_prompts("gsm8k", 2, None)[1]
    (row,) = read_prompts("gsm8k:train")
    assert row["id"] == "gsm8k-test-0:train" and row["messages"][0]["content"].startswith("Q?\nPlease reason")
    assert calls[-1] == (("openai/gsm8k", "main"), "train")
    with pytest.raises(ValueError, match="'none' is no file, none of the prompt sets gsm8k.*: no data here$"):
        read_prompts("none")


def test_the_choice_is_seeded(tmp_path):
    lines = [json.dumps({"id": str(i), "messages": [{"role": "user", "content": "x"}]}) for i in range(50)]
    (tmp_path / "eval_x.jsonl").write_text("\n".join(lines))
    name, first = load_prompts(str(tmp_path / "eval_x.jsonl"), 5, None)
    assert name == "x" and [r["id"] for r in first] == list("01234")
    chosen = [[r["id"] for r in load_prompts(str(tmp_path / "eval_x.jsonl"), 5, seed)[1]] for seed in (1, 1, 2)]
    assert chosen[0] == chosen[1] != chosen[2]


# ------------------------------------------------------------------------------------------------- the report


def record(method, row_id, rounds, seconds, drafted=(), accepted=(), same=True):
    return {
        "method": method, "set": "s", "id": row_id, "turn": 0, "prompt_tokens": 10, "same_text": same, "peak_bytes": 1,
        "new_ids": [0] * (sum(rounds) + 1), "seconds": seconds, "first_token": 0.1, "rounds": rounds, "tie_gap": 1.0,
        "target_passes": len(rounds) + 1, "drafter_passes": len(drafted), "drafted": list(drafted),
        "accepted": list(accepted), "target_seconds": seconds / 2, "draft_seconds": seconds / 4, "pass_seconds": {"1": [0.1]},
    }  # fmt: skip


def folder_of(path, records):
    path.mkdir()
    settings = {
        "target": "t", "drafter": "d", "methods": ["baseline", "ours"], "sets": {"s": ["a", "b"]}, "dtype": "torch.float32",
        "generation": {"do_sample": False}, "thinking": False, "choice_seed": 0, "seed": 0,
    }  # fmt: skip
    origin = {
        "command": "dflash-hub bench ...", "commit": "abc", "date": "2026-11-29", "device": "CPU", "processes": 1,
        "python": "3", "torch": "2", "transformers": "5",
    }  # fmt: skip
    (path / "settings.json").write_text(json.dumps({"settings": settings, "provenance": origin}))
    (path / "records-0.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


PLAIN = [record("baseline", "a", [1] * 8, 4.0), record("baseline", "b", [1] * 8, 4.0)]
OURS = [
    record("ours", "a", [4, 4], 2.0, [3, 3], [3, 3]),
    record("ours", "b", [1, 3, 4], 2.0, [3, 3, 3], [0, 2, 3], same=False),
]


def test_figures_follow_from_records(tmp_path):
    rows = {row["method"]: row for row in report.summarize(folder_of(tmp_path / "r", PLAIN + OURS))}
    ours = rows["ours"]
    assert (
        ours["acceptance_length"][0] == pytest.approx(16 / 5)
        and ours["acceptance_length"][1] <= 16 / 5 <= ours["acceptance_length"][2]
    )
    assert ours["speedup"] == (2.0, 2.0, 2.0) and ours["tokens_per_second"] == pytest.approx(18 / 4)
    assert ours["positions"] == [(0.8, 0.8), (0.8, 1.0), (0.6, 0.75)]
    assert (ours["compared"], ours["same"], ours["excused"]) == (2, 1, 0)
    assert (ours["share_target"], ours["share_draft"]) == (0.5, 0.25)


def test_turns_of_one_prompt_are_drawn_together(tmp_path):
    """Two turns of a prompt are no two prompts: drawn apart they would make the interval too narrow."""
    turns = [record("ours", row_id, [length] * 8, 1.0) | {"turn": turn}
             for row_id, length in (("a", 2), ("b", 3), ("c", 4), ("d", 5)) for turn in (0, 1)]  # fmt: skip
    (row,) = report.summarize(folder_of(tmp_path / "r", turns))
    firsts = [r for r in turns if r["turn"] == 0]
    assert row["acceptance_length"] == tables.bootstrap(firsts, report.acceptance_length_of)
    apart = tables.bootstrap(turns, report.acceptance_length_of)
    assert row["acceptance_length"][2] - row["acceptance_length"][1] > 1.2 * (apart[2] - apart[1])


@pytest.mark.parametrize("stated", [None, True])
def test_pitfall_80_prompts_are_in_the_thinking_mode_of_the_drafter_unless_another_is_said(models, stated):
    """A drafter accepts little in another mode than that of its training, so the default of the template is not asked."""
    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    tokenizer.chat_template = (
        "{{ 'w1 ' if enable_thinking is not defined or enable_thinking else 'w2 ' }}{{ messages[0].content }}"
    )
    tokenizer.save_pretrained(models / "target")
    config = json.loads((models / "drafter" / "config.json").read_text())
    (models / "drafter" / "config.json").write_text(json.dumps(config | {"target_thinking": False}))
    bench = Bench(str(models / "target"), str(models / "drafter"), None, "float32", 4, 0.0, stated)
    pair, messages = (
        Pair(str(models / "target"), str(models / "drafter"), "float32"),
        [{"role": "user", "content": "w5"}],
    )
    first = "w1" if stated else "w2"
    assert tokenizer.decode(bench.inputs({"messages": messages})["input_ids"][0]).split() == [first, "w5"]
    assert bench.thinking is bool(stated)
    own = {} if stated is None else {"enable_thinking": stated}
    assert tokenizer.decode(pair.encode(messages, **own)["input_ids"][0]).split() == [first, "w5"]


def test_a_gpus_peak_is_by_method_and_a_processs_is_not():
    rows = [{"method": m, "peak_bytes": n * 2**20} for m, n in (("baseline", 3), ("ours", 5), ("baseline", 4))]
    assert "process, all methods together: 5 MiB" in report.peak_memory(rows, on_cpu=True)
    assert report.peak_memory(rows, on_cpu=False).endswith("baseline 4 MiB, ours 5 MiB")


def test_the_report_has_provenance_and_definitions(tmp_path):
    folder = folder_of(tmp_path / "r", PLAIN + OURS[:1])
    pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install matplotlib")
    text = report.write_report(folder)
    for needed in (
        "dflash-hub bench ...",
        "commit abc",
        "torch 2",
        "thinking mode: off",
        "Not complete",
        "Definitions",
    ):
        assert needed in text
    assert text.startswith((folder / "report.md").read_text()[:100])
    assert {p.name for p in folder.glob("*.png")} == {"speedup.png", "positions.png", "time.png", "context.png"}
    assert json.loads((folder / "summary.json").read_text())["provenance"]["commit"] == "abc"


def test_plots_have_whole_ticks_a_title_and_a_legend_that_covers_nothing(tmp_path):
    plots = pytest.importorskip("dflash_hub.benchmark.plots", reason="plots need matplotlib: pip install matplotlib")
    records = PLAIN + OURS
    batches = [
        {"set": "s", "method": "ours", "rows": size, "speedup": 1.1, "batches": 1, "tokens_per_second": 9.0}
        for size in (2, 3, 8)
    ]
    rows = report.summarize(folder_of(tmp_path / "r", records))
    seen = dict(plots.figures(rows, records, batches))
    assert seen.keys() == {"speedup", "positions", "time", "context", "rows"}
    title = f"target {plots.short('org/target')}, drafter {plots.short(str(tmp_path / 'drafter'))}"
    assert title == "target org/target, drafter drafter"
    for name, figure in seen.items():
        plots.finish(figure, title)
        figure.draw_without_rendering()
        assert figure.get_suptitle() == title
        (legend,) = figure.legends
        for axes in figure.axes:
            assert axes.get_legend() is None
            assert legend.get_window_extent().y1 <= axes.get_tightbbox().y0 + 1, f"{name}: the legend covers something"
    for name in ("positions", "context"):
        low, high = seen[name].axes[0].get_xlim()
        ticks = [at for at in seen[name].axes[0].get_xticks() if low <= at <= high]
        assert ticks and all(at == int(at) for at in ticks), (name, ticks)
    sizes = [label.get_text() for label in seen["rows"].axes[0].get_xticklabels(which="both")]
    assert [size for size in sizes if size] == ["2", "3", "8"]


def test_comparison_names_what_moved_beyond_noise(tmp_path):
    many = [str(i) for i in range(20)]
    before = folder_of(tmp_path / "a", [record("ours", i, [2] * 10, 2.0 + 0.01 * int(i)) for i in many])
    same = folder_of(tmp_path / "b", [record("ours", i, [2] * 10, 2.19 - 0.01 * int(i)) for i in many])
    better = folder_of(tmp_path / "c", [record("ours", i, [4] * 5, 1.0) for i in many])
    assert "| nothing |" in report.comparison(same, before)
    moved = report.comparison(better, before)
    assert "acceptance length, speed" in moved and "2.00 [2.00, 2.00]" in moved
    with pytest.raises(ValueError, match="no set, method and prompt in common"):
        report.comparison(folder_of(tmp_path / "d", PLAIN), before)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    import random

    chooser, covered = random.Random(1), 0
    for _ in range(120):
        sample = [record("ours", "a", [chooser.randint(1, 7) for _ in range(10)], 1.0) for _ in range(25)]
        _, low, high = tables.bootstrap(sample, report.acceptance_length_of, draws=200)
        covered += low <= 4.0 <= high
    assert 0.85 < covered / 120 <= 1.0


def test_ties_are_found_by_a_teacher_forced_pass(models):
    bench = bench_of(models)
    inputs = bench.inputs({"messages": [{"role": "user", "content": "w1 w2"}]})
    text = bench.target.generate(**inputs, max_new_tokens=6, do_sample=False)[
        0, inputs["input_ids"].shape[1] :
    ].tolist()
    other = [*text[:3], (text[3] + 1) % 97, *text[4:]]
    ids = torch.cat([inputs["input_ids"], torch.tensor([text[:3]])], dim=1)
    best = bench.target(ids).logits[0, -1].detach().topk(2).values
    assert bench.tie_gap(inputs, text, other) == pytest.approx(float(best[0] - best[1]), rel=1e-5)


# ------------------------------------------------------------------------------------------------- command line, loop


def test_the_command_from_start_to_compare(models):
    arguments = [
        sys.executable, "-m", "dflash_hub", "bench", "--target", "target", "--drafter", "drafter", "--prompts", "words.jsonl",
        "--count", "2", "--first", "--methods", "baseline,ours", "--max-new-tokens", "8",
    ]  # fmt: skip
    first = subprocess.run([*arguments, "--output", "a"], cwd=models, capture_output=True, text=True, timeout=300)
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines()[-1].startswith("next: dflash-hub bench") and "--compare a" in first.stdout, (
        first.stdout
    )
    second = subprocess.run(
        [*arguments, "--output", "b", "--compare", "a"], cwd=models, capture_output=True, text=True, timeout=300
    )
    assert second.returncode == 0 and "## Against a" in second.stdout, second.stderr
    bad = subprocess.run(
        [*arguments, "--output", "c", "--compare", "nowhere"], cwd=models, capture_output=True, text=True, timeout=300
    )
    assert bad.returncode == 2 and "holds no benchmark run" in bad.stderr and "Traceback" not in bad.stderr


def test_processes_split_the_prompts(models):
    arguments = ["-m", "dflash_hub", "bench", "--target", "target", "--drafter", "drafter", "--prompts", "words.jsonl"]
    arguments += ["--count", "3", "--first", "--methods", "baseline,ours", "--max-new-tokens", "8", "--output", "split"]
    # On CPUs `accelerate launch` wants mpirun; torchrun starts the same two processes.
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        "29611",
        *arguments,
    ]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, cwd=models, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    files = sorted((models / "split").glob("records-*.jsonl"))
    assert [f.name for f in files] == ["records-0.jsonl", "records-1.jsonl"]
    assert len(read_records(models / "split")) == 6 and all(f.read_text() for f in files)


def test_the_loop_is_measured_against_its_passes(models):
    bench = bench_of(models, max_new_tokens=16)
    _, rows = load_prompts(str(models / "words.jsonl"), 2, None)
    ratios = measure_loop(bench, rows, 2, zlab=False)
    assert all(len(values) == 4 for values in ratios.values())
    assert all(0.2 < value < 20 for values in ratios.values() for value in values)


# ------------------------------------------------------------------------------------------------- servers


class FakeEngine(BaseHTTPRequestHandler):
    """A few lines of OpenAI's API and of vLLM's metrics: every answer has six tokens, made in two rounds."""

    answers = 0

    def log_message(self, *args):
        pass

    def do_GET(self):
        body = json.dumps({"data": [{"id": "fake"}]})
        if self.path == "/metrics":
            made = type(self).answers
            body = f'# TYPE x counter\nvllm:spec_decode_num_accepted_tokens_total{{m="fake"}} {4.0 * made}\n'
            body += f'vllm:spec_decode_num_drafts_total{{m="fake"}} {2.0 * made}\n'
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions" or not request["stream"]:
            self.send_response(404)
            self.end_headers()
            self.wfile.write(b"no such route")
            return
        type(self).answers += 1
        self.send_response(200)
        self.end_headers()
        for event in (
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {"content": "a b c"}}]},
            {"choices": [{"delta": {"content": " d e f"}}]},
            {"choices": [], "usage": {"completion_tokens": 6}},
        ):
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


class FakeContinuing(BaseHTTPRequestHandler):
    """Continues a text given as tokens as the target does: in llama.cpp's words, or in OpenAI's with vLLM's metrics."""

    llamacpp, bench, drafts, accepted, posts = True, None, 0, 0, 0

    def log_message(self, *args):
        pass

    def do_GET(self):
        body = json.dumps({"data": [{"id": "fake", "owned_by": "llamacpp" if self.llamacpp else "vllm"}]})
        if self.path == "/metrics":
            body = f"vllm:spec_decode_num_accepted_tokens_total {self.accepted}\nvllm:spec_decode_num_drafts_total {self.drafts}\n"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == ("/completion" if self.llamacpp else "/v1/completions") and request["temperature"] == 0
        ids = torch.tensor([request["prompt"]])
        new = request["n_predict" if self.llamacpp else "max_tokens"]
        tokens = self.bench.target.generate(ids, max_new_tokens=new, do_sample=False)[0, ids.shape[1] :].tolist()
        type(self).posts += 1
        if self.posts == 3:  # the second text after the warm-up is another than the target's
            tokens[-1] += 1
        # Rounds of three tokens after the prefill's one.
        rounds = -(-(len(tokens) - 1) // 3)
        type(self).drafts, type(self).accepted = self.drafts + rounds, self.accepted + len(tokens) - 1 - rounds
        words = [" " * bool(i) + self.bench.tokenizer.decode([token]) for i, token in enumerate(tokens)]
        events = [{"content": word, "tokens": [token], "stop": False} for word, token in zip(words, tokens)]
        timings = {"predicted_n": len(tokens), "draft_n": 4 * rounds, "draft_n_accepted": len(tokens) - 1 - rounds}
        events.append({"content": "", "tokens": [], "stop": True, "timings": timings})
        if not self.llamacpp:
            events = [{"choices": [{"text": word}]} for word in words]
            events.append({"choices": [], "usage": {"completion_tokens": len(tokens)}})
        self.send_response(200)
        self.end_headers()
        for event in events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())


@contextlib.contextmanager
def serving(handler):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def fake_engine():
    with serving(FakeEngine) as url:
        yield url


@pytest.mark.parametrize("llamacpp", (True, False))
def test_a_served_model_stands_in_the_same_table(llamacpp, models):
    """Its tokens, seconds and acceptance as it reports them; a text of its own is seen."""
    from dflash_hub.benchmark.report import write_report

    handler = type("Handler", (FakeContinuing,), {"llamacpp": llamacpp, "bench": bench_of(models)})
    with serving(handler) as url:
        bench = bench_of(models)
        bench.servers = [Server(url, None)]
        sets = [load_prompts(str(models / "words.jsonl"), 3, None)]
        run_bench(models / "run", bench, ["baseline", "served"], sets, None, 0, "the command")
        with pytest.raises(ValueError, match="the method 'served-2' needs its --server URL; 1 given"):
            make_method("served-2", bench)
    records = {(r["method"], r["id"]): r for r in read_records(models / "run")}
    for (method, row_id), record in records.items():
        if method == "served":
            plain, same = records["baseline", row_id], row_id != "words-1"
            assert record["same_text"] is same and (record["new_ids"] == plain["new_ids"]) is same
            assert len(record["new_ids"]) == 12 and record["round_totals"] == [11, 4]
            assert 0 < record["first_token"] < record["seconds"]
    text = write_report(models / "run")
    row = next(line for line in text.splitlines() if line.startswith("| words | served |"))
    assert "| 2.75" in row and f"served: fake at {url}" in text


def test_a_server_that_cannot_write_the_same_text_is_refused(models):
    sampling = bench_of(models, temperature=0.7)
    sampling.servers = [None]
    with pytest.raises(ValueError, match="measured greedily only"):
        make_method("served", sampling)
    bench = bench_of(models)
    bench.servers, bench.target.generation_config.repetition_penalty = [None], 1.1
    with pytest.raises(ValueError, match="has `repetition_penalty` 1.1, which served would not apply"):
        make_method("served", bench)


def test_a_server_is_measured_at_every_concurrency(fake_engine, tmp_path):
    rows = [{"id": str(i), "messages": [{"role": "user", "content": "x"}]} for i in range(5)]
    text = measure_server(tmp_path / "out", Server(fake_engine + "/v1", None), [("s", rows)], [1, 4], 16, 0.0, "cmd")
    saved = json.loads((tmp_path / "out" / "server.json").read_text())
    assert [(r["concurrency"], r["requests"], r["tokens"]) for r in saved["rows"]] == [(1, 5, 30), (4, 5, 30)]
    assert all(r["acceptance_length"] == 3.0 and r["first_token"] > 0 for r in saved["rows"])
    assert saved["provenance"].keys() >= {"commit", "date", "device", "python", "torch", "transformers"}
    assert saved["provenance"]["model"] == "fake" and "| s | 4 | 5 |" in text


def test_the_server_command(fake_engine, tmp_path):
    command = [sys.executable, "-m", "dflash_hub", "bench", "--server", fake_engine, "--output", "out", "--count", "2"]
    done = subprocess.run([*command, "--concurrency", "1,2"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "| demo_prompts | 2 | 2 |" in done.stdout, done.stderr
    done = subprocess.run([*command, "--concurrency", "1,a"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "--concurrency '1,a' is no list" in done.stderr and "Traceback" not in done.stderr
    gone = [sys.executable, "-m", "dflash_hub", "bench", "--server", "http://127.0.0.1:9", "--output", "out"]
    done = subprocess.run(gone, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "no server answers at http://127.0.0.1:9" in done.stderr


def test_acceptance_where_an_engine_says_it_otherwise_or_not_at_all():
    assert acceptance_length({}, {}) is None
    assert acceptance_length({}, {"sglang:spec_accept_length": 3.5}) == 3.5
    assert math.isclose(
        acceptance_length(
            {"vllm:spec_decode_num_drafts_total": 10, "vllm:spec_decode_num_accepted_tokens_total": 10},
            {"vllm:spec_decode_num_drafts_total": 20, "vllm:spec_decode_num_accepted_tokens_total": 35},
        ),
        3.5,
    )


def test_batches_are_measured_beside_plain_ones(models):
    from dflash_hub.benchmark.report import write_report
    from dflash_hub.benchmark.rows import measure_rows, read_rows, summarize_rows
    from dflash_hub.common.prompts import load_prompts

    output = models / "rows"
    run(models, output, ["baseline", "ours-4"])
    sets = [load_prompts(str(models / "words.jsonl"), 4, None)]
    arguments = (output, bench_of(models), ["baseline", "lookup", "ours-4"], sets, [2, 4], 0)
    measure_rows(*arguments)
    records = read_rows(output)
    assert [(r["method"], r["rows"]) for r in records] == [
        (method, rows)
        for rows, batches in ((2, 2), (4, 1))
        for _ in range(batches)
        for method in ("baseline", "ours-4")
    ]
    measure_rows(*arguments)
    assert read_rows(output) == records
    for entry in summarize_rows(output):
        assert entry["same"] == entry["compared"] == entry["rows"] * entry["batches"]
        assert (entry["acceptance_length"] is None) == (entry["method"] == "baseline")
    assert "| 4 | 1 |" in write_report(output) and (output / "rows.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="--methods names neither: lookup"):
        measure_rows(*arguments[:2], ["lookup"], *arguments[3:])
    with pytest.raises(ValueError, match="words has 4 prompts, too few for a batch of 8"):
        measure_rows(*arguments[:4], [8], 0)


def test_what_moving_rows_costs_is_measured_round_by_round(models):
    from dflash_hub.benchmark.rows import batch_inputs
    from dflash_hub.experiments.moving_sequences import measure as measure_moving

    bench = bench_of(models, max_new_tokens=24)
    _, rows = load_prompts(str(models / "words.jsonl"), 4, None)
    ratios = measure_moving(bench, batch_inputs(bench, rows))
    speculation = bench.target.generate(
        **batch_inputs(bench, rows), **bench.settings, assistant_model=bench.drafter, return_dict_in_generate=True,
        num_assistant_tokens=bench.drafter.config.block_size - 1,
    ).speculation  # fmt: skip
    # What follows a round is seen where another one drafts after it.
    assert 3 < sum(map(len, ratios.values())) <= speculation.target_passes
    assert all(0 < ratio < 20 for values in ratios.values() for ratio in values)
    assert not bench.target._forward_hooks and not bench.target._forward_pre_hooks
