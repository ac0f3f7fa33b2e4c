"""llama.cpp's one file: what it states, that it comes back, and what it cannot state. `make engines` runs the engine itself."""

import sys

import gguf
import numpy as np
import pytest
import torch
from dflash_hub import DFlashConfig, DFlashDraftModel
from dflash_hub.cli.app import app
from dflash_hub.common.target_source import TargetSource
from dflash_hub.convert.exporting import export_drafter
from dflash_hub.convert.gguf_files import unserved_target
from dflash_hub.convert.gguf_layout import NOT_CARRIED
from dflash_hub.convert.importing import import_drafter
from dflash_hub.drafter_vocabulary import token_ids_of
from helpers.families import with_some_tokens
from helpers.folders import save_target, tiny_tokenizer
from helpers.formats import FULL, KINDS, SLIDING, YARN, drafter_of
from helpers.tiny import CONVOLUTION, SELECTOR, VOCAB
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import MistralConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen3MoeConfig
from typer.testing import CliRunner

SAYABLE = [kind for kind in KINDS if "gguf" in KINDS[kind][1]]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A target with SmolLM2's kind of tokenizer: bytes, one merge, two tokens beside them."""
    letters = [chr(code) for code in range(97, 123)]
    vocabulary = {text: number for number, text in enumerate([*letters, "ab"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.add_tokens([AddedToken("<end>", special=True), AddedToken("<tool>", special=False)])
    folder = tmp_path_factory.mktemp("target")
    save_target(folder, tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>"))
    return str(folder)


def drafter(folder, kind="plain", **overrides):
    return drafter_of(folder, kind, num_target_layers=8, **overrides)


def stated(path) -> dict:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items() if "." in name}


def written(tmp_path, target, kind="plain", file_type=None, **overrides):
    model = drafter(tmp_path / "ours", kind, **overrides)
    export_drafter(str(tmp_path / "ours"), tmp_path / "d.gguf", "gguf", target=target, file_type=file_type)
    return model


@pytest.mark.parametrize("kind", SAYABLE)
def test_what_is_written_comes_back(kind, tmp_path, target):
    model = written(tmp_path, target, kind)
    import_drafter(str(tmp_path / "d.gguf"), tmp_path / "back", target=target)
    there, here = load_file(tmp_path / "back" / "model.safetensors"), model.state_dict()
    assert set(there) == set(here) and all(torch.equal(there[name], here[name].to(there[name].dtype)) for name in here)
    config = DFlashConfig.from_pretrained(tmp_path / "back")
    for name in DFlashConfig.__annotations__:
        if name not in NOT_CARRIED or name in ("vocab_size", "num_target_layers"):
            assert getattr(config, name) == getattr(model.config, name), name
    assert DFlashDraftModel.from_pretrained(tmp_path / "back", dtype="auto").dtype is torch.bfloat16


@pytest.mark.parametrize(
    "file_type, kind, number",
    [("float32", "F32", 0), ("float16", "F16", 1), ("bfloat16", "BF16", 32), ("q8_0", "Q8_0", 7)],
)
def test_every_type_of_weights(file_type, kind, number, tmp_path, target):
    model = written(tmp_path, target, file_type=file_type, dtype=torch.float32)
    reader = gguf.GGUFReader(tmp_path / "d.gguf")
    assert reader.fields["general.file_type"].contents() == number
    for tensor in reader.tensors:
        # Norms stay float32; rows that are no whole blocks of 32 go to float16, as llama.cpp's converter writes them.
        expected = "F32" if len(tensor.shape) == 1 else "F16" if kind == "Q8_0" and tensor.shape[0] % 32 else kind
        assert tensor.tensor_type.name == expected, tensor.name
    import_drafter(str(tmp_path / "d.gguf"), tmp_path / "back", target=target)
    for name, tensor in load_file(tmp_path / "back" / "model.safetensors").items():
        exact = model.state_dict()[name]
        # Half a step of 127 on each side, of the block's largest value, or of the type's precision.
        step = {"F32": 0, "F16": 2**-11, "BF16": 2**-8, "Q8_0": 0.5 / 127 + 2**-10}[kind]
        assert (tensor.float() - exact).abs().max() <= step * exact.abs().max(), name


def test_the_metadata_says_what_llamacpp_reads(tmp_path, target):
    model = written(tmp_path, target, "mixed, bidirectional", output_multiplier=0.5, input_embedding_scale=2.0)
    config, said = model.config, stated(tmp_path / "d.gguf")
    expected = {
        "general.architecture": "dflash",
        "general.type": "model",
        "general.file_type": 32,
        "dflash.block_count": 2,
        "dflash.context_length": config.max_position_embeddings,
        "dflash.embedding_length": config.hidden_size,
        "dflash.feed_forward_length": config.intermediate_size,
        "dflash.attention.head_count": config.num_attention_heads,
        "dflash.attention.head_count_kv": config.num_key_value_heads,
        "dflash.attention.key_length": config.head_dim,
        "dflash.attention.value_length": config.head_dim,
        "dflash.attention.layer_norm_rms_epsilon": np.float32(config.rms_norm_eps),
        "dflash.attention.causal": False,
        "dflash.attention.sliding_window": 8,
        "dflash.attention.sliding_window_pattern": [True, False],
        "dflash.rope.freq_base": np.float32(YARN["rope_theta"]),
        "dflash.rope.scaling.type": "yarn",
        "dflash.rope.scaling.factor": 4.0,
        "dflash.rope.scaling.original_context_length": 128,
        "dflash.block_size": config.block_size,
        # From the embeddings there: our layer 0 is their 1.
        "dflash.target_layers": [layer + 1 for layer in config.target_layer_ids],
        "dflash.logit_scale": 0.5,
        "dflash.embedding_scale": 2.0,
        "tokenizer.ggml.mask_token_id": config.mask_token_id,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 27,
        "tokenizer.ggml.add_bos_token": False,
    }
    assert {name: said.get(name) for name in expected} == expected
    tokens, types = said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == VOCAB and tokens[26:31] == ["ab", "<end>", "<tool>", "[PAD29]", "[PAD30]"]
    kind = gguf.TokenType
    assert types[26:30] == [kind.NORMAL, kind.CONTROL, kind.USER_DEFINED, kind.UNUSED]
    names = {tensor.name for tensor in gguf.GGUFReader(tmp_path / "d.gguf").tensors}
    parts = (
        "attn_norm attn_q attn_k attn_v attn_output attn_q_norm attn_k_norm ffn_norm ffn_gate ffn_up ffn_down".split()
    )
    layers = {f"blk.{layer}.{part}.weight" for layer in range(2) for part in parts}
    assert names == layers | {"fc.weight", "enc.output_norm.weight", "output_norm.weight"}


def test_the_parts_of_dflash_2_are_where_llamacpp_looks(tmp_path, target):
    model = written(tmp_path, target, "DFlash 2")
    config, said = model.config, stated(tmp_path / "d.gguf")
    for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        assert said[f"dflash.{name}"] == getattr(config, name)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "d.gguf").tensors}
    taps, groups = config.conv_kernel_size, config.hidden_size // config.conv_group_size
    for part in ("attn", "ffn"):
        # Dimensions are named from the innermost; a base kernel is added in float32, whatever the others are in.
        base, projection = tensors[f"blk.1.{part}_conv_base"], tensors[f"blk.1.{part}_conv_proj.weight"]
        assert (base.tensor_type.name, base.shape.tolist()) == ("F32", [config.hidden_size, taps, 2])
        assert (projection.tensor_type.name, projection.shape.tolist()) == ("BF16", [32, 2 * taps * groups])
    ours = model.layers[1].mlp_conv.base_kernel.float()
    assert np.array_equal(tensors["blk.1.ffn_conv_base"].data, ours.detach().numpy())
    for part, rows in (("predecessor", VOCAB), ("successor", VOCAB)):
        assert tensors[f"selector_{part}.weight"].shape.tolist() == [config.selector_rank, rows]
    assert tensors["selector_hidden.weight"].shape.tolist() == [32, config.selector_rank]


def test_a_number_of_float32_in_all_its_digits_is_the_short_one(tmp_path, target):
    """Configs that were made from a GGUF file have such numbers."""
    written(tmp_path, target, rms_norm_eps=9.999999974752427e-07)
    import_drafter(str(tmp_path / "d.gguf"), tmp_path / "back", target=target)
    assert DFlashConfig.from_pretrained(tmp_path / "back").rms_norm_eps == 1e-06


@pytest.mark.parametrize("file_type", ("float32", "q8_0"))
def test_a_list_of_tokens_comes_with_its_rows_of_the_head(file_type, tmp_path, target):
    """Token ids there, offsets here; llama.cpp reads no rows of the target's own head then."""
    model = with_some_tokens(drafter(tmp_path / "ours", draft_vocab_size=40))
    model.save_pretrained(tmp_path / "ours")
    done = export_drafter(str(tmp_path / "ours"), tmp_path / "d.gguf", "gguf", target=target, file_type=file_type)
    assert any("40 tokens" in warning and "accept less" in warning for warning in done.warnings)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "d.gguf").tensors}
    tokens = token_ids_of(model.d2t)
    assert tensors["d2t"].tensor_type.name == "I64" and tensors["d2t"].data.tolist() == tokens.tolist()
    head = load_file(f"{target}/model.safetensors")["lm_head.weight"][tokens]
    rows = gguf.quants.dequantize(tensors["output.weight"].data, tensors["output.weight"].tensor_type)
    assert np.abs(rows - head.numpy()).max() <= (0 if file_type == "float32" else head.abs().max() / 127)
    imported = import_drafter(str(tmp_path / "d.gguf"), tmp_path / "back", target=target)
    assert any("lm_head.weight: equal to those of" in note for note in imported.notes)
    back = DFlashDraftModel.from_pretrained(tmp_path / "back")
    assert torch.equal(back.d2t, model.d2t) and back.config.draft_vocab_size == 40
    # Another head is seen, also beside weights that were rounded.
    save_target(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match="lm_head.weight differs from that of the target"):
        import_drafter(str(tmp_path / "d.gguf"), tmp_path / "again", target=str(tmp_path / "other"))


def test_the_rows_of_listed_tokens_are_read_from_a_targets_file(tmp_path):
    model = with_some_tokens(drafter(tmp_path / "ours", draft_vocab_size=40))
    model.save_pretrained(tmp_path / "ours")
    tables = {name: np.random.default_rng(0).normal(size=(VOCAB, 32)).astype(np.float32) for name in ("tied", "own")}
    quantized = gguf.quants.quantize(tables["own"], gguf.GGMLQuantizationType.Q4_0)
    for name, more, expected in (
        ("tied", {}, tables["tied"]),
        ("own", {"output.weight": quantized}, gguf.quants.dequantize(quantized, gguf.GGMLQuantizationType.Q4_0)),
    ):
        file = target_file(tmp_path / "t.gguf", tensors={"token_embd.weight": tables["tied"]} | more)
        export_drafter(str(tmp_path / "ours"), tmp_path / f"{name}.gguf", "gguf", target=file, file_type="float32")
        rows = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / f"{name}.gguf").tensors}[
            "output.weight"
        ]
        assert np.array_equal(rows, expected[token_ids_of(model.d2t)]), name
    with pytest.raises(ValueError, match="no embedding in the target's file"):
        export_drafter(str(tmp_path / "ours"), tmp_path / "d.gguf", "gguf", target=target_file(tmp_path / "t.gguf"))
    biased = target_file(
        tmp_path / "t.gguf", tensors={"token_embd.weight": tables["tied"], "output.bias": np.ones(VOCAB, np.float32)}
    )
    with pytest.raises(ValueError, match="has a bias"):
        export_drafter(str(tmp_path / "ours"), tmp_path / "d.gguf", "gguf", target=biased)
    assert not (tmp_path / "d.gguf").exists()


def test_a_target_that_llamacpp_does_not_serve_with_a_drafter_is_told(tmp_path):
    drafter(tmp_path / "ours")
    for name, told in (("qwen2", True), ("qwen3", False)):
        file = target_file(tmp_path / f"{name}.gguf", architecture=name)
        done = export_drafter(str(tmp_path / "ours"), tmp_path / "d.gguf", "gguf", target=file, force=True)
        assert any(f"of the architecture '{name}'" in warning for warning in done.warnings) == told
    for config, told in ((Qwen2Config(), True), (Qwen3MoeConfig(), False), (MistralConfig(), False)):
        config.save_pretrained(tmp_path / "target")
        assert bool(unserved_target(TargetSource.of(str(tmp_path / "target")))) == told


def target_file(path, tokens=VOCAB, width=32, layers=8, sections=False, tensors=None, architecture="llama"):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_embedding_length(width)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{i}" for i in range(tokens)])
    writer.add_token_scores([float(-i) for i in range(tokens)])
    writer.add_mask_token_id(3)
    if sections:
        writer.add_array("llama.rope.dimension_sections", [4, 4, 4, 0])
    writer.add_tensor("output_norm.weight", np.ones(width, dtype=np.float32))
    for name, data in (tensors or {}).items():
        kind = gguf.GGMLQuantizationType.Q4_0 if data.dtype == np.uint8 else None
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def test_the_tokenizer_of_a_targets_file_is_taken_as_it_is(tmp_path):
    """Any kind of tokenizer then; only the mask token is the drafter's."""
    model = drafter(tmp_path / "ours")
    file = target_file(tmp_path / "t.gguf", width=model.config.hidden_size, sections=True)
    export_drafter(str(tmp_path / "ours"), tmp_path / "d.gguf", "gguf", target=file)
    said, theirs = stated(tmp_path / "d.gguf"), stated(file)
    for name in ("model", "tokens", "scores"):
        assert said[f"tokenizer.ggml.{name}"] == theirs[f"tokenizer.ggml.{name}"]
    assert said["tokenizer.ggml.mask_token_id"] == model.config.mask_token_id != 3
    assert said["dflash.rope.dimension_sections"] == [model.config.head_dim // 2, 0, 0, 0]
    for other, sentence in (
        ({"layers": 9}, "has 9 layers"),
        ({"width": 64}, "has width 64"),
        ({"tokens": 50}, "and 50 tokens"),
    ):
        width = {"width": model.config.hidden_size} | other
        with pytest.raises(ValueError, match=sentence):
            export_drafter(
                str(tmp_path / "ours"), tmp_path / "e.gguf", "gguf", target=target_file(tmp_path / "o.gguf", **width)
            )
    assert not list(tmp_path.glob("*e.gguf*"))


def test_what_llamacpp_computes_in_another_way_is_refused(tmp_path, target):
    cases = {
        "bias, yarn": "`attention_bias` is true",
        "mixed": "`block_causal` is",
        "selector": "`selector_rank` is 4 without the other part",
        "anchor-first": "`sample_from_anchor` is True; it knows no DSpark",
    }
    cases |= {kind: "`markov_rank` is 4; it knows no DSpark" for kind in KINDS if kind.startswith("DSpark")}
    assert set(KINDS) == {*SAYABLE, *cases}
    more = {
        "its converter knows only 'silu'": {"hidden_act": "gelu"},
        r"holds \['attention_factor'\]": {"rope_parameters": YARN | {"attention_factor": 1.0}},
        "of the type 'llama3'": {
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0,
                                "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
        },
        "the window 3 is shorter than a block": {
            "layer_types": [SLIDING, FULL], "sliding_window": 3, "block_causal": [False, False]
        },
        "hidden size 32 is below the 42 numbers": CONVOLUTION | SELECTOR,
    }  # fmt: skip
    for number, (kind, sentence, overrides) in enumerate(
        [(kind, sentence, {}) for kind, sentence in cases.items()]
        + [("plain", sentence, overrides) for sentence, overrides in more.items()]
    ):
        drafter(tmp_path / f"{number}", kind, **overrides)
        with pytest.raises(ValueError, match=sentence):
            export_drafter(str(tmp_path / f"{number}"), tmp_path / "d.gguf", "gguf", target=target)
    assert not list(tmp_path.glob("*.gguf*"))


def test_bad_arguments_end_with_a_sentence_and_leave_nothing(tmp_path, target, monkeypatch):
    drafter(tmp_path / "ours", dtype=torch.float32)
    save_target(tmp_path / "words", tokenizer=tiny_tokenizer(90))
    (tmp_path / "there.gguf").write_text("mine")
    for arguments, sentence in (
        (["d", "--to", "gguf"], "give it a name that ends in .gguf"),
        (["d.gguf", "--to", "zlab"], "--to zlab writes a folder"),
        (["d", "--to", "zlab", "--dtype", "float16"], "--dtype is for --to gguf"),
        (["d.gguf", "--to", "gguf", "--dtype", "q4_0"], "none of float32, float16, bfloat16, q8_0"),
        (["d.gguf", "--to", "gguf", "--target", tmp_path / "words"], "pass the target's own GGUF file"),
        (["d.gguf", "--to", "gguf", "--target", "no.gguf"], "no.gguf is no file here"),
        (["d.gguf", "--to", "gguf"], "none is recorded; pass --target"),
        (["there.gguf", "--to", "gguf", "--target", target], "exists; choose another destination"),
    ):
        arguments[0] = tmp_path / arguments[0]
        result = CliRunner().invoke(app, ["export", str(tmp_path / "ours"), *map(str, arguments)])
        assert result.exit_code and sentence in str(result.exception), sentence
    assert (tmp_path / "there.gguf").read_text() == "mine"
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match="pip install gguf"):
        export_drafter(str(tmp_path / "ours"), tmp_path / "d.gguf", "gguf", target=target)
    assert {path.name for path in tmp_path.iterdir()} == {"ours", "words", "there.gguf"}


def test_weights_that_the_type_does_not_hold_are_refused(tmp_path, target):
    model = drafter(tmp_path / "ours", dtype=torch.float32)
    with torch.no_grad():
        model.layers[0].mlp.up_proj.weight[0, 0] = 1e5
    model.save_pretrained(tmp_path / "ours")
    for file_type in ("float16", "q8_0"):
        with pytest.raises(ValueError, match=r"blk.0.ffn_up.weight holds a value beyond float16's range"):
            export_drafter(str(tmp_path / "ours"), tmp_path / "d.gguf", "gguf", target=target, file_type=file_type)
    assert not list(tmp_path.glob("*.gguf*"))


def test_files_that_are_no_drafter_are_named(tmp_path, target):
    written(tmp_path, target)
    whole = (tmp_path / "d.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.gguf").write_text("a drafter")
    # A name of the same length, so that the rest of the file stays where it is.
    (tmp_path / "part.gguf").write_bytes(whole.replace(b"dflash.block_size", b"dflash.conv_kerne"))
    (tmp_path / "deep.gguf").write_bytes(deeper(whole))
    for name, sentence in (
        ("cut", "no GGUF file, or damaged"),
        ("text", "no GGUF file, or damaged"),
        ("part", r"states \['conv_kerne'\], which this version does not know"),
        ("deep", "states 4294967295 layers, but its files hold"),
        ("none", "is no file here"),
    ):
        with pytest.raises((ValueError, OSError), match=sentence):
            import_drafter(str(tmp_path / f"{name}.gguf"), tmp_path / "back", target=target)
    other = target_file(tmp_path / "llama.gguf")
    with pytest.raises(ValueError, match="`general.architecture` is 'llama'"):
        import_drafter(other, tmp_path / "back", target=target)
    with pytest.raises(ValueError, match="does not say how many layers its target has; pass --target"):
        import_drafter(str(tmp_path / "d.gguf"), tmp_path / "back")
    assert not (tmp_path / "back").exists()


def deeper(file: bytes) -> bytes:
    """The same file, with the largest number of layers."""
    at = file.index(b"dflash.block_count") + len("dflash.block_count") + 4  # behind the name and the type of the value
    return file[:at] + b"\xff" * 4 + file[at + 4 :]


def test_inspect_says_what_a_file_is_and_how_it_is_served(tmp_path, target):
    written(tmp_path, target, file_type="q8_0")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "d.gguf"), "--target", target])
    assert result.exit_code == 0, result.output
    for part in (
        "llama.cpp's GGUF",
        f"llama-server -m TARGET.gguf -md {tmp_path / 'd.gguf'}",
        "weights are quantized (Q8_0)",
    ):
        assert part in result.output.replace("\\\n", ""), part
    again = ["export", tmp_path / "ours", tmp_path / "d.gguf", "--to", "gguf", "--target", target, "--force"]
    printed = CliRunner().invoke(app, [*map(str, again)]).output
    assert f"llama-server -m TARGET.gguf -md {tmp_path / 'd.gguf'}" in printed and "tried with llama.cpp" in printed
    ours = CliRunner().invoke(app, ["inspect", str(tmp_path / "ours")]).output
    assert f"dflash-hub export {tmp_path / 'ours'} drafter.gguf --to gguf --target TARGET" in ours
