"""The drafter equals a brute-force one, on every path that leads to it, and loads and saves strictly."""

import json
import pickle

import pytest
import torch
from dflash_hub import DFlashDraftModel
from dflash_hub.target_masks import is_flash
from helpers import brute_force
from helpers.tiny import CODE, prompt_of, tiny_config, tiny_drafter, tiny_target
from safetensors.torch import load_file, save_file
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 64}
KINDS = {
    "full": {},
    "attention bias": {"attention_bias": True},
    "full causal": {"block_causal": [True, True]},
    "sliding": {"layer_types": [SLIDING, SLIDING], "sliding_window": 8, "block_causal": [False, False]},
    "sliding, narrower than the block": {
        "layer_types": [SLIDING] * 2,
        "sliding_window": 3,
        "block_causal": [False] * 2,
    },
    "sliding causal": {"layer_types": [SLIDING, SLIDING], "sliding_window": 8},
    "mixed": {"layer_types": [SLIDING, FULL], "sliding_window": 8},
    "yarn": {"rope_parameters": YARN},
    "scaled embeddings": {"input_embedding_scale": 3.0},
}
BACKENDS = ("eager", "sdpa", "flex_attention", "flash")


def flash_stand_in(
    module, query, key, value, attention_mask, scaling, is_causal, sliding_window, dropout=0.0, **kwargs
):
    """What flash attention does with its arguments: a causal mask and a window on both sides, aligned at the end."""
    length, keys = query.shape[2], key.shape[2]
    at = torch.arange(keys - length, keys)[:, None] - torch.arange(keys)[None]
    visible = torch.ones(length, keys, dtype=torch.bool)
    if is_causal:
        visible &= at >= 0
    if sliding_window is not None:
        visible &= at.abs() <= sliding_window - 1
    visible = visible[None, None]
    if attention_mask is not None:
        assert attention_mask.ndim == 2
        visible = visible & attention_mask[:, None, None, :].bool()
    groups = query.shape[1] // key.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), visible, scale=scaling
    )
    return out.transpose(1, 2).contiguous(), None


@pytest.fixture
def drafter_with(monkeypatch):
    def make(backend: str, **overrides):
        drafter = tiny_drafter(**overrides)
        if backend == "flash":
            monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "flash_stand_in", flash_stand_in)
            drafter.config._attn_implementation_internal = "flash_stand_in"
            assert is_flash(drafter.config._attn_implementation)
        else:
            drafter.set_attn_implementation(backend)
        return drafter

    return make


def inputs_for(drafter, context: int, blocks: int = 1, batch: int = 2):
    generator = torch.Generator().manual_seed(3)
    config = drafter.config
    noise = torch.randn(batch, blocks * config.block_size, config.hidden_size, generator=generator)
    features = torch.randn(batch, context, len(config.target_layer_ids) * config.hidden_size, generator=generator)
    return noise, features


def check(actual, expected):
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_equals_brute_force(kind, backend, drafter_with):
    """Pitfalls 52, 54, 55, 56: without cache, with the context at once, and in pieces; also at a window's edge."""
    drafter = drafter_with(backend, **KINDS[kind])
    for context in (7, 8, 14) if backend in ("eager", "sdpa") else (14,):
        noise, features = inputs_for(drafter, context)
        expected = brute_force.forward(drafter, noise, features, range(context), [context])
        check(drafter(noise, features).last_hidden_state, expected)

        cache = DynamicCache(config=drafter.config)
        cache.activate_past_recording()
        pieces = [5, 1, context - 6] if context > 6 else [context]
        done = 0
        for size in pieces:
            out = drafter(noise, features[:, done : done + size], cache=cache).last_hidden_state
            cache.crop(-drafter.config.block_size)
            done += size
            assert cache.get_seq_length() == done
        check(out, expected)
        # Nothing new: the same block again, from the cache alone.
        check(drafter(noise, features[:, :0], cache=cache).last_hidden_state, expected)


@pytest.mark.parametrize("start", (0, 700))
@torch.no_grad()
def test_positions_far_into_yarn(start):
    drafter = tiny_drafter(rope_parameters=YARN, max_position_embeddings=1024)
    noise, features = inputs_for(drafter, 6)
    positions = torch.arange(start, start + 11)[None].expand(2, -1)
    expected = brute_force.forward(drafter, noise, features, range(start, start + 6), [start + 6])
    check(drafter(noise, features, position_ids=positions).last_hidden_state, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ("full", "sliding", "mixed"))
@torch.no_grad()
def test_padding_is_not_seen(kind, backend, drafter_with):
    drafter = drafter_with(backend, **KINDS[kind])
    noise, features = inputs_for(drafter, 10)
    mask = torch.ones(2, 15, dtype=torch.long)
    mask[1, :4] = 0
    hidden = {(1, j) for j in range(4)}
    expected = brute_force.forward(drafter, noise, features, range(10), [10], hidden)
    check(drafter(noise, features, attention_mask=mask).last_hidden_state, expected)


def training_masks(config, context: int, anchors: list[int]):
    """One boolean mask a layer for several blocks side by side, from the brute-force rule."""
    slots = [(a + s, block, a) for block, a in enumerate(anchors) for s in range(config.block_size)]
    keys = [(position, None, None) for position in range(context)] + slots
    return [
        torch.tensor([[brute_force.sees(config, layer, q, k) for k in keys] for q in slots])[None, None]
        for layer in range(config.num_hidden_layers)
    ]


@pytest.mark.parametrize("backend", ("eager", "sdpa", "flex_attention"))
@pytest.mark.parametrize("kind", ("full", "sliding", "mixed"))
@torch.no_grad()
def test_several_blocks_with_a_ready_mask(kind, backend, drafter_with):
    drafter = drafter_with(backend, **KINDS[kind])
    anchors, context = [3, 9, 4], 12
    noise, features = inputs_for(drafter, context, blocks=3)
    positions = [*range(context), *(a + s for a in anchors for s in range(5))]
    positions = torch.tensor(positions)[None].expand(2, -1)
    masks = training_masks(drafter.config, context, anchors)
    expected = brute_force.forward(drafter, noise, features, range(context), anchors)
    out = drafter(noise, features, attention_mask=masks, position_ids=positions).last_hidden_state
    check(out, expected)
    if len({mask.numpy().tobytes() for mask in masks}) == 1:
        out = drafter(noise, features, attention_mask=masks[0], position_ids=positions).last_hidden_state
        check(out, expected)


@torch.no_grad()
def test_a_flex_block_mask_is_used_as_given():
    from torch.nn.attention.flex_attention import create_block_mask

    drafter = tiny_drafter()
    drafter.set_attn_implementation("flex_attention")
    anchors, context = [3, 9], 12
    noise, features = inputs_for(drafter, context, blocks=2)
    positions = torch.tensor([*range(context), *(a + s for a in anchors for s in range(5))])[None].expand(2, -1)
    table = training_masks(drafter.config, context, anchors)[0][0, 0]
    block_mask = create_block_mask(lambda b, h, q, k: table[q, k], None, None, 10, 22, device="cpu")
    expected = brute_force.forward(drafter, noise, features, range(context), anchors)
    check(drafter(noise, features, attention_mask=block_mask, position_ids=positions).last_hidden_state, expected)


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_gradient_checkpointing_changes_nothing_but_memory(use_reentrant):
    """Pitfall 84: the same gradients, the context's included, and every layer is really run again."""
    drafter = tiny_drafter().train()
    noise, features = inputs_for(drafter, 9)
    noise.requires_grad_()
    runs = []
    for layer in drafter.layers:
        layer.self_attn.register_forward_pre_hook(lambda *args: runs.append(1))

    def gradients():
        drafter.zero_grad()
        runs.clear()
        drafter(noise, features).last_hidden_state.square().sum().backward()
        return {name: p.grad.clone() for name, p in drafter.named_parameters()}, len(runs)

    plain, plain_runs = gradients()
    drafter.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    checkpointed, checkpointed_runs = gradients()
    assert (plain_runs, checkpointed_runs) == (2, 4)
    for name in plain:
        torch.testing.assert_close(checkpointed[name], plain[name])
    assert checkpointed["fc.weight"].abs().sum() > 0


@torch.no_grad()
def test_hidden_states_and_attentions_when_asked():
    drafter = tiny_drafter()
    drafter.set_attn_implementation("eager")
    noise, features = inputs_for(drafter, 9)
    out = drafter(noise, features, output_hidden_states=True, output_attentions=True)
    assert [tuple(h.shape) for h in out.hidden_states] == [(2, 5, 32)] * 3
    assert [tuple(a.shape) for a in out.attentions] == [(2, 4, 5, 14)] * 2
    torch.testing.assert_close(out.attentions[0].sum(-1), torch.ones(2, 4, 5))
    assert drafter(noise, features).hidden_states is None


@torch.no_grad()
def test_both_names_of_the_cache():
    """Pitfall 25."""
    drafter = tiny_drafter()
    noise, features = inputs_for(drafter, 9)
    caches = DynamicCache(config=drafter.config), DynamicCache(config=drafter.config)
    a = drafter(noise, features, cache=caches[0]).last_hidden_state
    b = drafter(noise, features, past_key_values=caches[1]).last_hidden_state
    assert torch.equal(a, b) and caches[0].get_seq_length() == caches[1].get_seq_length() == 14


@torch.no_grad()
def test_half_precision_keeps_exact_frequencies():
    drafter = tiny_drafter()
    exact = drafter.rotary_emb.inv_freq.clone()
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(drafter.to(dtype).rotary_emb.inv_freq, exact)
    noise, features = inputs_for(drafter, 9)
    assert drafter(noise, features).last_hidden_state.dtype is torch.float16


@pytest.mark.parametrize(
    ("change", "sentence"),
    (
        (lambda n, f: (n[..., :-1], f), r"`noise_embeds` must be \(batch, block, 32\), got \(2, 5, 31\)"),
        (lambda n, f: (n, f[..., :64]), r"3 target layers \* 32\), got \(2, 9, 64\)"),
        (lambda n, f: (n[:1], f), "batch size 1, `context_hidden_states` 2"),
        (lambda n, f: (n[:, :4], f), "`block_size` 5 tokens, but `noise_embeds` has 4"),
        (lambda n, f: (torch.cat([n, n], 1), f), "`noise_embeds` has 10"),
        (lambda n, f: (n, f, torch.ones(2, 13)), "covers 13 keys; cache, context and block are 14"),
        (lambda n, f: (n, f, [None]), "lists 1 masks for 2 layers"),
    ),
)
def test_wrong_shapes_are_named(change, sentence):
    drafter = tiny_drafter()
    with pytest.raises(ValueError, match=sentence):
        drafter(*change(*inputs_for(drafter, 9)))
    with pytest.raises(TypeError, match="conext"):
        drafter(*inputs_for(drafter, 9), conext=1)


# ------------------------------------------------------------------------------------------------- loading and saving


NAMES = {"fc.weight", "hidden_norm.weight", "norm.weight"} | {
    f"layers.{i}.{name}.weight"
    for i in range(2)
    for name in (
        *(f"self_attn.{p}" for p in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
        "input_layernorm",
        "post_attention_layernorm",
    )
}


def test_saves_its_own_tensors_only_also_after_drafting(tmp_path):
    """Pitfalls 65, 66."""
    target, drafter = tiny_target("llama"), tiny_drafter()
    target.generate(prompt_of(6), assistant_model=drafter, max_new_tokens=6)
    drafter.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == NAMES
    again, info = DFlashDraftModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, drafter.state_dict()[name])
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == set(CODE) | {"config.json", "model.safetensors", "README.md", "custom_generate/generate.py"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    (
        (lambda t: t.pop("layers.1.self_attn.k_norm.weight"), r"missing: layers\.1\.self_attn\.k_norm\.weight"),
        (
            lambda t: t.update({"layers.0.attention_conv.base_kernel": torch.ones(2)}),
            "unexpected: layers.0.attention_conv",
        ),
        (lambda t: t.update({"lm_head.weight": torch.ones(97, 32)}), "unexpected: lm_head.weight"),
        (lambda t: t.update({"fc.weight": torch.ones(32, 64)}), "fc.weight|size mismatch|mismatched"),
    ),
)
def test_foreign_tensors_stop_loading_by_name(change, sentence, tmp_path):
    tiny_drafter().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for kwargs in ({}, {"ignore_mismatched_sizes": True}):
        with pytest.raises((ValueError, RuntimeError), match=sentence):
            DFlashDraftModel.from_pretrained(tmp_path, **kwargs)


def test_sharded_files_device_map_and_dtype(tmp_path):
    drafter = tiny_drafter()
    drafter.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]) == len(NAMES)
    loaded = DFlashDraftModel.from_pretrained(tmp_path, device_map="cpu", dtype=torch.bfloat16)
    assert loaded.dtype is torch.bfloat16
    torch.testing.assert_close(loaded.fc.weight.float(), drafter.fc.weight, atol=1e-2, rtol=1e-2)
    assert DFlashDraftModel.from_pretrained(tmp_path, dtype="auto").dtype is torch.float32
    target = tiny_target("llama")
    ids = prompt_of(6)
    text = target.generate(ids, assistant_model=loaded, max_new_tokens=6)
    assert torch.equal(text, target.generate(ids, max_new_tokens=6))


def test_pickles_and_deep_copies():
    import copy

    drafter = tiny_drafter()
    for other in (pickle.loads(pickle.dumps(drafter)), copy.deepcopy(drafter)):
        assert torch.equal(other.fc.weight, drafter.fc.weight)


def test_a_fresh_model_is_initialised():
    torch.manual_seed(0)
    drafter = DFlashDraftModel(tiny_config(initializer_range=0.02))
    assert 0.015 < drafter.fc.weight.std() < 0.025
    assert torch.equal(drafter.hidden_norm.weight, torch.ones(32))
