"""Damaged and hostile input: one sentence that names the file, and nothing half written."""

import json
import os
import struct

import pytest
import torch
from dflash_hub.cli import app as cli
from dflash_hub.common import files
from dflash_hub.convert import checkpoint as checkpoint_module
from dflash_hub.convert.checkpoint import open_checkpoint, write_tensors
from dflash_hub.convert.exporting import export_drafter
from dflash_hub.convert.importing import import_drafter
from dflash_hub.convert.reading import read_drafter
from helpers.tiny import tiny_drafter, tiny_target
from safetensors.torch import load_file, save_file


@pytest.fixture
def zlab(tmp_path):
    tiny_drafter().save_pretrained(tmp_path / "ours")
    export_drafter(str(tmp_path / "ours"), tmp_path / "zlab")
    return tmp_path / "zlab"


def resave(folder, change):
    tensors = load_file(folder / "model.safetensors")
    tensors = change(tensors) or tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def add(folder, **tensors):
    resave(folder, lambda t: t.update(tensors))


def header(entries: dict, data: bytes = b"") -> bytes:
    encoded = json.dumps(entries).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def write(name: str, content):
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def loop(name: str):
    def link(folder):
        (folder / name).unlink()
        (folder / name).symlink_to(folder / name)

    return link


def index(weight_map):
    return indexed(json.dumps({"weight_map": weight_map}))


def indexed(text: str):
    """Write an index; the weights get another name, since a whole file is read before any index."""

    def break_it(folder):
        if (folder / "model.safetensors").exists():
            (folder / "model.safetensors").rename(folder / "part.safetensors")
        (folder / "model.safetensors.index.json").write_text(text)

    return break_it


BROKEN = {
    "truncated weights": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]),
        "model.safetensors is unreadable, truncated perhaps",
    ),
    "truncated header": (write("model.safetensors", struct.pack("<Q", 9999) + b"{"), "unreadable"),
    "a header of terabytes": (write("model.safetensors", struct.pack("<Q", 2**42) + b"{"), "unreadable"),
    "an empty file": (write("model.safetensors", b""), "unreadable"),
    "overlapping tensors": (
        write(
            "model.safetensors",
            header({n: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for n in ("a", "b")}, b"\0" * 16),
        ),
        "unreadable",
    ),
    "a shape of petabytes": (
        write("model.safetensors", header({"fc.weight": {"dtype": "F32", "shape": [2**50], "data_offsets": [0, 4]}}, b"\0" * 4)),
        "unreadable",
    ),
    "a missing tensor": (lambda f: resave(f, lambda t: {k: v for k, v in t.items() if k != "norm.weight"}), "missing: norm.weight"),
    "a transposed tensor": (
        lambda f: resave(f, lambda t: t.update({"fc.weight": t["fc.weight"].T.contiguous()})),
        r"fc.weight has shape \[96, 32\]; the config says \[32, 96\]",
    ),
    "integers": (
        lambda f: resave(f, lambda t: t.update({"norm.weight": t["norm.weight"].int()})),
        "norm.weight is I32; expected one of F64, F32, F16, BF16",
    ),
    "a scalar": (lambda f: resave(f, lambda t: t.update({"norm.weight": torch.tensor(1.0)})), r"norm.weight has shape \[\]"),
    "a value that is not finite": (
        lambda f: resave(f, lambda t: t.update({"norm.weight": t["norm.weight"] * float("nan")})),
        "norm.weight holds a value that is not finite",
    ),
    "the same tensor twice": (
        lambda f: resave(f, lambda t: t.update({"model.norm.weight": t["norm.weight"].clone()})),
        "is there a second time",
    ),
    "a scalar RoPE table": (lambda f: add(f, **{"rotary_emb.inv_freq": torch.tensor(1.0)}), r"inv_freq has shape \[\]; the config says \[4\]"),
    "an empty RoPE table": (lambda f: add(f, **{"rotary_emb.inv_freq": torch.zeros(0)}), r"inv_freq has shape \[0\]; the config says \[4\]"),
    "a RoPE table of integers": (lambda f: add(f, **{"rotary_emb.inv_freq": torch.ones(4, dtype=torch.int64)}), "inv_freq is I64; expected one of"),
    "half a config": (write("config.json", '{"model_type": "qw'), "config.json is no JSON, truncated perhaps"),
    "a list for a config": (write("config.json", "[1]"), "must hold a JSON object, it holds a list"),
    "a config without end": (write("config.json", '{"a":' * 20000 + "1" + "}" * 20000), "is no JSON|of no format"),
    "a config of bytes": (write("config.json", b"\xff\xfe\x00"), "is no JSON"),
    "a link to itself as config": (loop("config.json"), "leads nowhere or in a circle"),
    "a link to itself as weights": (loop("model.safetensors"), "no model.safetensors"),
    "an index that leaves the folder": (index({"fc.weight": "../../etc/passwd"}), "names a file outside of its folder"),
    "an index to a missing shard": (index({"fc.weight": "model-00001-of-00009.safetensors"}), "names model-00001-of-00009"),
    "an index that promises too much": (index({"fc.weight": "part.safetensors", "x": "part.safetensors"}), "x is in the index|is in the file"),
    "an index of numbers": (index({"fc.weight": 3}), "has no `weight_map`"),
    "a negative window": (
        lambda f: change_config(f, layer_types=["sliding_attention"] * 2, use_sliding_window=True, sliding_window=-4),
        "a sliding layer needs a `sliding_window` of at least 2",
    ),
    "a block of a billion": (lambda f: change_config(f, block_size="1e9"), "`block_size`"),
    "text for a number": (lambda f: change_config(f, hidden_size="32"), "hidden_size"),
    "no layers": (lambda f: change_config(f, num_hidden_layers=0, layer_types=None), "num_hidden_layers"),
    "a billion layers": (
        lambda f: change_config(f, num_hidden_layers=10**9, layer_types=None),
        "states 1000000000 layers, but its files hold 25 tensors",
    ),
    "not a number": (lambda f: change_config(f, rms_norm_eps=float("nan")), "rms_norm_eps"),
    "a tap out of range": (lambda f: change_config(f, both={"target_layer_ids": [0, 1, 99]}), "99 is none of them"),
    "a mask token out of range": (lambda f: change_config(f, both={"mask_token_id": 4096}), "`mask_token_id` must be a row"),
    "taps that are a word": (lambda f: change_config(f, both={"target_layer_ids": "all"}), "`target_layer_ids` must be a list"),
}  # fmt: skip


def change_config(folder, both=None, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes | (both or {})
    config["dflash_config"] |= both or {name: changes[name] for name in changes if name in config["dflash_config"]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", BROKEN)
def test_broken_input_gets_a_sentence_and_leaves_nothing(name, zlab, tmp_path):
    break_it, sentence = BROKEN[name]
    break_it(zlab)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises((ValueError, OSError), match=sentence):
        import_drafter(str(zlab), tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


SENSELESS = (None, "x", -1, [], {"a": 1}, 10**30)


@pytest.mark.parametrize("layout", ("dflash-hub", "zlab", "speculators", "transformers"))
def test_no_value_of_a_config_gets_past_with_another_kind_of_error(layout, tmp_path):
    """Every entry of config.json in turn, with values that make no sense: a sentence, or no harm."""
    tiny_target("llama").save_pretrained(tmp_path / "target")
    tiny_drafter(layer_types=["sliding_attention"] * 2, sliding_window=8, block_causal=[False] * 2).save_pretrained(
        tmp_path / "dflash-hub"
    )
    target = str(tmp_path / "target")
    if layout != "dflash-hub":
        export_drafter(str(tmp_path / "dflash-hub"), tmp_path / layout, layout, target=target)
    path = tmp_path / layout / "config.json"
    config = path.read_text()
    refused = 0
    for number, place in enumerate(entries(json.loads(config))):
        for value in SENSELESS[number % 2 :: 2]:
            changed = json.loads(config)
            inner = changed
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = value
            path.write_text(json.dumps(changed))
            try:
                read_drafter(str(tmp_path / layout), target=target)
            except (ValueError, OSError) as error:
                refused += 1
                assert len(str(error)) > 20
    assert refused > 25


def entries(config: dict, place: tuple = ()):
    for key, value in config.items():
        yield (*place, key)
        if isinstance(value, dict):
            yield from entries(value, (*place, key))


def test_huge_json_is_not_read(zlab, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LARGEST_JSON", 1000)
    with pytest.raises(ValueError, match="bytes; that is no config and no index"):
        import_drafter(str(zlab), tmp_path / "back")


def test_a_config_that_claims_a_giant_allocates_nothing(zlab, tmp_path):
    """Shapes are compared before anything is allocated."""
    change_config(zlab, hidden_size=2**20, intermediate_size=2**22)
    with pytest.raises(ValueError, match=r"the config says \[1048576, 3145728\]"):
        import_drafter(str(zlab), tmp_path / "back")


@pytest.mark.parametrize("name", ("my.drafter-v1.0", "ünïcode drafter", "-force"))
def test_unusual_names_of_folders(name, zlab, tmp_path):
    import_drafter(str(zlab), tmp_path / name)
    export_drafter(str(tmp_path / name), tmp_path / f"{name}.out")
    assert (tmp_path / f"{name}.out" / "model.safetensors").read_bytes() == (zlab / "model.safetensors").read_bytes()


def test_sources_that_are_no_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for source, sentence in (("file", "is a file; expected a folder"), ("loop", "leads nowhere or in a circle")):
        with pytest.raises(OSError, match=sentence):
            open_checkpoint(str(tmp_path / source))
    with pytest.raises(OSError, match="no folder here, and no id of a repository"):
        open_checkpoint("a/b/c/d")


def test_a_destination_inside_of_a_link_loop(zlab, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError):
        import_drafter(str(zlab), tmp_path / "loop" / "back")


class Spy:
    def __reduce__(self):
        return os.mkdir, ("/tmp/dflash-hub-pickle-ran",)


def test_a_pickle_that_runs_code_is_refused(zlab, tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    torch.save({"draft_state_dict": {"fc.weight": torch.ones(2, 2)}, "evil": Spy()}, state / "training_state.pt")
    with pytest.raises(ValueError, match="cannot be read with `weights_only`"):
        import_drafter(str(state), tmp_path / "b", config_file=str(zlab / "config.json"), allow_pickle=True)
    assert not os.path.exists("/tmp/dflash-hub-pickle-ran")
    torch.save([1, 2], state / "training_state.pt")
    with pytest.raises(ValueError, match="holds no dictionary of tensors"):
        import_drafter(str(state), tmp_path / "b", config_file=str(zlab / "config.json"), allow_pickle=True)
    (state / "training_state.pt").write_bytes(b"PK\x03\x04 no zip")
    with pytest.raises(ValueError, match="cannot be read with `weights_only`"):
        import_drafter(str(state), tmp_path / "b", config_file=str(zlab / "config.json"), allow_pickle=True)


@pytest.mark.parametrize(
    ("state", "sentence"),
    (
        (lambda t: {5: t["fc.weight"]}, "holds a tensor under 5; expected its name"),
        (lambda t: t | {"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)}, "fc.weight is torch.float8_e4m3fn; expected one of"),
        (lambda t: t | {"fc.weight": t["fc.weight"].to_sparse()}, "fc.weight is a torch.sparse_coo tensor"),
        (lambda t: t | {"fc.weight": t["fc.weight"].to("meta")}, "fc.weight is a meta tensor"),
        (lambda t: t | {"fc.weight": torch.tensor(1.0)}, r"fc.weight has shape \[\]"),
        (lambda t: {}, "holds no dictionary of tensors"),
        (lambda t: {"draft_state_dict": 5}, "holds no dictionary of tensors"),
    ),
)  # fmt: skip
def test_a_pickle_of_odd_tensors_is_refused(state, sentence, zlab, tmp_path):
    torch.save(state(load_file(zlab / "model.safetensors")), zlab / "pytorch_model.bin")
    (zlab / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=sentence):
        import_drafter(str(zlab), tmp_path / "back", allow_pickle=True)
    assert not (tmp_path / "back").exists()


# ------------------------------------------------------------------------------------------------------------------
# Targets, of which speculators folders carry copies.


@pytest.fixture
def pair(tmp_path):
    tiny_target("llama").save_pretrained(tmp_path / "target")
    tiny_drafter(target_name_or_path=str(tmp_path / "target")).save_pretrained(tmp_path / "ours")
    return tmp_path / "target", tmp_path / "ours"


def config_of(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def head(folder, change):
    resave(folder, lambda t: t.update({"lm_head.weight": change(t["lm_head.weight"])}))


BROKEN_TARGETS = {
    "truncated weights": (BROKEN["truncated weights"][0], "model.safetensors is unreadable"),
    "an index without a map": (indexed("{}"), "has no `weight_map`"),
    "an index that is a list": (indexed("[]"), "must hold a JSON object"),
    "an index that leaves the folder": (index({"lm_head.weight": "../x.safetensors"}), "names a file outside of its folder"),
    "an index to nowhere": (
        index({"lm_head.weight": "no.safetensors", "model.embed_tokens.weight": "no.safetensors"}), "no.safetensors"
    ),
    "an index that promises too much": (
        lambda f: (resave(f, lambda t: {n: v for n, v in t.items() if n != "lm_head.weight"}),
                   index({"lm_head.weight": "part.safetensors", "model.embed_tokens.weight": "part.safetensors"})(f)),
        "lm_head.weight is in the index, but not in the file",
    ),
    "a head of integers": (lambda f: head(f, lambda t: t.to(torch.int8)), "lm_head.weight of the target .* is I8; expected one of"),
    "a head of another shape": (lambda f: head(f, lambda t: t[:-1].clone()), r"lm_head.weight of the target .* has shape \[96, 32\]"),
    "a head of one dimension": (lambda f: head(f, lambda t: t[0].clone()), r"has shape \[32\]; the drafter was made for one of \[97, 32\]"),
    "layers in words": (lambda f: config_of(f, num_hidden_layers="four"), "cannot read the config of the target"),
    "no config": (lambda f: (f / "config.json").unlink(), "cannot read the config of the target"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_TARGETS)
def test_a_broken_target_stops_the_export_to_speculators(name, pair, tmp_path):
    break_it, sentence = BROKEN_TARGETS[name]
    target, ours = pair
    break_it(target)
    with pytest.raises((ValueError, OSError), match=sentence):
        export_drafter(str(ours), tmp_path / "new" / "out", "speculators")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "target"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    (
        (lambda t: t.to(torch.int8), "embed_tokens.weight is I8; expected one of"),
        (lambda t: t.to(torch.float8_e4m3fn), "embed_tokens.weight is F8_E4M3; expected one of"),
        (lambda t: t[:, :-1].clone(), r"embed_tokens.weight has shape \[97, 31\]; the config says \[97, 32\]"),
        (lambda t: t[0].clone(), r"embed_tokens.weight has shape \[32\]; the config says"),
    ),
)
def test_broken_copies_stop_the_import_of_a_speculators_folder(change, sentence, pair, tmp_path):
    export_drafter(str(pair[1]), tmp_path / "out", "speculators")
    resave(tmp_path / "out", lambda t: t.update({"embed_tokens.weight": change(t["embed_tokens.weight"])}))
    for check_target in (True, False):
        with pytest.raises(ValueError, match=sentence):
            import_drafter(str(tmp_path / "out"), tmp_path / "back", check_target=check_target)


@pytest.mark.parametrize("yarn", (float("inf"), float("nan"), 1e308, 1e9))
def test_impossible_factors_stop_the_export(yarn, pair, tmp_path):
    with pytest.raises(ValueError, match=r"--yarn \S+ must be a factor above 1, for at most 2147483647 positions"):
        export_drafter(str(pair[1]), tmp_path / "out", yarn=yarn)
    with pytest.raises(ValueError, match="--context-length 1000000000000 is above"):
        export_drafter(str(pair[1]), tmp_path / "out", context_length=10**12)


def test_the_name_of_a_target_that_could_not_be_read_back_is_not_recorded(zlab, tmp_path):
    with pytest.raises(ValueError, match="`target_name_or_path` must be a name in one line, without quotes"):
        import_drafter(str(zlab), tmp_path / "back", target='my "best" model')
    assert not (tmp_path / "back").exists()


def test_a_command_ends_with_a_sentence_and_an_exit_code(zlab, tmp_path, monkeypatch, capsys):
    """One of each command, through the entry point."""
    add(zlab, **{"rotary_emb.inv_freq": torch.tensor(1.0)})
    config_of(tmp_path / "ours", target_name_or_path=[1])
    for arguments in (
        ("import", "zlab", "new/back"), ("inspect", "zlab"), ("card", "ours"), ("push", "ours", "me/d"), ("inspect", "ours"),
        ("export", "ours", "new/out", "--to", "speculators"),
    ):  # fmt: skip
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["dflash-hub", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        said = capsys.readouterr().err
        assert stopped.value.code == 2 and said.startswith("dflash-hub: ") and len(said.splitlines()) == 1, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "zlab"]


def test_the_writer_gives_what_the_library_gives(tmp_path, monkeypatch):
    """Also in pieces of one row each."""
    monkeypatch.setattr(checkpoint_module, "PIECE", 1)
    tensors = {
        "b": torch.randn(3, 5), "a": torch.randn(7).bfloat16(), "cé": torch.randn(2, 2, 2).half(),
        "d": torch.randn(1, 1).double(),
    }  # fmt: skip
    save_file(tensors, tmp_path / "library.safetensors", metadata={"format": "pt"})
    stored = checkpoint_module.tensors_of({tmp_path / "library.safetensors": None})
    write_tensors(tmp_path / "ours.safetensors", stored)
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "library.safetensors").read_bytes()
    assert torch.equal(stored["b"].rows(1, 2).whole(), tensors["b"][1:])
