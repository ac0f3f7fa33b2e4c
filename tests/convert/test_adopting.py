"""Objects of foreign drafter classes as `assistant_model`, as they are: the same text, shared tensors, nothing kept alive."""

import gc
import json
import os
import shutil
import subprocess
import sys
import types
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from dflash_hub import DFlashDraftModel
from dflash_hub.configuration_dflash import FIELDS
from dflash_hub.convert import adopting, native, speculators, zlab
from dflash_hub.convert.exporting import export_drafter
from dflash_hub.convert.reading import Target
from dflash_hub.generation_dflash import install_generate_hook
from helpers import foreign_drafters
from helpers.scripted import scripted
from helpers.tiny import prompt_of, tiny_drafter, tiny_target
from transformers import GenerationMixin, Qwen3Config

FACTS = Target("org/target", 4, 97, ["Qwen3ForCausalLM"])
# Written by the stack, or by transformers' own class.
KINDS = ("z-lab", "SpecForge", "NeMo", "speculators", "transformers")
HAS_NATIVE = native.MODEL_TYPE in transformers.CONFIG_MAPPING


def zlab_object(cls=foreign_drafters.DFlashDraftModel, **changes):
    return cls(Qwen3Config(**(zlab.write(tiny_drafter().config, FACTS) | changes)))


def speculators_object(target, **changes):
    fields = speculators.write(tiny_drafter().config, FACTS) | changes
    model = foreign_drafters.DFlashSpeculator(foreign_drafters.SpeculatorConfig(**fields))
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        model.lm_head.weight.copy_(target.get_output_embeddings().weight[: model.lm_head.out_features])
    return model


def foreign_object(kind: str, target):
    """A drafter of a foreign class with the tensors of `tiny_drafter()`, and the names that it gives to some of them."""
    names = {}
    if kind == "z-lab":
        model = zlab_object()
    elif kind == "SpecForge":  # made from a config, not loaded: no architecture is stated
        model = zlab_object(architectures=None)
    elif kind == "NeMo":
        model = zlab_object(foreign_drafters.Qwen3DFlashDraftModel, architectures=["Qwen3DFlashDraftModel"])
    elif kind == "speculators":
        model = speculators_object(target)
    else:
        if not HAS_NATIVE:
            pytest.skip("this transformers has no DFlash drafter class of its own")
        config = native.write(tiny_drafter().config, FACTS) | {"dtype": "float32"}
        model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**config))
        names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    model.load_state_dict({names.get(name, name): t for name, t in tiny_drafter().state_dict().items()}, strict=False)
    return model.eval(), names


def greedy(target, ids, assistant=None, **kwargs):
    kwargs |= {"assistant_model": assistant, "num_assistant_tokens": 4} if assistant is not None else {}
    return target.generate(ids, **({"do_sample": False, "max_new_tokens": 16} | kwargs))


@pytest.mark.parametrize("kind", KINDS)
def test_a_foreign_object_drafts_as_it_is(kind):
    """Greedy text is plain's, whatever was drafted; the statistics are on the object that the user holds."""
    target, ids = tiny_target("qwen3"), prompt_of(10)
    foreign, _ = foreign_object(kind, target)
    plain = greedy(target, ids)
    assert torch.equal(greedy(target, ids, foreign), plain)
    adopted = adopting.adopt(foreign, target)
    assert foreign.last_speculation is adopted.last_speculation
    seen = [adopted.last_speculation]
    for accuracy in ("half-right", "oracle"):
        drafter = scripted(adopted, accuracy, plain)
        assert torch.equal(greedy(target, ids, drafter), plain)
        seen.append(drafter.last_speculation)
    rates = [speculation.num_accepted / speculation.num_drafted for speculation in seen]
    assert rates[0] < 0.2 < rates[1] < 0.9 < rates[2]


@pytest.mark.parametrize("kind", KINDS)
def test_it_drafts_what_the_drafter_of_our_class_drafts(kind):
    target, ids, ours = tiny_target("qwen3"), prompt_of(10), tiny_drafter()
    foreign, _ = foreign_object(kind, target)
    adopted = adopting.adopt(foreign, target)
    block, context = torch.randn(1, 5, 32), torch.randn(1, 9, 96)
    with torch.no_grad():
        assert torch.equal(adopted(block, context).last_hidden_state, ours(block, context).last_hidden_state)
    greedy(target, ids, foreign), greedy(target, ids, ours)
    assert foreign.last_speculation.accepted == ours.last_speculation.accepted
    same = [name for name in FIELDS if name not in ("num_draft_tokens", *native.NOT_CARRIED)]
    assert {name: getattr(adopted.config, name) for name in same} == {name: getattr(ours.config, name) for name in same}
    assert adopted.dtype is adopted.config.dtype is torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_shared(kind):
    target = tiny_target("qwen3")
    foreign, names = foreign_object(kind, target)
    before = {name: tensor.clone() for name, tensor in foreign.state_dict().items()}
    adopted = adopting.adopt(foreign, target)
    theirs = dict(foreign.named_parameters())
    for name, parameter in adopted.named_parameters():
        assert parameter is theirs[names.get(name, name)], name
        assert parameter.data_ptr() == theirs[names.get(name, name)].data_ptr() != 0
    assert foreign.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in foreign.state_dict().items())


def test_a_reduced_vocabulary_is_drafted_from():
    target, ids = tiny_target("qwen3"), prompt_of(10)
    foreign = speculators_object(target, draft_vocab_size=50)
    tokens = torch.arange(40, 90)
    foreign.d2t.fill_(40), foreign.t2d.index_fill_(0, tokens, True)
    with pytest.raises(ValueError, match="lm_head.weight differs from that of the target"):
        adopting.adopt(foreign, target)
    with torch.no_grad():
        foreign.lm_head.weight.copy_(target.lm_head.weight[tokens])
    adopted = adopting.adopt(foreign, target)
    assert adopted.d2t is foreign.d2t and adopted.config.draft_vocab_size == 50
    assert torch.equal(greedy(target, ids, foreign), greedy(target, ids))
    assert foreign.last_speculation.num_drafted > 0 and not foreign.last_speculation.notes


def test_some_rows_of_a_tensor_are_shared_too():
    """Laguna's layout keeps three projections in one tensor."""
    target, foreign = tiny_target("qwen3"), zlab_object()
    for layer in foreign.layers:
        parts = [layer.self_attn._modules.pop(f"{name}_proj") for name in "qkv"]
        layer.self_attn.qkv_proj = torch.nn.Linear(32, sum(part.out_features for part in parts), bias=False)
    fused = foreign.layers[0].self_attn.qkv_proj.weight
    attention = adopting.adopt(foreign, target).layers[0].self_attn
    assert attention.q_proj.weight.data_ptr() == fused.data_ptr()
    assert attention.v_proj.weight.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
    assert torch.equal(torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]), fused)


def test_it_is_adopted_once():
    target, other, ids = tiny_target("qwen3"), tiny_target("llama"), prompt_of(10)
    foreign = zlab_object()
    adopted = adopting.adopt(foreign, target)
    greedy(target, ids, foreign), greedy(target, ids, foreign)
    assert adopting.adopt(foreign, target) is adopted
    assert adopting.adopt(zlab_object(), target) is not adopted
    elsewhere = adopting.adopt(foreign, other)
    assert elsewhere is not adopted and elsewhere.fc.weight is adopted.fc.weight


@pytest.mark.parametrize("change", ("cast", "replaced"))
def test_tensors_that_changed_place_are_adopted_anew(change):
    target, ids, foreign = tiny_target("qwen3"), prompt_of(10), zlab_object()
    before = adopting.adopt(foreign, target)
    foreign.to(torch.bfloat16) if change == "cast" else foreign.load_state_dict(
        tiny_drafter(7).state_dict(), assign=True
    )
    after = adopting.adopt(foreign, target)
    assert after is not before and after.fc.weight is foreign.fc.weight and after.dtype == foreign.dtype
    assert after.rotary_emb.inv_freq.dtype is torch.float32
    assert torch.equal(greedy(target, ids, foreign), greedy(target, ids))


def test_nothing_is_kept_alive():
    target, ids, foreign = tiny_target("qwen3"), prompt_of(10), zlab_object()
    output = greedy(
        target, ids, foreign, return_dict_in_generate=True
    )  # its cache keeps the drafter's context beside it
    gone = [weakref.ref(foreign), weakref.ref(adopting.adopt(foreign, target))]
    del foreign
    gc.collect()
    assert [ref() for ref in gone] == [None, None] and output.speculation.drafter_passes > 0

    foreign = zlab_object()
    greedy(target, ids, foreign)
    gone = [weakref.ref(target), weakref.ref(adopting.adopt(foreign, target))]
    del target
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


# ------------------------------------------------------------------------------------------------------------- refused


def refused_objects(target):
    """By name: an object that looks like a drafter, and what its error must name."""
    own_head = speculators_object(target)
    with torch.no_grad():
        own_head.lm_head.weight[3, 3] += 1
    never_loaded = speculators_object(target)
    torch.nn.init.constant_(never_loaded.embed_tokens.weight, torch.nan)
    incomplete = zlab_object()
    del incomplete.layers[1].mlp.up_proj
    mixed, offloaded, no_module = zlab_object(), zlab_object(), types.SimpleNamespace(config=zlab_object().config)
    mixed.norm.to(torch.bfloat16)
    offloaded.layers[0].to("meta")
    not_finite = zlab_object()
    torch.nn.init.constant_(not_finite.fc.weight[2:3], torch.inf)
    other_rope = zlab_object()
    other_rope.rotary_emb.inv_freq *= 2
    bare = types.SimpleNamespace(block_size=5, target_layer_ids=[0, 1], model_type="other")
    unknown = torch.nn.Linear(2, 2)
    unknown.config = bare
    return {
        "half a selector": (zlab_object(selector_rank=4), "`selector_rank` and `selector_top_k` belong together"),
        "selector, by tensor": (
            zlab_object(foreign_drafters.DFlash2DraftModel),
            "the path selector of DFlash 2, but the config states no `selector_rank`",
        ),
        "Markov head": (zlab_object(markov_rank=4), "missing: markov_head.markov_w1.weight"),
        "Markov head, by tensor": (zlab_object(foreign_drafters.MarkovDraftModel), "DSpark's Markov head"),
        "never filled": (speculators_object(target, draft_vocab_size=50), "`t2d` is no mask of the tokens that `d2t`"),
        "EAGLE-3": (speculators_object(target, speculators_model_type="eagle3"), "'eagle3'; supported are dflash"),
        "own head": (own_head, r"lm_head.weight differs from that of the target"),
        "never loaded": (never_loaded, r"embed_tokens.weight differs from that of the target"),
        "incomplete": (incomplete, "missing: layers.1.mlp.up_proj.weight"),
        "no mask token": (
            zlab_object(mask_token_id=None, dflash_config={"target_layer_ids": [0, 1, 2]}),
            "mask_token_id",
        ),
        "quantized": (zlab_object(quantization_config={"bits": 4}), "quantized weights"),
        "mixed": (mixed, r"more than one dtype \(torch.bfloat16, torch.float32\)"),
        "offloaded": (offloaded, "offloaded"),
        "not finite": (not_finite, "fc.weight"),
        "other RoPE": (other_rope, "other RoPE frequencies"),
        "no module": (no_module, "not a torch module"),
        "unknown": (unknown, "of no format that is known: model_type 'other'"),
    }


def test_what_cannot_be_adopted_says_why():
    target, ids = tiny_target("qwen3"), prompt_of(10)
    passes = []
    target.register_forward_pre_hook(lambda *args: passes.append(args))
    for name, (foreign, why) in refused_objects(target).items():
        with pytest.raises(ValueError, match=why) as caught:
            greedy(target, ids, foreign)
        theirs = f"{type(foreign).__module__}.{type(foreign).__qualname__}"
        assert str(caught.value).startswith(f"`assistant_model` is a {theirs}. Its config looks like"), name
        assert not hasattr(foreign, "last_speculation")
    assert not passes


def test_another_target_is_refused_as_for_our_own_class():
    foreign = zlab_object()
    with pytest.raises(ValueError, match="it was made for a number of layers of 4, the target's is 2"):
        greedy(tiny_target("qwen3", num_hidden_layers=2), prompt_of(10), foreign)


def test_a_copy_in_another_type_equals_the_targets():
    target = tiny_target("qwen3")
    foreign = speculators_object(target).to(torch.bfloat16)
    assert adopting.adopt(foreign, target).dtype is torch.bfloat16
    target.to(torch.bfloat16)
    assert adopting.adopt(speculators_object(target), target).dtype is torch.float32


# ------------------------------------------------------------------------------------------------------------- the hook


def test_other_assistants_and_the_native_route_are_left_alone(monkeypatch):
    def adopt(*args):
        raise AssertionError("nothing was to be adopted")

    monkeypatch.setattr(adopting, "adopt", adopt)
    target, ids = tiny_target("qwen3"), prompt_of(10)
    small = tiny_target("qwen3", seed=5, num_hidden_layers=1)
    assert not adopting.recognizes(small) and not adopting.recognizes(object())
    assert torch.equal(target.generate(ids, assistant_model=small, do_sample=False, max_new_tokens=9),
                       target.generate(ids, do_sample=False, max_new_tokens=9))  # fmt: skip
    if HAS_NATIVE:
        foreign, _ = foreign_object("transformers", target)
        text = target.generate(
            ids, assistant_model=foreign, do_sample=False, max_new_tokens=9, speculation_type="dflash"
        )
        assert torch.equal(text, target.generate(ids, do_sample=False, max_new_tokens=9))
        assert not hasattr(foreign, "last_speculation")


def test_an_older_copys_hook_does_not_stand_in_the_way(monkeypatch):
    """Remote code of an earlier version may have installed its hook first; it hands foreign objects on to transformers."""
    plain = GenerationMixin.generate.__wrapped__

    def older(self, inputs=None, generation_config=None, logits_processor=None, stopping_criteria=None,
              prefix_allowed_tokens_fn=None, synced_gpus=None, assistant_model=None, **kwargs):  # fmt: skip
        return plain(self, inputs, generation_config, assistant_model=assistant_model, **kwargs)

    older._dflash_hook = True
    monkeypatch.setattr(GenerationMixin, "generate", older)
    install_generate_hook(adopting)
    install_generate_hook(adopting)
    assert GenerationMixin.generate.__wrapped__ is older and GenerationMixin.generate._dflash_adopters == [adopting]
    target, ids, foreign = tiny_target("qwen3"), prompt_of(10), zlab_object()
    assert torch.equal(greedy(target, ids, foreign), greedy(target, ids))
    assert foreign.last_speculation.drafter_passes > 3


LINES = """
target, drafter = tiny_target("qwen3"), AutoModel.from_pretrained({zlab!r}, trust_remote_code=True)
inputs = {{"input_ids": prompt_of(10), "do_sample": False, "max_new_tokens": 20}}
text = target.generate(**inputs, assistant_model=drafter)
assert torch.equal(text, target.generate(**inputs)) and drafter.last_speculation.drafter_passes > 0
assert type(drafter).__module__.startswith("transformers_modules") and type(drafter).__module__.endswith(".dflash")
print("same text")
"""


@pytest.fixture
def folders(tmp_path) -> tuple[str, str]:
    """A drafter in our layout with our code, and in z-lab's with code of theirs."""
    tiny_drafter().save_pretrained(tmp_path / "ours")
    export_drafter(str(tmp_path / "ours"), tmp_path / "zlab")
    config = json.loads((tmp_path / "zlab" / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "dflash.DFlashDraftModel"}
    (tmp_path / "zlab" / "config.json").write_text(json.dumps(config))
    shutil.copy(foreign_drafters.__file__, tmp_path / "zlab" / "dflash.py")
    return str(tmp_path / "ours"), str(tmp_path / "zlab")


def run(script: str, tmp_path: Path) -> str:
    env = os.environ | {
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
    }
    helpers = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", helpers + script], capture_output=True, text=True, env=env, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_package_is_imported_first_and_nothing_else_is_said(folders, tmp_path):
    """The hook waits for transformers' `generate`, and loads nothing of ours but the loop until there is a drafter."""
    script = f"""
import dflash_hub
assert "torch" not in sys.modules and "transformers" not in sys.modules
import torch
from transformers import AutoModel, Qwen3ForCausalLM, GenerationMixin
assert len(GenerationMixin.generate._dflash_adopters) == 1 and "dflash_hub.modeling_dflash" not in sys.modules
assert dflash_hub._WhenGenerateIsImported not in sys.meta_path
from helpers.tiny import prompt_of, tiny_target
{LINES.format(zlab=folders[1])}
"""
    assert run(script, tmp_path) == "same text\n"


@pytest.mark.parametrize("name", ("generation_dflash", "target_model"))
def test_a_module_that_imports_generate_itself_is_the_first_import(name, tmp_path):
    """Adopting imports that module too, so it waits until the module is whole."""
    script = f"""
import dflash_hub.{name}
from transformers import GenerationMixin
assert len(GenerationMixin.generate._dflash_adopters) == 1 and dflash_hub._WhenGenerateIsImported not in sys.meta_path
"""
    run(script, tmp_path)


def test_the_package_is_imported_last_beside_remote_code_of_ours(folders, tmp_path):
    """Two copies of our code: the remote one installed the hook, the package hands it what adopts."""
    script = f"""
import torch
from transformers import AutoModel, GenerationMixin
remote = AutoModel.from_pretrained({folders[0]!r}, trust_remote_code=True)
hook = GenerationMixin.generate
assert hook._dflash_adopters == [] and "dflash_hub" not in sys.modules
import dflash_hub
assert GenerationMixin.generate is hook and len(hook._dflash_adopters) == 1
from helpers.tiny import prompt_of, tiny_target
{LINES.format(zlab=folders[1])}
text = target.generate(**inputs, assistant_model=remote)
assert torch.equal(text, target.generate(**inputs))
assert type(remote.last_speculation) is not type(drafter.last_speculation)
drafter.last_speculation = None
text = target.generate(**inputs, assistant_model=drafter, custom_generate={folders[0]!r}, trust_remote_code=True)
assert torch.equal(text, target.generate(**inputs)) and drafter.last_speculation.drafter_passes > 0
"""
    assert run(script, tmp_path) == "same text\n"


def test_our_class_reads_the_same_folder_without_its_code(folders):
    target, ids = tiny_target("qwen3"), prompt_of(10)
    drafter = DFlashDraftModel.from_pretrained(folders[1], dtype="auto")
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), tiny_drafter().parameters()))
    assert torch.equal(greedy(target, ids, drafter), greedy(target, ids))
    assert drafter.last_speculation.drafter_passes > 3
