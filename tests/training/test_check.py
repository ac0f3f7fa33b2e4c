"""`dflash-hub check`, `train` and `align`: the faults that they must find, and the commands from end to end."""

import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from dflash_hub import DFlashDraftModel
from dflash_hub.common.chat import encode
from dflash_hub.common.identity import identify, template_fingerprint
from dflash_hub.target_identity import encoded_rows
from dflash_hub.training import blocks, checkpoints
from dflash_hub.training import check as checks
from dflash_hub.training.arguments import read_field
from dflash_hub.training.check import check
from dflash_hub.training.features import checksum
from helpers.folders import TEMPLATE, dflash_hub, prompts_of, save_target, tiny_tokenizer, write_prompts
from helpers.tiny import tiny_drafter, tiny_target
from helpers.training import answers_of, trainer_of

LAYERS, TAPS = 6, [0, 1, 2]
ABSENT = next(name for name in ("wandb", "tensorboard", "clearml") if find_spec(name) is None)  # a tracker


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(90)


@pytest.fixture(scope="module")
def prompts():
    return prompts_of(4)


@pytest.fixture(scope="module")
def trained(target, tokenizer, prompts, tmp_path_factory):
    """A drafter that knows the answers to these prompts by heart, as a state dict."""
    drafter = tiny_drafter(initializer_range=0.05, num_target_layers=LAYERS, target_layer_ids=TAPS, mask_token_id=95)
    rows = checks.answered(target, [encode(tokenizer, m, [], None) for m in prompts], 24)
    rows = [row | {"id": f"row-{i}"} for i, row in enumerate(rows)]
    trainer = trainer_of(
        tmp_path_factory.mktemp("run"), target, drafter, rows * 2, rows[:1], max_steps=150,
        per_device_train_batch_size=8, save_strategy="no", logging_steps=50, num_anchors=24,
    )  # fmt: skip
    trainer.train()
    return drafter.state_dict()


def drafter_of(state: dict, **overrides) -> DFlashDraftModel:
    fields = {"num_target_layers": LAYERS, "target_layer_ids": TAPS, "mask_token_id": 95}
    drafter = tiny_drafter(**fields | overrides)
    drafter.load_state_dict(state)
    return drafter.eval()


def record_of(target, tokenizer, acceptance_length: float) -> dict:
    return {
        "data": {"identity": identify(target), "chat_template_sha256": template_fingerprint(tokenizer)},
        "result": {"evaluation": {"acceptance_length": acceptance_length}},
    }


def by_name(findings) -> dict:
    return {finding.name: finding for finding in findings}


def test_a_good_pair_passes_every_check(target, tokenizer, prompts, trained):
    drafter = drafter_of(trained)
    findings = by_name(check(drafter, target, tokenizer, prompts, None, record_of(target, tokenizer, 3.0), 24))
    assert [name for name, finding in findings.items() if finding.ok is False] == []
    assert {"pair", "target layers", "layouts", "leak", "target's weights", "acceptance"} <= set(findings)
    assert "acceptance length" in findings["acceptance"].detail and "likely cause" not in findings


def test_target_layers_that_are_off_by_one_are_named(target, tokenizer, prompts, trained):
    drafter = drafter_of(trained, target_layer_ids=[1, 2, 3])
    findings = by_name(check(drafter, target, tokenizer, prompts, None, record_of(target, tokenizer, 4.0), 24))
    assert findings["acceptance"].ok is False
    assert "wrong target layers: with target layers [0, 1, 2]" in findings["likely cause"].detail


def test_another_target_template_or_acceptance_is_named(target, tokenizer, prompts, trained):
    drafter = drafter_of(trained)
    other = tiny_target("llama", seed=7, num_hidden_layers=LAYERS)
    findings = by_name(check(drafter, other, tokenizer, prompts, None, record_of(target, tokenizer, 3.0), 24))
    assert findings["target's weights"].ok is False and findings["acceptance"].ok is False
    assert "target's weights (made with weights" in findings["likely cause"].detail

    template = tiny_tokenizer(90, template="{% for m in messages %}<end>{{ m['content'] }}<start>{% endfor %}")
    findings = by_name(check(drafter, target, template, prompts, None, record_of(target, tokenizer, 3.0), 24))
    assert findings["chat template and vocabulary"].ok is False

    thinking = tiny_tokenizer(90, template="{% if enable_thinking %}<start>{% endif %}" + tokenizer.chat_template)
    drafter.config.target_thinking = True
    findings = by_name(check(drafter, target, thinking, prompts, False, None, 24))
    assert findings["thinking"].ok is False and findings["thinking"].detail == "made for True, False here"


def test_an_untrained_drafter_and_a_wrong_pair_are_told_apart(target, tokenizer, prompts):
    fresh = tiny_drafter(num_target_layers=LAYERS, target_layer_ids=TAPS)
    findings = by_name(check(fresh, target, tokenizer, prompts, None, None, 24))
    assert findings["acceptance"].ok is False
    assert "may be untrained" in findings["likely cause"].detail
    findings = check(tiny_drafter(), target, tokenizer, prompts, None, None, 24)
    assert [f.name for f in findings] == ["pair"] and findings[0].ok is False
    with torch.no_grad():
        fresh.fc.weight[0, 0] = float("nan")
    findings = check(fresh, target, tokenizer, prompts, None, None, 24)
    assert [(f.name, f.ok) for f in findings] == [("pair", True), ("weights", False)]
    assert "in fc.weight" in findings[1].detail


def test_a_drafter_whose_logits_are_not_finite_in_this_dtype_is_found(target, tokenizer, prompts):
    """Its weights are finite, its hidden states are not: what large activations do in float16."""
    drafter = tiny_drafter(num_target_layers=LAYERS, target_layer_ids=TAPS)
    with torch.no_grad():
        drafter.layers[0].mlp.down_proj.weight.fill_(1e38)
    found = by_name(check(drafter, target, tokenizer, prompts[:1], None, None, 12))
    assert found["layouts"].ok is False and "logits are not finite in float32: load" in found["layouts"].detail
    assert found["acceptance"].ok is False and "not finite" in found["likely cause"].detail


@pytest.mark.parametrize("fault", ["target layers", "layouts", "leak ahead", "leak blind"])
def test_a_broken_implementation_is_found(target, tokenizer, prompts, trained, monkeypatch, fault):
    drafter = drafter_of(trained)
    if fault == "target layers":
        taken = checks.target_hidden_states
        monkeypatch.setattr(checks, "target_hidden_states", lambda *args: taken(*args)[::-1])
    elif fault == "layouts":
        shifted = blocks.block_positions
        monkeypatch.setattr(
            blocks, "block_positions", lambda *a: shifted(*a) + (torch.arange(shifted(*a).shape[1]) > 20)
        )
    else:
        masks = blocks.layer_masks
        seen = fault == "leak ahead"

        def broken(config, rows, *args):
            found = [mask.clone() for mask in masks(config, rows, *args)]
            for mask in found:
                mask[..., : rows.input_ids.shape[1]] = seen
            return found

        monkeypatch.setattr(blocks, "layer_masks", broken)
    findings = by_name(check(drafter, target, tokenizer, prompts, None, None, 24))
    assert findings["leak" if fault.startswith("leak") else fault].ok is False


@pytest.mark.slow
def test_the_commands_from_answers_to_an_aligned_drafter(tmp_path):
    """regenerate, train, resume, check, then align to a target that changed; through the real entry point."""
    target, changed = tiny_target("llama", num_hidden_layers=8), tiny_target("llama", num_hidden_layers=8)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter += (
                0.2 * parameter.std() * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    for model, name in ((target, "target"), (changed, "changed")):
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer(90).save_pretrained(tmp_path / name)
    # Four texts, six times each, so that held-out prompts can be learned from others.
    rows = [row | {"id": f"{row['id']}-{copy}"} for copy in range(6) for row in prompts_of(4)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    done = dflash_hub(
        "regenerate", "--target", "target", "--prompts", prompts, "--output", "answers", "--max-new-tokens", 20, cwd=tmp_path
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "24 answers" in done.stdout and "next: dflash-hub train" in done.stdout

    options = tmp_path / "run.yaml"
    options.write_text(
        "layers: 2\nblock_size: 4\nvalidation: 6\neval_prompts: 3\nnum_anchors: 16\nlearning_rate: 0.003\nloss: ce\n"
    )
    arguments = ["train", "--target", "target", "--responses", "answers", "--config", "run.yaml", "--output", "run",
                 "--eval-new-tokens", 20, "--batch-size", 6, "--max-steps", 120, "--evaluations", 2]  # fmt: skip
    done = dflash_hub(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "18 responses of 360 tokens in 18 sequences; 6 for validation" in done.stdout
    assert {"drafter", "checkpoints", "curves.png", "run.yaml", "log.jsonl", "start"} <= {
        p.name for p in (tmp_path / "run").iterdir()
    }
    drafter = DFlashDraftModel.from_pretrained(tmp_path / "run" / "drafter")
    assert drafter.dtype == torch.bfloat16 and drafter.config.block_size == 4
    record = json.loads((tmp_path / "run" / "drafter" / "training_record.json").read_text())
    assert record["recipe"]["num_anchors"] == 16 and record["recipe"]["gamma"] == 2.0
    assert record["data"]["rows"] == 18 and record["data"]["target"] == "target"
    assert record["result"]["steps"] == 120
    reached = [1.0, *record["result"]["evaluation"]["acceptance_by_position"]]
    prior = [round(later / earlier, 2) for earlier, later in itertools.pairwise(reached) if earlier]
    assert drafter.config.acceptance_prior == prior and prior
    assert record["result"]["weights_sha256"] == checksum(tmp_path / "run" / "drafter" / "model.safetensors")
    assert f"acceptance_length: {record['result']['evaluation']['acceptance_length']}" in done.stdout
    assert record["recipe"]["layers"] == 2 and record["recipe"]["target_layer_ids"] == drafter.config.target_layer_ids
    assert "acceptance_length: " in done.stdout
    card = (tmp_path / "run" / "drafter" / "README.md").read_text()
    assert "`num_anchors`" in card and "responses.jsonl" in card
    state = json.loads((tmp_path / "run" / "checkpoints" / "checkpoint-120" / "trainer_state.json").read_text())
    assert any("eval_acceptance_length" in entry for entry in state["log_history"])

    again = dflash_hub(*arguments, cwd=tmp_path)
    assert again.returncode != 0 and "holds a run already; pass --resume" in again.stderr
    other = dflash_hub(*arguments, "--resume", "--seed", 3, cwd=tmp_path)
    assert other.returncode != 0 and "was made with other seed" in other.stderr

    checked = dflash_hub("check", "--drafter", "run/drafter", "--target", "changed", "--prompts", prompts, cwd=tmp_path)
    assert checked.returncode == 1 and "FAIL target's weights" in checked.stdout, checked.stderr

    done = dflash_hub(
        "align", "--drafter", "run/drafter", "--target", "changed", "--prompts", prompts, "--output", "aligned",
        "--rehearsal", "answers", "--max-new-tokens", 20, "--max-steps", 60, "--learning-rate", 0.003, "--validation", 6,
        "--eval-prompts", 3, "--evaluations", 2, "--features", "kept", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "aligned" / "report.json").read_text())
    kept = DFlashDraftModel.from_pretrained(tmp_path / "aligned" / "drafter")
    better = report["after"]["replayed_acceptance_length"] > report["before"]["replayed_acceptance_length"]
    source = tmp_path / ("aligned/run/drafter" if better else "run/drafter")
    assert "24 answers" in done.stdout and "dflash-hub train" not in done.stdout
    assert kept.fc.weight.equal(DFlashDraftModel.from_pretrained(source).fc.weight)
    assert report["kept"] == "new" and better
    after, before = report["after"]["replayed_acceptance_length"], report["before"]["replayed_acceptance_length"]
    assert after > before + 0.3, "what the change cost is learned again"
    assert "| acceptance length, real generation |" in (tmp_path / "aligned" / "report.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--responses", "nowhere"], "no answers at nowhere; make them with `dflash-hub regenerate`"),
        (["--responses", "a.jsonl", "--validation", "40"], "leave nothing to train on; lower --validation"),
        (["--responses", "a.jsonl", "--loss", "mse"], "no loss 'mse'; there are ce, dpace, kl, tv"),
        (["--responses", "a.jsonl", "--argument", "warmup"], "--argument 'warmup' is not NAME=VALUE"),
        (["--responses", "a.jsonl", "--argument", "wamup_steps=3"], "['wamup_steps'] are no fields of"),
        (["--responses", "a.jsonl", "--optimizer", "sgd"], "--optimizer 'sgd' is neither muon nor adamw"),
        (["--responses", "a.jsonl", "--gamma", "4"], "dpace has weights of its own"),
        (["--responses", "a.jsonl", "--eval-prompts", "0", "--patience", "2"], "--patience needs evaluations"),
        (["--responses", "a.jsonl", "--pack-length", "5"], "longer than --pack-length 5"),
        (["--responses", "a.jsonl", "--trained-length", "64"], "says from where --yarn stretches: pass both"),
        (["--responses", "a.jsonl", "--yarn", "2"], "--yarn stretches the RoPE of a trained drafter"),
        (["--responses", "a.jsonl", "--attention", "foo"], "--attention 'foo' is none of sdpa, eager, flex_attention"),
        (["--responses", "a.jsonl", "--attention", "flex_attention"], "flex_attention needs a GPU"),
        (["--responses", "large.jsonl"], "holds token 999, this target has"),
        (["--responses", "later.jsonl", "--validation", "2"], "no response is one to a first turn"),
        (
            ["--responses", "bare.jsonl", "--prompts", "p.jsonl", "--prompts", "q.jsonl"],
            "another prompt with the id 'a'",
        ),
        (["--responses", "a.jsonl", "--dtype", "ones"], "--dtype 'ones' is none of float32, bfloat16, float16"),
        (["--responses", "a.jsonl", "--epochs", "0"], "--epochs 0 trains nothing"),
        (["--responses", "a.jsonl", "--learning-rate", "-1"], "Invalid value for '--learning-rate'"),
        (["--responses", "a.jsonl", "--argument", "learning_rate=-1"], "cannot be trained with: Invalid learning rate"),
        (["--responses", "a.jsonl", "--argument", "learning_rate=abc"], "--argument learning_rate=abc is no number"),
        (["--responses", "a.jsonl", "--argument", "report_to=nonsense"], "nonsense is not supported"),
        (["--responses", "a.jsonl", "--argument", f"report_to={ABSENT}"], "to be installed"),
        (["--responses", "a.jsonl", "--argument", "report_to=[:"], "--argument 'report_to=[:' is no YAML"),
        (["--responses", "a.jsonl", "--features", "f"], "not of this target"),
        (["--responses", "a.jsonl", "--drafter", "d"], "--layers, --block-size shape a fresh drafter"),
    ],
)
def test_bad_options_are_named(tmp_path, monkeypatch, arguments, sentence):
    from dflash_hub.cli import app as cli
    from typer.testing import CliRunner

    model = tiny_target("llama", num_hidden_layers=8)
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer(90).save_pretrained(tmp_path / "target")
    row = {"id": "a", "turn": 0, "prompt_ids": [4, 5], "response_ids": [6, 7, 8, 9]}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row | {"id": str(i)}) + "\n" for i in range(40)))
    for name, change in (("large", {"response_ids": [6, 999]}), ("later", {"turn": 1})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row | change) + "\n")
    (tmp_path / "bare.jsonl").write_text('{"id": "a", "response_ids": [6, 7]}\n')
    for name in "pq":
        prompt = {"id": "a", "messages": [{"role": "user", "content": f"w1 {name}"}]}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(prompt) + "\n")
    (tmp_path / "f").mkdir()
    index = {
        "identity": {"class": "Other", "dtype": "float32", "weights": "0"},
        "layer_ids": [],
        "shards": {},
        "where": {},
    }
    (tmp_path / "f" / "index.json").write_text(json.dumps(index))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(
        cli.app, ["train", "--target", "target", "--output", "run", "--layers", "1", "--block-size", "4", *arguments]
    )
    assert sentence in f"{result.exception} {' '.join(result.output.replace('│', ' ').split())}"
    assert not (tmp_path / "run").exists(), "a run that never started must not stand in the way of the corrected one"


def invoke(*arguments):
    from dflash_hub.cli import app as cli
    from typer.testing import CliRunner

    return CliRunner().invoke(cli.app, list(map(str, arguments)))


@pytest.fixture
def tiny_pair(tmp_path, monkeypatch):
    """In the current folder: `target`, a `drafter` for it, prompts and rows of answers."""
    model = save_target(tmp_path / "target")
    tiny_drafter(num_target_layers=8, mask_token_id=95).save_pretrained(tmp_path / "drafter")
    write_prompts(tmp_path / "prompts.jsonl", 6)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers_of(model, 6, answer=12)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_zero_3_is_refused_before_a_run_begins(tiny_pair, monkeypatch):
    """`--argument deepspeed=...` asks for it; the target would be refused in the first evaluation, after hours maybe."""
    monkeypatch.setattr("dflash_hub.training.trainer.sharding", lambda target: "DeepSpeed ZeRO-3")
    result = invoke("train", *TINY_RUN, "--output", "run", "--layers", 1, "--block-size", 4)
    assert (
        "is sharded over processes by DeepSpeed ZeRO-3, but training needs a whole target"
        in f"{result.exception} {result.output}"
    )
    assert not (tiny_pair / "run").exists()


TINY_RUN = (
    "--target target --responses a.jsonl --validation 2 --eval-prompts 1 --eval-new-tokens 6 --evaluations 1 --max-steps 1 "
    "--batch-size 2 --num-anchors 4"
).split()


def tiny_options(**fields):
    from dflash_hub.training.options import TrainOptions

    return TrainOptions(
        "target", ["a.jsonl"], "run", layers=1, block_size=4, validation=2, eval_prompts=1, eval_new_tokens=6, evaluations=1,
        max_steps=1, batch_size=2, num_anchors=4, **fields,
    )  # fmt: skip


def test_trained_weights_are_saved_before_what_can_fail_and_templates_may_be_several(tiny_pair):
    from dflash_hub.training.train import begin, finish, plan_run

    templates = {"default": TEMPLATE, "tool_use": TEMPLATE + "w1"}
    tiny_tokenizer(90, template=templates).save_pretrained("target")
    run = plan_run(tiny_options())
    trainer = begin(run)
    trainer.train()
    with pytest.raises(AttributeError, match="chat_template"):
        finish(dataclasses.replace(run, tokenizer=object()), trainer, "the command")
    saved = DFlashDraftModel.from_pretrained("run/drafter")
    assert (
        saved.config.target_name_or_path == "target" and not (tiny_pair / "run/drafter/training_record.json").exists()
    )
    finish(run, trainer, "the command")
    record = json.loads((tiny_pair / "run/drafter/training_record.json").read_text())
    assert record["data"]["chat_template_sha256"] == template_fingerprint(tiny_tokenizer(90, template=templates))


def test_a_run_that_cannot_be_recorded_does_not_begin(tiny_pair):
    from dflash_hub.training.train import train

    with pytest.raises(
        ValueError, match="the record of this run could not be written at its end: .* not JSON serializable"
    ):
        train(tiny_options(arguments={"run_name": Path("a")}), "the command")
    assert not (tiny_pair / "run").exists()


def test_a_runs_own_options_can_be_passed_back_and_its_drafter_in_any_layout(tiny_pair, monkeypatch):
    import yaml
    from dflash_hub.convert.exporting import export_drafter
    from dflash_hub.training import train as module

    fresh = ["--layers", 1, "--block-size", 4, "--target-layers", "1,5", "--argument", "weight_decay=1e-4"]
    done = invoke("train", *TINY_RUN, *fresh, "--output", "run")
    assert done.exit_code == 0, done.exception
    saved = yaml.safe_load((tiny_pair / "run" / "run.yaml").read_text())
    record = json.loads((tiny_pair / "run" / "drafter" / "training_record.json").read_text())
    assert saved["loss"] == "dpace" and saved["gamma"] is None and record["recipe"]["gamma"] is None
    rows = [json.loads(line) for line in (tiny_pair / "a.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["id"] not in record["data"]["validation"]]
    assert record["data"]["longest_row"] == max(len(row["prompt_ids"] + row["response_ids"]) for row in trained)
    assert "| `gamma` | None |" in (tiny_pair / "run" / "drafter" / "README.md").read_text()

    passed = []
    with monkeypatch.context() as patch:
        patch.setattr(module, "train", lambda options, *rest: passed.append(module.resolved(options)))
        assert invoke("train", "--config", "run/run.yaml", "--output", "again").exit_code == 0
    again = vars(passed[0]) | {"output": "run", "arguments": {"weight_decay": 1e-4}}
    assert again == {name: value for name, value in saved.items() if name not in ("data", "weights")} | {
        "arguments": {"weight_decay": 1e-4}
    }
    assert {name: module.read_field(name, value) for name, value in passed[0].arguments.items()} == {
        "weight_decay": 1e-4
    }

    export_drafter("run/drafter", "foreign", "speculators", target="target")
    (tiny_pair / "foreign" / "training_record.json").write_text('{"data": {"longest_row": 999}}')
    done = invoke("train", *TINY_RUN, "--drafter", "foreign", "--output", "warm")
    assert done.exit_code == 0, done.exception
    # What it was trained on before counts as well.
    assert json.loads((tiny_pair / "warm/drafter/training_record.json").read_text())["data"]["longest_row"] == 999
    config = DFlashDraftModel.from_pretrained("warm/drafter").config
    assert (config.num_hidden_layers, config.block_size, config.target_layer_ids) == (1, 4, [1, 5])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("layers: [", "run.yaml is no YAML"),
        ("- layers", "run.yaml holds ['layers']; expected options"),
        ("layers", "run.yaml holds 'layers'; expected options"),
        ("arguments: [1]", "run.yaml has [1] as `arguments`; expected names with their values"),
        ("1: 2", "states ['1']; options are"),
        ("answers: nowhere", "no answers at nowhere"),
    ],
)
def test_a_config_file_of_another_form_is_refused(tiny_pair, text, sentence):
    (tiny_pair / "run.yaml").write_text(text + "\n")
    result = invoke("train", *TINY_RUN[:2], *["--responses"] * ("answers" not in text), *["a"] * ("answers" not in text),
                    "--output", "run", "--config", "run.yaml")  # fmt: skip
    assert isinstance(result.exception, ValueError) and sentence in str(result.exception)


def test_an_unknown_dtype_is_named_by_every_command(tiny_pair):
    for command, *arguments in (
        ("regenerate", "--prompts", "prompts.jsonl", "--output", "x"),
        ("check", "--drafter", "drafter"),
        ("train", "--responses", "a.jsonl", "--output", "x"),
        ("align", "--drafter", "drafter", "--prompts", "prompts.jsonl", "--output", "x", "--validation", 2),
    ):
        result = invoke(command, "--target", "target", *arguments, "--dtype", "foo")
        assert "--dtype 'foo' is none of float32, bfloat16, float16" in str(result.exception), command
        assert not (tiny_pair / "x").exists()


def test_check_names_empty_prompts_and_a_broken_record(tiny_pair):
    (tiny_pair / "empty.jsonl").write_text("")
    result = invoke("check", "--target", "target", "--drafter", "drafter", "--prompts", "empty.jsonl")
    assert "there is no prompt in empty.jsonl" in str(result.exception)
    for text, sentence in (
        ("{", "training_record.json is no JSON"),
        ("[]", "training_record.json must hold a JSON object"),
        ('{"data": []}', None),
        ('{"data": [1]}', "training_record.json must hold an object `data`"),
        ('{"result": {"evaluation": [1]}}', "with an object or nothing as its `evaluation`"),
    ):
        (tiny_pair / "drafter" / "training_record.json").write_text(text)
        if sentence is None:
            assert checks.read_record(str(tiny_pair / "drafter")) == {"data": []}
            continue
        with pytest.raises(ValueError) as raised:
            checks.read_record(str(tiny_pair / "drafter"))
        assert sentence in str(raised.value)


def test_regenerate_without_an_answer_is_a_failure(tiny_pair):
    result = invoke(
        "regenerate", "--target", "target", "--prompts", "prompts.jsonl", "--output", "x", "--max-prompt-tokens", 1
    )
    assert result.exit_code == 1 and "0 answers" in result.output and "next:" not in result.output
    assert "6 prompts have no answer; why is in x/failures.jsonl" in result.output


def scripted(monkeypatch, scores: list[float], stop_at: int | None = None) -> list[float]:
    """Evaluations give these scores in turn; the one with number `stop_at` is an interruption. Returns those given."""
    from dflash_hub.training import train as module
    from dflash_hub.training import trainer

    given = []

    def evaluate(*args):
        if len(given) == stop_at:
            raise KeyboardInterrupt
        given.append(scores[len(given)])
        return {"acceptance_length": given[-1], "replayed_acceptance_length": given[-1]}

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    monkeypatch.setattr(module, "evaluate", lambda *args: {"acceptance_length": 1.0, "replayed_acceptance_length": 1.0})
    return given


def test_an_interrupted_run_that_stops_early_goes_on_as_it_would_have(tiny_pair, monkeypatch):
    """What was the best, and how long ago, is known again; the checkpoint that it goes on from is not judged a second time."""
    run = [
        *TINY_RUN,
        "--drafter",
        "drafter",
        "--max-steps",
        6,
        "--evaluations",
        6,
        "--patience",
        2,
        "--argument",
        "eval_on_start=true",
    ]
    scores = [1.0, 1.2, 1.1, 1.3, 1.4, 1.2, 1.1]  # at step 0 to 6
    scripted(monkeypatch, scores)
    assert invoke("train", *run, "--output", "whole").exit_code == 0
    scripted(monkeypatch, scores, stop_at=3)
    assert invoke("train", *run, "--output", "part").exit_code != 0
    given = scripted(monkeypatch, scores[3:])
    assert invoke("train", *run, "--output", "part", "--resume").exit_code == 0 and given == scores[3:]
    states, weights = [], []
    for name in ("whole", "part"):
        record = json.loads((tiny_pair / name / "drafter" / "training_record.json").read_text())["result"]
        states.append((record["steps"], record["best_step"], record["weights_sha256"]))
        weights.append(DFlashDraftModel.from_pretrained(tiny_pair / name / "drafter").fc.weight)
    assert states[0] == states[1] and states[0][:2] == (6, 4) and weights[0].equal(weights[1])


def cut(path):
    path.write_bytes(path.read_bytes()[:1000])


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))  # as a power cut leaves blocks that were never written


DAMAGED = [
    (lambda folder: (folder / "trainer_state.json").write_text(""), "trainer_state.json has 0 bytes of [0-9]+"),
    (lambda folder: cut(folder / "model.safetensors"), "model.safetensors has 1000 bytes of [0-9]+"),
    (lambda folder: zero(folder / "model.safetensors"), r"model.safetensors is not what was written \(checksum\)"),
    (lambda folder: zero(folder / "optimizer.pt"), r"optimizer.pt is not what was written \(checksum\)"),
    (lambda folder: (folder / "scheduler.pt").unlink(), "scheduler.pt is missing"),
    (lambda folder: (folder / "files.json").write_text("{"), "files.json is no JSON"),
    (lambda folder: (folder / "files.json").unlink(), "its saving was interrupted"),
]


def test_a_run_goes_on_from_the_newest_checkpoint_that_is_whole(tiny_pair, capsys):
    """The damaged ones are named, with what is wrong; where none is left the run is not begun anew without a word."""
    run = [
        "train",
        *TINY_RUN,
        "--drafter",
        "drafter",
        "--max-steps",
        3,
        "--evaluations",
        3,
        "--argument",
        "save_total_limit=5",
    ]
    assert invoke(*run, "--output", "run").exit_code == 0
    whole = DFlashDraftModel.from_pretrained("run/drafter").fc.weight
    newest, middle, oldest = (tiny_pair / "run" / "checkpoints" / f"checkpoint-{step}" for step in (3, 2, 1))
    assert checkpoints.resumable_checkpoint(tiny_pair / "run") == newest and "left out" not in capsys.readouterr().err
    for damage, sentence in DAMAGED:
        shutil.copytree(newest, tiny_pair / "kept")
        damage(newest)
        assert checkpoints.resumable_checkpoint(tiny_pair / "run") == middle
        assert re.search(f"left out: checkpoint-3: .*{sentence}.* goes on from checkpoint-2", capsys.readouterr().err)
        shutil.rmtree(newest)
        (tiny_pair / "kept").rename(newest)

    DAMAGED[0][0](newest)
    shutil.rmtree("run/drafter")
    done = invoke(*run, "--output", "run", "--resume")
    assert done.exit_code == 0, done.exception
    assert DFlashDraftModel.from_pretrained("run/drafter").fc.weight.equal(whole)
    assert checkpoints.damage(newest) is None  # written anew

    # A damaged best checkpoint is not what the drafter is made of.
    cut(middle / "model.safetensors")
    assert checkpoints.best_checkpoint(tiny_pair / "run", str(middle)) == newest
    assert "checkpoint-2 is left out: model.safetensors has 1000 bytes of" in capsys.readouterr().err
    for folder in (newest, oldest):
        (folder / "optimizer.pt").unlink()
    before = {path: path.stat().st_mtime_ns for path in (tiny_pair / "run").rglob("*")}
    failed = invoke(*run, "--output", "run", "--resume").exception
    assert "no checkpoint in run/checkpoints can be resumed: checkpoint-3: optimizer.pt is missing; " in str(failed)
    assert {path: path.stat().st_mtime_ns for path in (tiny_pair / "run").rglob("*")} == before
    (tiny_pair / "run" / "run.yaml").write_text("")
    (newest / "files.json").unlink(), (middle / "files.json").unlink(), (oldest / "files.json").unlink()
    assert "run.yaml holds no options" in str(invoke(*run, "--output", "run", "--resume").exception)


def test_a_run_that_saves_models_only_says_that_it_cannot_be_resumed(tiny_pair):
    run = ["train", *TINY_RUN, "--drafter", "drafter", "--output", "run", "--argument", "save_only_model=true"]
    done = invoke(*run)
    assert done.exit_code == 0 and "this run cannot be resumed: save_only_model" in done.output
    failed = invoke(*run, "--resume").exception
    assert "checkpoint-1: it holds no optimizer state (save_only_model). Start anew" in str(failed)
    failed = invoke("train", *TINY_RUN, "--drafter", "drafter", "--output", "other", "--argument", "save_strategy=no")
    assert "save_strategy=no saves no checkpoint" in str(failed.exception) and not (tiny_pair / "other").exists()


def test_align_keeps_the_drafters_mode_and_names_the_target_it_follows(tiny_pair, monkeypatch):

    drafter = tiny_drafter(
        num_target_layers=8, mask_token_id=95, target_thinking=False, target_name_or_path="old", target_revision="main"
    )
    drafter.save_pretrained("drafter")
    tiny_tokenizer(90, template=MODES).save_pretrained("target")
    small = [
        "--validation",
        2,
        "--max-steps",
        1,
        "--max-new-tokens",
        6,
        "--eval-prompts",
        1,
        "--evaluations",
        1,
        "--num-anchors",
        4,
    ]
    scripted(monkeypatch, [1.0, 1.1, 1.0, 1.0])
    done = invoke(
        "align",
        "--target",
        "target",
        "--drafter",
        "drafter",
        "--prompts",
        "prompts.jsonl",
        "--output",
        "aligned",
        *small,
    )
    assert done.exit_code == 0, done.exception
    assert json.loads((tiny_pair / "aligned" / "answers" / "settings.json").read_text())["thinking"] is False
    kept = DFlashDraftModel.from_pretrained("aligned/drafter").config
    assert (kept.target_thinking, kept.target_name_or_path, kept.target_revision) == (False, "target", None)
    assert "base_model: target" in (tiny_pair / "aligned" / "drafter" / "README.md").read_text()

    result = invoke("train", *TINY_RUN, "--drafter", "drafter", "--output", "warm")
    assert "drafter was trained with --no-thinking; state the mode of these answers" in str(result.exception)
    assert invoke("train", *TINY_RUN, "--drafter", "drafter", "--output", "warm", "--thinking").exit_code == 0
    warm = DFlashDraftModel.from_pretrained("warm/drafter").config
    assert warm.target_thinking is True and warm.target_name_or_path == "old"  # a folder may be a copy of it

    changed = save_target(tiny_pair / "changed")
    with torch.no_grad():
        changed.model.layers[0].mlp.up_proj.weight.mul_(1.1)
    changed.save_pretrained("changed")
    run = ["--target", "changed", "--drafter", "warm/drafter", "--thinking", "--output", "second"]
    assert invoke("train", *run, *TINY_RUN[2:]).exit_code == 0
    second = DFlashDraftModel.from_pretrained("second/drafter").config
    assert second.target_name_or_path == "changed" and second.target_rows == encoded_rows(changed, 97)
    assert kept.target_rows == second.target_rows  # embedding and head are those of before


# A template with two modes.
MODES = TEMPLATE + "{% if enable_thinking %}w8{% endif %}"


class Answering(Exception):
    """Options were found good, and the target would answer now."""


@pytest.fixture
def align_to_the_answers(tiny_pair, monkeypatch):
    from dflash_hub.training import responses

    def answering(*args):
        raise Answering

    monkeypatch.setattr(responses, "regenerate", answering)

    def run(*arguments):
        fixed = ["--target", "target", "--output", "aligned", "--validation", 2, "--drafter", "drafter"]
        result = invoke("align", *fixed, "--prompts", "prompts.jsonl", *arguments)
        assert not (tiny_pair / "aligned").exists()
        return result.exception

    return run


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--validation", 6], "leave nothing to train on; lower --validation"),
        (["--drafter", "target"], "is of no format that is known"),
        (["--drafter", "other"], "does not fit the target"),
        (["--rehearsal", "nowhere"], "no answers at nowhere"),
        (["--rehearsal", "bare.jsonl"], "its prompt is not among --prompts"),
        (["--epochs", 0], "--epochs 0 trains nothing"),
    ],
)
def test_align_checks_its_options_before_the_target_answers(tiny_pair, align_to_the_answers, arguments, sentence):
    tiny_drafter(num_target_layers=9).save_pretrained(tiny_pair / "other")
    (tiny_pair / "bare.jsonl").write_text('{"id": "elsewhere", "response_ids": [5, 6]}\n')
    assert sentence in str(align_to_the_answers(*arguments))


def test_align_reads_the_prompts_of_a_rehearsal_as_its_own(tiny_pair, align_to_the_answers, monkeypatch):
    import types

    from dflash_hub.common import prompts

    class Columns(list):
        column_names = ["question"]

    loaded = Columns([{"question": f"w1 w{i}"} for i in range(4)])
    fake = types.SimpleNamespace(load_dataset=lambda name, split: loaded)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.setattr(prompts, "DEMO_PROMPTS", tiny_pair / "prompts.jsonl")
    rows = [{"id": "p-1", "response_ids": [5, 6]}, {"id": "org/set:question:2", "response_ids": [5, 6]}]
    (tiny_pair / "bare.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = invoke(
        "align", "--target", "target", "--output", "aligned", "--validation", 2, "--drafter", "drafter", "--rehearsal", "bare.jsonl",
        "--prompts", "demo", "--prompts", "org/set", "--column", "question",
    )  # fmt: skip
    assert isinstance(result.exception, Answering), result.exception


def test_align_follows_with_a_drafter_in_another_layout(tiny_pair):
    from dflash_hub.convert.exporting import export_drafter

    export_drafter("drafter", "foreign", "transformers", target="target")
    result = invoke(
        "align", "--target", "target", "--drafter", "foreign", "--prompts", "prompts.jsonl", "--output", "aligned", "--validation", 2,
        "--eval-prompts", 1, "--max-new-tokens", 12, "--max-steps", 1, "--evaluations", 1, "--learning-rate", 0, "--num-anchors", 4,
    )  # fmt: skip
    assert result.exit_code == 0, result.exception
    assert "6 answers" in result.output and "dflash-hub train" not in result.output
    assert json.loads((tiny_pair / "aligned" / "report.json").read_text())["kept"] == "old"  # nothing was learned
    kept = DFlashDraftModel.from_pretrained("aligned/drafter")
    assert kept.fc.weight.equal(DFlashDraftModel.from_pretrained("drafter").fc.weight)


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("experiments.replayed_acceptance", ["--drafter", "drafter", "--responses", "a", "--dtype", "foo"]),
        ("experiments.ablations", ["--responses", "nowhere", "--output", "x"]),
        ("experiments.training_cost", ["--vary", "width"]),
        ("experiments.loop_overhead", ["--drafter", "target"]),
        ("experiments.moving_sequences", ["--drafter", "target"]),
        ("experiments.sampling_proposals", ["--drafter", "target"]),
        ("experiments.style_tuning", ["--responses", "nowhere", "--output", "x"]),
    ],
)
def test_the_modules_that_measure_refuse_in_a_sentence(tiny_pair, monkeypatch, capsys, module, arguments):
    import runpy

    monkeypatch.setattr(sys, "argv", [module, "--target", "target", *arguments])
    with pytest.raises(SystemExit) as raised:
        runpy.run_module(f"dflash_hub.{module}", run_name="__main__")
    said = capsys.readouterr().err
    assert "dflash-hub: " in said and "Traceback" not in said and raised.value.code == 2


def test_orderings_and_cost_print_their_tables(tiny_pair, monkeypatch, capsys):
    import contextlib
    import io
    import types

    from dflash_hub.experiments import ablations as orderings
    from dflash_hub.experiments import training_cost as cost

    chosen = ["base", "fixed blocks", "no features", "block 16, served at 8"]
    small = {"target": "target", "rows": 4, "validation": 2, "seconds": 0.01, "layers": 1}
    with pytest.raises(ValueError, match="--variant 'sideways' is none of base, fixed blocks,"):
        orderings.main(["a.jsonl"], tiny_pair / "out", **small, variant=["base", "sideways"])
    orderings.main(["a.jsonl"], tiny_pair / "out", **small, variant=chosen)
    orderings.main(
        ["a.jsonl"], tiny_pair / "out", **small, variant=["base"], seed=1
    )  # is no result that is there already
    table = (tiny_pair / "out" / "table.md").read_text()
    assert all(f"| {name} | 1." in table or f"| {name} | 2." in table for name in [*chosen, "base, seed 1"])
    capsys.readouterr()

    def in_process(command, **kwargs):
        one = json.loads(command[command.index("--one") + 1])
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            cost.main(target="target", steps=1, one=json.dumps(one))
        return types.SimpleNamespace(returncode=0, stdout=printed.getvalue())

    monkeypatch.setattr(subprocess, "run", in_process)
    monkeypatch.setattr(cost, "origin", lambda command: command)
    monkeypatch.setitem(cost.VARIED, "num_anchors", [2])
    cost.main(target="target", steps=1, vary=["num_anchors"], num_anchors=4, block_size=4, length=16, layers=1)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:20] for line in lines if line.startswith(("| 4 |", "| 2 |"))] == [
        "| 4 | 4 | 16 | 1 | o",
        "| 2 | 4 | 16 | 1 | o",
    ]


VALUES = [
    ("save_strategy", "no", "no"),
    ("run_name", "on", "on"),
    ("run_name", "true", "true"),
    ("run_name", "1e3", "1e3"),
    ("report_to", "none", "none"),
    ("optim_args", "y", "y"),
    ("fsdp", "off", "off"),
    ("save_only_model", "true", True),
    ("bf16_full_eval", "False", False),
    ("disable_tqdm", "null", None),
    ("weight_decay", "1e-4", 1e-4),
    ("save_total_limit", "3", 3),
    ("save_total_limit", "null", None),
    ("fsdp_config", '{"version": 2, "name": no}', {"version": 2, "name": "no"}),
    ("optim_target_modules", "[no, on]", ["no", "on"]),
    ("save_only_model", "no", "save_only_model=no is neither true nor false"),
    ("save_total_limit", "yes", "save_total_limit=yes is no number"),
    ("save_total_limit", "1.5", "save_total_limit=1.5 is no number"),
]


def test_values_of_arguments_are_read_by_the_type_of_their_field(tmp_path, monkeypatch):
    """On the command line and in a file, where YAML 1.1 would make booleans of `no`, `on` and `y`."""
    from dflash_hub.training import train as module

    monkeypatch.chdir(tmp_path)
    taken = []
    monkeypatch.setattr(module, "train", lambda options, *rest: taken.append(options))
    for name, text, value in VALUES:
        (tmp_path / "o.yaml").write_text(f"arguments:\n  {name}: {text}\nmask_token: no\n")
        assert invoke("train", *TINY_RUN, "--output", "run", "--argument", f"{name}={text}").exit_code == 0
        assert invoke("train", *TINY_RUN, "--output", "run", "--config", "o.yaml").exit_code == 0
        assert taken[-1].mask_token == "no"
        for options in taken[-2:]:
            if isinstance(value, str) and "is n" in value:
                with pytest.raises(ValueError, match=value):
                    read_field(name, options.arguments[name])
            else:
                found = read_field(name, options.arguments[name])
                assert (found, type(found)) == (value, type(value)), name


def test_a_config_file_with_an_unknown_option_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_text("learning_rat: 0.1\n")
    done = dflash_hub("train", "--responses", "a", "--output", "b", "--config", "run.yaml", cwd=tmp_path)
    assert done.returncode != 0 and "states ['learning_rat']; options are" in done.stderr


def test_pitfall_80_answers_of_another_thinking_mode_or_template_are_refused(tmp_path, capsys):
    from dflash_hub.training.options import TrainOptions
    from dflash_hub.training.train import check_answerer, load_rows

    tokenizer = tiny_tokenizer(90, template=MODES)
    row = {"id": "a", "turn": 0, "prompt_ids": [4, 5], "response_ids": [6, 7, 8, 9]}
    (tmp_path / "responses.jsonl").write_text(json.dumps(row) + "\n")
    settings = {"template": template_fingerprint(tokenizer), "thinking": None, "identity": None}
    settings["generation"] = {"do_sample": False}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    options = TrainOptions("target", [str(tmp_path)], "run")
    identity = identify(tiny_target("llama"))

    def load(tokenizer=tokenizer):
        return load_rows(options.responses, {}, options, tokenizer, identity)

    rows, _, greedy = load()
    assert len(rows) == 1 and greedy
    with pytest.raises(ValueError, match="was made with template"):
        load(tiny_tokenizer(91, template=MODES))
    options.thinking = True
    with pytest.raises(ValueError, match="was made with thinking None, the target here has True"):
        load()
    alone = settings | {"template": template_fingerprint(tiny_tokenizer(90))}
    (tmp_path / "settings.json").write_text(json.dumps(alone))
    assert len(load(tiny_tokenizer(90))[0]) == 1  # a template without modes has one only, whatever is stated
    options.thinking = None
    (tmp_path / "settings.json").write_text(json.dumps(settings | {"generation": {"do_sample": True}}))
    assert not load()[2], "rounds cannot be replayed on sampled answers"
    other = {"identity": identify(tiny_target("llama", seed=4))}
    (tmp_path / "settings.json").write_text(json.dumps(settings | other))
    with pytest.raises(ValueError, match="answered by another target"):
        load()
    with pytest.raises(ValueError, match="answered by another target"):
        check_answerer(tmp_path, {"identity": other["identity"] | {"class": "Other", "dtype": "bfloat16"}}, identity)
    capsys.readouterr()
    for made, said in ((None, "through a server"), (other["identity"] | {"dtype": "bfloat16"}, "in bfloat16")):
        (tmp_path / "settings.json").write_text(json.dumps(settings | {"identity": made, "target": "it"}))
        load()
        assert f"was answered {said} by 'it'" in capsys.readouterr().err
    identity = None  # as for --rehearsal: another target's words, in the same mode
    load()
    options.thinking = True
    with pytest.raises(ValueError, match="was made with thinking None"):
        load()
    (tmp_path / "settings.json").write_text('{"thinking": null}')
    with pytest.raises(ValueError, match="settings.json lacks template, identity, generation"):
        load()


@pytest.mark.slow
def test_two_processes_train_as_one_job_with_ddp_and_with_fsdp(tmp_path):
    """Each sees its share of every batch; sharded or not, the losses are those of one process with as many batches a step."""
    target = tiny_target("llama", num_hidden_layers=8)
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer(90).save_pretrained(tmp_path / "target")
    rows = [
        row | {"response_ids": row["response_ids"][: 6 + 3 * (i % 7)]} for i, row in enumerate(answers_of(target, 24))
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fsdp = '{"version": 2, "transformer_layer_cls_to_wrap": ["DFlashDecoderLayer"]}'
    losses = {}
    for name, processes, further in (
        ("alone", [], ["--accumulate", "2"]),
        ("ddp", ["29641"], []),
        ("fsdp", ["29642"], ["--argument", "fsdp=full_shard", "--argument", f"fsdp_config={fsdp}"]),
    ):
        command = [sys.executable]
        if processes:
            command += ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", *processes]
        command += [
            "-m",
            "dflash_hub",
            "train",
            "--target",
            "target",
            "--responses",
            "a.jsonl",
            "--output",
            name,
            *further,
        ]
        command += "--layers 2 --block-size 4 --validation 8 --eval-prompts 3 --num-anchors 100 --batch-size 4 --max-steps 6".split()
        command += ["--evaluations", "1", "--eval-new-tokens", "12", "--argument", "logging_steps=1"]
        # On CPUs `accelerate launch` wants mpirun; torchrun starts the same two processes.
        environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        entries = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        losses[name] = [entry["loss"] for entry in entries if "loss" in entry]
        assert any("eval_acceptance_length" in entry for entry in entries)
        DFlashDraftModel.from_pretrained(tmp_path / name / "drafter")
    assert len(losses["ddp"]) == 6 and losses["ddp"] == pytest.approx(losses["fsdp"], rel=1e-3)
    assert losses["ddp"] == pytest.approx(losses["alone"], rel=1e-3)  # all anchors are drawn, so they are the same


def test_replayed_acceptance_of_a_set(tmp_path):
    model = tiny_target("llama", num_hidden_layers=8)
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer(90).save_pretrained(tmp_path / "target")
    tiny_drafter(num_target_layers=8).save_pretrained(tmp_path / "drafter")
    (tmp_path / "set").mkdir()
    rows = "".join(json.dumps(row) + "\n" for row in answers_of(model, 3))
    (tmp_path / "set" / "responses.jsonl").write_text(rows)
    (tmp_path / "set" / "settings.json").write_text('{"generation": {"do_sample": false}, "identity": null}')
    command = [
        sys.executable,
        "-m",
        "dflash_hub.experiments.replayed_acceptance",
        "--target",
        "target",
        "--drafter",
        "drafter",
        "--responses",
        "set",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "| set | 3 | 1." in done.stdout and "| mean |" in done.stdout


@pytest.mark.slow
def test_the_commands_that_help_shows_run_as_pasted(tmp_path, smollm2_path):
    shown = dflash_hub("train", "--help").stdout.strip().splitlines()[-2:]
    for line in shown:
        assert line.strip().startswith("dflash-hub ")
        done = dflash_hub(*line.split()[1:], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "run-demo" / "drafter" / "model.safetensors").exists()
