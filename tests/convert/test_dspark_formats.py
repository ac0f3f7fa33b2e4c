"""DSpark's spellings in: each read as what its writer means, or refused by name."""

import json

import pytest
import torch
from dflash_hub import DFlashConfig, DFlashDraftModel
from dflash_hub.convert.adopting import adopt
from dflash_hub.convert.card import parts_in_words
from dflash_hub.convert.checkpoint import PIECE, InMemory, SpreadRows
from dflash_hub.convert.description import describe
from dflash_hub.convert.engines import blockers, serve_command
from dflash_hub.convert.exporting import export_drafter
from dflash_hub.convert.importing import import_drafter
from dflash_hub.convert.reading import read_drafter
from dflash_hub.modeling_dflash import rotate
from helpers.families import with_some_tokens
from helpers.formats import drafter_of
from helpers.tiny import DSPARK, tiny_config, tiny_drafter, tiny_target
from safetensors.torch import load_file, save_file

HEADS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "sample_from_anchor",
)


def written(folder, kind: str, change, rename=lambda name: name, turn=None, **overrides):
    """A drafter and its export with config.json as another writer has it: `change` gets flat and nested fields."""
    drafter = drafter_of(folder / "ours", f"DSpark, {kind}", **overrides)
    export_drafter(str(folder / "ours"), folder / "out", "dspark")
    config = json.loads((folder / "out" / "config.json").read_text())
    change(config, config["dflash_config"])
    (folder / "out" / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "out" / "model.safetensors")
    tensors = {rename(name): tensor if turn is None else turn(name, tensor) for name, tensor in tensors.items()}
    save_file(tensors, folder / "out" / "model.safetensors", metadata={"format": "pt"})
    return drafter


def flat_only(config, nested):
    """DeepSpec's: all fields flat, and none for the layout."""
    del config["dflash_config"], config["sample_from_anchor"], config["rope_is_neox_style"]


def nested_only(config, nested):
    """SpecForge's: the heads in `dflash_config`; what has its default is left out."""
    config["architectures"] = ["DSparkDraftModel"]
    for name in (*HEADS, "rope_is_neox_style", "mask_token_id", "target_layer_ids"):
        config.pop(name)
    for name in ("markov_head_type", "sample_from_anchor", "rope_is_neox_style", "enable_confidence_head"):
        nested.pop(name)
    nested |= {"confidence_head_alpha": 1.0, "attention_mode": "gqa"}


def liquid(config, nested):
    nested_only(config, nested)
    config["architectures"] = ["Lfm2DSparkDraftModel"]
    nested.pop("confidence_head_with_markov")
    nested["rope_is_neox_style"] = False


def interleaved(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The channels of queries and keys as RoPE of neighboring pairs has them."""
    if not any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm")):
        return tensor
    return tensor.unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2).contiguous()


@pytest.mark.parametrize(
    ("kind", "change", "rename", "turn"),
    (
        ("rnn", flat_only, lambda name: name, None),
        ("gated", flat_only, lambda name: f"model.{name}", None),
        ("vanilla", nested_only, lambda name: f"logit_head.{name}" if "_head." in name else name, None),
        ("vanilla", liquid, lambda name: name, interleaved),
    ),
)
def test_each_writers_files_are_read_as_what_they_are(kind, change, rename, turn, tmp_path):
    drafter = written(tmp_path, kind, change, rename, turn)
    import_drafter(str(tmp_path / "out"), tmp_path / "back")
    back, config = load_file(tmp_path / "back" / "model.safetensors"), DFlashConfig.from_pretrained(tmp_path / "back")
    assert {*back} == {*drafter.state_dict()}
    assert all(back[name].equal(tensor) for name, tensor in drafter.state_dict().items())
    assert all(getattr(config, name) == value for name, value in DSPARK[kind].items())


def test_neighboring_pairs_are_turned_as_ours_are():
    """A score of a query and a key, each turned in neighboring pairs, is that of the reordered ones turned in halves."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 8)
    angle = torch.rand(4)

    def neighbors(x, position):
        cos, sin, (a, b) = (angle * position).cos(), (angle * position).sin(), x.view(4, 2).T
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=1).flatten()

    def halves(x, position):
        both = (angle * position).repeat(2)[None, None]
        order = torch.cat([torch.arange(0, 8, 2), torch.arange(1, 8, 2)])
        return rotate(x[order][None, None, None], both.cos(), both.sin()).flatten()

    torch.testing.assert_close(neighbors(query, 5) @ neighbors(key, 2), halves(query, 5) @ halves(key, 2))


def test_block7_files_without_heads_draft_from_the_anchor(tmp_path):
    """deepseek-ai's `dflash_*_block7`: no Markov head, no confidence; read as z-lab's DFlash they would be one token off."""
    drafter = drafter_of(tmp_path / "ours", "anchor-first")
    export_drafter(str(tmp_path / "ours"), tmp_path / "out", "dspark")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    flat_only(config, config["dflash_config"])
    for name in ("markov_head_type", "confidence_head_with_markov"):
        del config[name]
    path.write_text(json.dumps(config))
    assert config["markov_rank"] == 0 and config["architectures"] == ["Qwen3DSparkModel"]
    read = read_drafter(str(tmp_path / "out"))
    assert read.config.drafts_per_block == 5 == drafter.config.drafts_per_block and read.config.markov_rank is None
    assert parts_in_words(read.config) == "the anchor's position drafts too" in describe(read)
    with pytest.raises(ValueError, match="architectures"):
        DFlashDraftModel.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "sentence"),
    (
        (lambda c, n: c.update(architectures=["Gemma4DSparkModel"]), "found \\['Gemma4DSparkModel'\\]. DSpark drafters of other"),
        (lambda c, n: c.update(dspark_block_size=7), "the config states \\['dspark_block_size'\\]"),
        (lambda c, n: n.update(conv_kernel_size=2), "states \\['conv_kernel_size'\\]"),
        (lambda c, n: n.update(causal=True), "states \\['causal'\\]"),
        (lambda c, n: n.update(moe_layers=2), "`dflash_config` holds \\['moe_layers'\\]"),
        (lambda c, n: n.update(attention_sink_bias=True), "attention sinks"),
        (lambda c, n: n.update(projector_type="domino") or c.update(architectures=["DFlashDraftModel"]), "a Domino"),
        (lambda c, n: n.update(markov_rank=8), "`markov_rank` is stated twice and differs: \\[4, 8\\]"),
        (lambda c, n: [p.update(markov_rank=8) for p in (c, n)], "markov_w1.weight has shape \\[97, 4\\]; the config says \\[97, 8\\]"),
        (lambda c, n: [p.update(markov_rank=0) for p in (c, n)], "must be one of .* without a Markov head"),
        (lambda c, n: [p.update(markov_head_type="vanilla") for p in (c, n)], "gate_proj.bias is of DSpark's Markov head"),
        (lambda c, n: [p.update(confidence_head_with_markov=False) for p in (c, n)], "proj.weight has shape \\[1, 36\\]; the config says \\[1, 32\\]"),
        (lambda c, n: [p.update(enable_confidence_head=False) for p in (c, n)], "of DSpark's confidence head"),
        (lambda c, n: [p.pop("enable_confidence_head") for p in (c, n)], "does not state \\['enable_confidence_head'"),
        (lambda c, n: c.update(sample_from_anchor=False), "`sample_from_anchor` is stated twice"),
        (lambda c, n: c.update(layer_types=["sliding_attention"] * 2, sliding_window=8, use_sliding_window=True, is_causal=None), "`is_causal` must say"),
    ),
)  # fmt: skip
def test_what_is_refused(change, sentence, tmp_path):
    written(tmp_path, "gated", change)
    with pytest.raises(ValueError, match=sentence):
        import_drafter(str(tmp_path / "out"), tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("stated", "drafted", "expected"),
    ((True, 5, True), (None, 5, True), (None, 4, False), (False, None, False), (None, None, "is not stated"), (True, 4, "drafts 4 tokens")),
)  # fmt: skip
def test_the_layout_of_speculators_files(stated, drafted, expected, tmp_path):
    """Files of the first versions lack the field; how many tokens the writer drafts tells. Without either it is not known."""
    tiny_target("llama").to(torch.bfloat16).save_pretrained(tmp_path / "target")
    drafter_of(tmp_path / "ours", "DSpark, vanilla", target_name_or_path=str(tmp_path / "target"))
    export_drafter(str(tmp_path / "ours"), tmp_path / "out", "speculators")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    assert config["sample_from_anchor"] is True and config["speculators_model_type"] == "dspark"
    method = config["speculators_config"]["proposal_methods"][0]
    assert method["speculative_tokens"] == 5
    config["sample_from_anchor"], method["speculative_tokens"] = stated, drafted
    path.write_text(json.dumps(config))
    if isinstance(expected, bool):
        assert read_drafter(str(tmp_path / "out")).config.sample_from_anchor is expected
    else:
        with pytest.raises(ValueError, match=expected):
            read_drafter(str(tmp_path / "out"))


def test_a_markov_head_of_a_reduced_vocabulary(tmp_path):
    """Its last table has a row a listed token. Here it has one a token of the target, zero where none is listed."""
    target, drafter = tiny_target("llama"), tiny_drafter(draft_vocab_size=20, **DSPARK["vanilla"])
    with_some_tokens(drafter)
    target.save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "ours")
    export_drafter(str(tmp_path / "ours"), tmp_path / "out", "speculators", target=str(tmp_path / "target"))
    listed = drafter.d2t + torch.arange(20)
    there = load_file(tmp_path / "out" / "model.safetensors")["markov_head.markov_w2.weight"]
    assert there.equal(drafter.markov_head.markov_w2.weight[listed])
    import_drafter(str(tmp_path / "out"), tmp_path / "back", target=str(tmp_path / "target"))
    table = DFlashDraftModel.from_pretrained(tmp_path / "back").markov_head.markov_w2.weight
    assert table.shape == (97, 4) and table[listed].equal(there) and not table.index_fill(0, listed, 0).any()
    export_drafter(str(tmp_path / "back"), tmp_path / "again", "speculators", target=str(tmp_path / "target"))
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "again")]
    assert files[0] == files[1]


def test_rows_are_spread_piece_by_piece():
    listed = torch.ones(2, PIECE // 16, dtype=torch.float64)  # two rows a piece
    pieces = [*SpreadRows(InMemory(None, "w2", listed), torch.tensor([1, 4]), 5).pieces()]
    assert [piece[:, -1].tolist() for piece in pieces] == [[0, 1], [0, 0], [1]]


def test_who_serves_a_drafter_of_dspark():
    config = tiny_config(**DSPARK["vanilla"], target_name_or_path="org/target")
    assert not blockers("vllm", config) and not blockers("sglang", config)
    assert '"method": "dspark", "model": "d", "num_speculative_tokens": 5' in serve_command("vllm", config, "d")
    assert "--speculative-algorithm DSPARK" in serve_command("sglang", config, "d")
    assert serve_command("sglang", config, "d").endswith("--speculative-num-draft-tokens 6")
    assert "takes every Markov head for 'vanilla'" in blockers("vllm", tiny_config(**DSPARK["rnn"]))[0]
    assert "needs a Markov head" in blockers("vllm", tiny_config(sample_from_anchor=True))[0]
    assert (
        "counts the drafts" in blockers("sglang", tiny_config(**DSPARK["vanilla"] | {"sample_from_anchor": False}))[0]
    )
    assert "no class for DSpark" in blockers("zlab", config)[0]


def test_an_object_with_turned_neighbors_is_not_adopted(tmp_path):
    drafter = tiny_drafter(**DSPARK["vanilla"])
    drafter.save_pretrained(tmp_path / "ours")
    export_drafter(str(tmp_path / "ours"), tmp_path / "out", "dspark")

    class Foreign(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config, self.inner = config, drafter

        def state_dict(self, **kwargs):
            return self.inner.state_dict(**kwargs)

        def named_buffers(self, *args, **kwargs):
            return iter(())

    config, target = json.loads((tmp_path / "out" / "config.json").read_text()), tiny_target("llama")
    adopted = adopt(Foreign(config), target)
    assert adopted.markov_head.markov_w1.weight is drafter.markov_head.markov_w1.weight
    config["rope_is_neox_style"] = config["dflash_config"]["rope_is_neox_style"] = False
    with pytest.raises(ValueError, match="turns neighboring channels"):
        adopt(Foreign(config), target)
