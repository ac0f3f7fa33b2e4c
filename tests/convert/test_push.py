"""`dflash-hub push` and `inspect`, as a user runs them."""

import json

import pytest
import torch
from dflash_hub import DFlashDraftModel
from dflash_hub.cli.app import app
from dflash_hub.convert.card import write_card
from dflash_hub.convert.description import describe
from dflash_hub.convert.exporting import export_drafter
from dflash_hub.convert.importing import import_drafter
from dflash_hub.convert.init import weight_files
from dflash_hub.convert.pushing import push_drafter
from dflash_hub.convert.reading import read_drafter
from helpers.fake_hub import fake_hub
from helpers.tiny import CODE, ROOT, tiny_drafter
from huggingface_hub import constants, hf_api
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

FULL, SLIDING = "full_attention", "sliding_attention"


def run(*arguments) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def hub(monkeypatch):
    with fake_hub(monkeypatch) as hub:
        yield hub


@pytest.fixture
def folder(tmp_path):
    tiny_drafter(target_name_or_path="org/target").save_pretrained(tmp_path / "d")
    write_card(tmp_path / "d")
    return tmp_path / "d"


def test_a_push_uploads_what_a_drafter_is_and_nothing_else(folder, hub):
    (folder / "optimizer.pt").write_bytes(b"not for the Hub")
    save_file({"momentum": torch.zeros(2)}, folder / "optimizer.safetensors")
    (folder / ".env").write_text("SECRET=1")
    (folder / "training_record.json").write_text("{}")
    expected = sorted(
        [*CODE, "README.md", "config.json", "custom_generate/generate.py", "model.safetensors", "training_record.json"]
    )
    listed = run("push", folder, "my-name/tiny.dflash-v1", "--dry-run")
    assert listed.splitlines()[:-2] == expected
    assert hub.repositories == {} and hub.tokens == set()

    assert "/commit/0123456789" in run("push", folder, "my-name/tiny.dflash-v1")
    assert hub.repositories["my-name/tiny.dflash-v1"]["visibility"] == "private"
    assert hub.tokens == {"Bearer hf_fake"}
    files = hub.files["my-name/tiny.dflash-v1"]
    assert sorted(files) == expected
    assert files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    card = files["README.md"].decode()
    assert 'AutoModel.from_pretrained("my-name/tiny.dflash-v1", trust' in card and "inside this folder" not in card
    assert "dflash-hub export my-name/tiny.dflash-v1 drafter-vllm" in card
    assert card == (folder / "README.md").read_text()

    run("push", folder, "my-name/tiny.dflash-v1", "--public")  # what exists keeps its visibility
    assert hub.repositories["my-name/tiny.dflash-v1"]["visibility"] == "private"

    # Weights in several files, whatever the index calls them.
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"part-{name.startswith('layers')}.safetensors" for name in tensors}
    for part in set(names.values()):
        save_file({name: tensor for name, tensor in tensors.items() if names[name] == part}, folder / part)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    parts = {"model.safetensors.index.json", "part-False.safetensors", "part-True.safetensors"}
    listed = run("push", folder, "my-name/tiny.dflash-v1", "--dry-run").splitlines()[:-2]
    assert set(listed) == set(expected) - {"model.safetensors"} | parts


def test_a_push_that_fails_changes_nothing(folder, hub):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    hub.refuse_commit = True
    with pytest.raises(OSError, match=r"(?s)the Hub refused: .*403.*Nothing was changed"):
        push_drafter(folder, "my-name/other")
    assert hub.repositories == {} and before == {path: path.read_bytes() for path in before}


def test_a_push_deletes_what_it_supersedes(folder, tmp_path, hub):
    """Old weights beside new ones in other files would be read instead of them."""
    (folder / "training_record.json").write_text('{"old": 1}')
    run("push", folder, "me/d")
    hub.files["me/d"] |= {"notes.md": b"mine", "model.fp16.safetensors": b"old"}
    new = tiny_drafter(target_name_or_path="org/target", seed=2)
    new.save_pretrained(tmp_path / "new", max_shard_size="20KB")
    assert "model.safetensors (deleted, of the drafter before)" in run("push", tmp_path / "new", "me/d")
    for name, content in hub.files["me/d"].items():
        (tmp_path / "down" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "down" / name).write_bytes(content)
    names = {path.name for path in (tmp_path / "down").iterdir()}
    assert "notes.md" in names and not names & {"model.safetensors", "model.fp16.safetensors", "training_record.json"}
    assert torch.equal(DFlashDraftModel.from_pretrained(tmp_path / "down").fc.weight, new.fc.weight)


@pytest.mark.parametrize("first, second", [({}, {"max_shard_size": "20KB"}), ({"max_shard_size": "20KB"}, {})])
def test_saving_removes_what_it_supersedes_and_all_readers_agree(first, second, tmp_path):
    folder, old, new = tmp_path / "d", tiny_drafter(seed=1), tiny_drafter(seed=2)
    old.save_pretrained(folder, **first)
    old.save_pretrained(folder, variant="fp16")
    write_card(folder)
    (folder / "training_record.json").write_text('{"old": 1}')
    card = folder / "README.md"
    card.write_text(card.read_text().replace("## Measured", "## Measured\n\nof the old one") + "my notes\n")
    DFlashDraftModel.from_pretrained(folder).save_pretrained(folder, **second)  # the same weights in other files
    assert (folder / "training_record.json").exists() and "of the old one" in card.read_text()
    new.save_pretrained(folder, **first)
    assert torch.equal(DFlashDraftModel.from_pretrained(folder).fc.weight, new.fc.weight)
    assert torch.equal(read_drafter(str(folder)).match.drafter["fc.weight"].whole(), new.fc.weight)
    names = {path.name for path in folder.iterdir()}
    assert not names & {"training_record.json", "model.fp16.safetensors"}
    assert ("model.safetensors" in names) != ("model.safetensors.index.json" in names)
    assert "of the old one" not in card.read_text() and card.read_text().endswith("my notes\n")


def test_of_whole_weights_and_shards_all_readers_take_the_whole_ones(tmp_path):
    """As transformers does; `inspect` says so."""
    tiny_drafter(seed=1).save_pretrained(tmp_path / "d", max_shard_size="20KB")
    whole = tiny_drafter(seed=2)
    save_file(whole.state_dict(), tmp_path / "d" / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(DFlashDraftModel.from_pretrained(tmp_path / "d").fc.weight, whole.fc.weight)
    assert torch.equal(read_drafter(str(tmp_path / "d")).match.drafter["fc.weight"].whole(), whole.fc.weight)
    assert "model.safetensors and an index of several files" in run("inspect", tmp_path / "d")


def test_a_card_that_someone_wrote_is_pushed_as_it_is(folder, hub):
    (folder / "README.md").write_text("# Mine\n")
    run("push", folder, "me/d", "--public")
    assert hub.files["me/d"]["README.md"] == b"# Mine\n" and hub.repositories["me/d"]["visibility"] == "public"


def test_what_is_not_pushed(folder, tmp_path):
    export_drafter(str(folder), tmp_path / "zlab")
    with pytest.raises(ValueError, match="is in another format"):
        push_drafter(tmp_path / "zlab", "me/d", dry_run=True)
    for repository in ("a/b/c", "", "..", "me/--"):
        with pytest.raises(ValueError, match="is no id of a repository"):
            push_drafter(folder, repository, dry_run=True)
    (folder / "modeling_dflash.py").unlink()
    with pytest.raises(ValueError, match=r"lacks modeling_dflash.py; .* writes a complete folder"):
        push_drafter(folder, "me/d", dry_run=True)
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="unreadable"):
        push_drafter(folder, "me/d", dry_run=True)
    with pytest.raises(OSError, match="is no folder"):
        push_drafter(tmp_path / "nowhere", "me/d")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_or_reported(value, folder, tmp_path, hub):
    """Whatever the file came through: nothing reaches the Hub, a card or another format."""
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.1.mlp.up_proj.weight"][-1, -1] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    card = (folder / "README.md").read_text()
    for refuse in (
        lambda: push_drafter(folder, "me/d"),
        lambda: push_drafter(folder, "me/d", dry_run=True),
        lambda: write_card(folder),
        lambda: export_drafter(str(folder), tmp_path / "zlab"),
        lambda: import_drafter(str(folder), tmp_path / "again"),
        lambda: DFlashDraftModel.from_pretrained(folder).save_pretrained(tmp_path / "saved"),
    ):
        with pytest.raises(ValueError, match="layers.1.mlp.up_proj.weight"):
            refuse()
    assert hub.repositories == {} and (folder / "README.md").read_text() == card
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d"]
    odd = run("inspect", folder).split("\nodd:\n")[1]
    assert "holds values that are not finite (NaN or infinity) in layers.1.mlp.up_proj.weight" in odd


def test_a_hub_that_cannot_be_reached(folder, monkeypatch):
    monkeypatch.setattr(hf_api.api, "endpoint", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(OSError, match="the Hub cannot be reached"):
        push_drafter(folder, "me/d")
    assert weight_files("me/target") == {}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="(?i)offline"):
        push_drafter(folder, "me/d")
    assert weight_files("me/target") == {}


def test_commands_that_are_printed_can_be_pasted(folder, tmp_path):
    """Also where a folder's name has a space."""
    ours = tmp_path / "my drafter"
    assert f"dflash-hub inspect '{ours}'" in run("import", folder, ours)
    assert f"next: dflash-hub push '{ours}' my-name/my-drafter --dry-run" in run("card", ours)
    assert f"dflash-hub push '{ours}' me/d" in run("push", ours, "me/d", "--dry-run")
    assert f"dflash-hub export '{ours}' drafter-sglang --to sglang" in run("inspect", ours)
    printed = run("export", ours, tmp_path / "z lab")
    assert f"--draft '{tmp_path / 'z lab'}'" in printed and f'speculative_model="{tmp_path / "z lab"}"' in printed


# ------------------------------------------------------------------------------------------------------------------
# inspect


def test_inspect_says_what_the_shipped_drafter_is():
    text = run("inspect", ROOT)
    assert "odd:" not in text
    for part in (
        "dflash-hub, version 1", "HuggingFaceTB/SmolLM2-135M-Instruct", "thinking: off", "12.3 M parameters, 24.6 MB",
        "bfloat16", "3: 3 full, bidirectional in the block", "[1, 8, 14, 20, 27] of 30", "16 of 49152", "rope_theta 100000.0",
        '"num_speculative_tokens": 7', "--speculative-num-draft-tokens 8",
    ):  # fmt: skip
        assert part in text, part


def test_inspect_reads_every_format_and_says_what_is_odd(tmp_path):
    drafter = tiny_drafter(
        layer_types=[SLIDING, FULL], sliding_window=4, target_layer_ids=[2, 0, 1], pad_token_id=96, attention_bias=True
    )
    drafter.save_pretrained(tmp_path / "ours")
    (tmp_path / "ours" / "target_model.py").write_text("changed\n")
    (tmp_path / "ours" / "custom_generate" / "more.py").write_bytes(b"another's \xff\n")
    (tmp_path / "ours" / "custom_generate" / "generate.py").write_bytes(b"changed \xff\n")
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    (tmp_path / "ours" / "config.json").write_text(
        json.dumps(config | {"auto_map": {"AutoModel": "else--where.Model"}})
    )
    text = describe(read_drafter(str(tmp_path / "ours")))
    for part in (
        "1 sliding (window 4), causal in the block, 1 full, bidirectional in the block", "no target is recorded",
        "the target layers are not in order", "the mask token is also `pad_token_id`", "the window 4 is shorter than a block",
        "code that differs from the installed dflash-hub's: target_model.py, custom_generate/generate.py, "
        "custom_generate/more.py;",
        "auto_map is {'AutoModel': 'else--where.Model'}", "no training_record.json",
        "VLLM_USE_V2_MODEL_RUNNER=1 vllm serve", "transformers' native class: no. `block_causal` is [True, False]",
        "attention biases", f"dflash-hub export {tmp_path / 'ours'} drafter-vllm --to vllm",
    ):  # fmt: skip
        assert part in text, part
    export_drafter(str(tmp_path / "ours"), tmp_path / "zlab")
    config = json.loads((tmp_path / "zlab" / "config.json").read_text())
    (tmp_path / "zlab" / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    text = describe(read_drafter(str(tmp_path / "zlab")))
    assert "z-lab's layout" in text and "config.json says float16, the weights are float32" in text
    assert f'"model": "{tmp_path / "zlab"}"' in text and "dflash-hub export" not in text


def test_what_is_served_as_it_is_and_what_is_exported_first(tmp_path):
    """Whatever an engine would look for in vain, or read in another way, is exported first."""
    sliding = {"layer_types": [SLIDING] * 2, "sliding_window": 8, "block_causal": [False] * 2}
    tiny_drafter(**sliding).save_pretrained(tmp_path / "ours")
    folder = tmp_path / "z lab"
    export_drafter(str(tmp_path / "ours"), folder)
    config, weights = (folder / "config.json").read_text(), (folder / "model.safetensors").read_bytes()

    def exported_first(config_file=None, allow_pickle=False) -> bool:
        text = describe(read_drafter(str(folder), config_file=config_file, allow_pickle=allow_pickle))
        first = f"dflash-hub export '{folder}' drafter-vllm --to vllm" in text
        assert first != (f"--draft '{folder}'" in text)
        return first

    assert not exported_first()
    (tmp_path / "elsewhere.json").write_text(config)
    assert exported_first(str(tmp_path / "elsewhere.json"))
    nested = json.loads(config)["dflash_config"]
    for change in (
        {"architectures": ["Qwen3DFlashDraftModel"]},
        {"model_type": "qwen2"},
        {"is_causal": None},  # only the nested switch, which SGLang does not read
        {"use_sliding_window": None},  # transformers takes the window away
        {"num_target_layers": None, "dflash_config": nested | {"num_target_layers": 4}},
        {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        {"layer_types": [FULL] * 2, "dflash_config": nested | {"use_swa": True, "swa_window_size": 8}},
    ):
        (folder / "config.json").write_text(json.dumps(json.loads(config) | change))
        assert exported_first() == ("num_target_layers" not in change), change
    (folder / "config.json").write_text(config)
    tensors = load_file(folder / "model.safetensors")
    save_file({f"model.{name}": t for name, t in tensors.items()}, folder / "model.safetensors")
    assert exported_first()
    (folder / "model.safetensors").unlink()
    (folder / "model").mkdir()
    (folder / "model" / "model.safetensors").write_bytes(weights)
    assert exported_first()
    (folder / "model" / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert exported_first(allow_pickle=True)
