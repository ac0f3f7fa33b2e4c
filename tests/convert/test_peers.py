"""Real foreign code beside ours, each package in an environment of its own (`make peers`)."""

import ast
import json
import shutil
import subprocess
import sys
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from types import SimpleNamespace

import pytest
import torch
from dflash_hub import DFlashConfig, DFlashDraftModel
from dflash_hub.convert.adopting import adopt
from dflash_hub.convert.exporting import export_drafter
from dflash_hub.convert.importing import import_drafter
from dflash_hub.drafter_heads import TargetHead
from dflash_hub.drafter_paths import MostLikely, path_head, walk
from dflash_hub.drafter_vocabulary import make_head, token_ids_of
from helpers import engine_rules
from helpers.families import with_some_tokens
from helpers.formats import SERVED, drafter_of
from helpers.scripted import Instead
from helpers.tiny import CONVOLUTION, DSPARK, ROOT, SELECTOR, tiny_drafter, tiny_target
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, dynamic_module_utils

pytestmark = pytest.mark.peers
PEERS = ROOT / ".venv-peers" / "bin" / "python"
SPECULATORS = ROOT / ".venv-speculators" / "bin" / "python"
ENGINES = ROOT / ".venv-engines"
FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.fixture(params=("as it is", "our export of our import"))
def zlab_folder(request, fixture_folder, tmp_path):
    if request.param == "as it is":
        return fixture_folder
    import_drafter(str(fixture_folder), tmp_path / "ours")
    export_drafter(str(tmp_path / "ours"), tmp_path / "zlab")
    return tmp_path / "zlab"


def test_z_labs_package_makes_the_same_rounds(zlab_folder, fixture_folder, smollm2_path, tmp_path):
    """Greedy, token for token and round for round; the last block aside, which they shorten in another way."""
    if not PEERS.exists():
        pytest.skip(f"z-lab's package is not installed at {PEERS}; run `make peers`")
    reference = json.loads((fixture_folder / "reference.json").read_text())
    reference = reference if isinstance(reference, list) else reference["prompts"]
    prompts = [row["prompt_ids"] for row in reference[:6]]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    done = subprocess.run(
        [PEERS, ROOT / "tests" / "helpers" / "zlab_rounds.py", zlab_folder, smollm2_path, tmp_path / "prompts.json", "48"],
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])

    target = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    drafter = DFlashDraftModel.from_pretrained(zlab_folder, dtype=torch.float32)
    for prompt_ids, row in zip(prompts, theirs):
        text = target.generate(
            torch.tensor([prompt_ids]), assistant_model=drafter, max_new_tokens=48, do_sample=False,
            num_assistant_tokens=drafter.config.block_size - 1,
        )  # fmt: skip
        assert text[0, len(prompt_ids) :].tolist() == row["output_ids"]
        assert drafter.last_speculation.acceptance_lengths[0][:-1] == row["rounds"][:-1]
        assert drafter.last_speculation.num_accepted > 0


def test_an_object_of_z_labs_class_is_adopted_as_it_is(fixture_folder, smollm2_path, tmp_path, monkeypatch):
    """The mission's own lines: their file beside their config, loaded by AutoModel, handed to plain `generate`."""
    code = next(PEERS.parent.parent.glob("lib/python*/site-packages/dflash/model.py"), None)
    if code is None:
        pytest.skip(f"z-lab's package is not installed at {PEERS}; run `make peers`")
    folder = tmp_path / "zlab"
    shutil.copytree(fixture_folder, folder)
    config = json.loads((folder / "config.json").read_text()) | {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(code, folder / "dflash.py")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))

    target = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    drafter = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    ours = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32)
    assert type(drafter) is not type(ours) and hasattr(drafter, "spec_generate")
    block, context = torch.randn(1, ours.config.block_size, 576), torch.randn(1, 7, ours.fc.in_features)
    with torch.no_grad():
        theirs = drafter(
            position_ids=torch.arange(7 + ours.config.block_size)[None], noise_embedding=block, target_hidden=context
        )
        adopted = adopt(drafter, target)(block, context).last_hidden_state
    torch.testing.assert_close(adopted, theirs, rtol=1e-5, atol=1e-5)
    prompts = json.loads((fixture_folder / "reference.json").read_text())
    for prompt in (prompts if isinstance(prompts, list) else prompts["prompts"])[:2]:
        call = {"inputs": torch.tensor([prompt["prompt_ids"]]), "max_new_tokens": 32, "do_sample": False}
        text = target.generate(**call, assistant_model=drafter, num_assistant_tokens=4)
        assert torch.equal(text, target.generate(**call)) and drafter.last_speculation.num_accepted > 0
        target.generate(**call, assistant_model=ours, num_assistant_tokens=4)
        assert drafter.last_speculation.accepted == ours.last_speculation.accepted


def test_the_bench_measures_z_labs_package(smollm2_path, tmp_path):
    if not PEERS.exists():
        pytest.skip(f"z-lab's package is not installed at {PEERS}; run `make peers`")
    from dflash_hub.benchmark.bench import Bench, read_records, run_bench
    from dflash_hub.common.prompts import load_prompts

    bench = Bench(smollm2_path, str(ROOT), None, "float32", 24, 0.0, None)
    prompts = str(ROOT / "common" / "demo_prompts.jsonl")
    run_bench(
        tmp_path / "run", bench, ["baseline", "ours-7", "zlab"], [load_prompts(prompts, 2, None)], None, 0, "the test"
    )
    records = {(r["method"], r["id"]): r for r in read_records(tmp_path / "run")}
    for row_id in ("demo-0", "demo-1"):
        assert records["zlab", row_id]["same_text"] is True
        assert records["zlab", row_id]["rounds"][:-1] == records["ours-7", row_id]["rounds"][:-1]
        assert records["zlab", row_id]["seconds"] > 0


@pytest.mark.parametrize("package", ("zlab", "nemo"))
def test_dflash_2_computes_and_walks_as_other_packages_do(package, tmp_path):
    if not PEERS.exists():
        pytest.skip(f"z-lab's and NeMo's packages are not installed at {PEERS}; run `make peers`")
    # Causality is one value for all layers there.
    drafter = tiny_drafter(block_causal=[False] * 2, **CONVOLUTION, **SELECTOR)
    target = tiny_target("llama")
    drafter.save_pretrained(tmp_path / "ours")
    export_drafter(str(tmp_path / "ours"), tmp_path / "out", "zlab")
    inputs = {
        "block": torch.randn(2, 5, 32), "context": torch.randn(2, 9, 96), "anchor": torch.tensor([[3], [4]]),
        "head": target.get_output_embeddings().weight.detach(),
    }  # fmt: skip
    torch.save(inputs, tmp_path / "inputs.pt")
    script = ROOT / "tests" / "helpers" / "dflash2_forward.py"
    command = [PEERS, script, package, tmp_path / "out", tmp_path / "inputs.pt", tmp_path / "outputs.pt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    theirs = torch.load(tmp_path / "outputs.pt")
    with torch.no_grad():
        hidden = drafter(inputs["block"], inputs["context"]).last_hidden_state
        torch.testing.assert_close(hidden, theirs["hidden"], rtol=1e-4, atol=1e-4)
        head = path_head(drafter, TargetHead(drafter.config, target.get_output_embeddings()))
        path = walk(head, head(hidden[:, 1:]), inputs["anchor"], MostLikely).tokens
    if package == "zlab":
        assert path.equal(theirs["path"])


@pytest.mark.parametrize("kind", DSPARK)
def test_dspark_computes_and_walks_as_nemo_does(kind, tmp_path):
    if not PEERS.exists():
        pytest.skip(f"NeMo's package is not installed at {PEERS}; run `make peers`")
    drafter, target = tiny_drafter(**DSPARK[kind]), tiny_target("llama")
    drafter.save_pretrained(tmp_path / "ours")
    export_drafter(str(tmp_path / "ours"), tmp_path / "out", "dspark")
    inputs = {
        "block": torch.randn(2, 5, 32), "context": torch.randn(2, 9, 96), "anchor": torch.tensor([[3], [4]]),
        "head": target.get_output_embeddings().weight.detach(),
    }  # fmt: skip
    torch.save(inputs, tmp_path / "inputs.pt")
    script = ROOT / "tests" / "helpers" / "dspark_forward.py"
    command = [PEERS, script, tmp_path / "out", tmp_path / "inputs.pt", tmp_path / "outputs.pt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    theirs = torch.load(tmp_path / "outputs.pt")
    with torch.no_grad():
        hidden = drafter(inputs["block"], inputs["context"]).last_hidden_state
        torch.testing.assert_close(hidden, theirs["hidden"], rtol=1e-4, atol=1e-4)
        head = path_head(drafter, TargetHead(drafter.config, target.get_output_embeddings()))
        whole = Instead(head, num_candidates=97)  # theirs walks the whole vocabulary
        draft = walk(whole, head(hidden), inputs["anchor"], MostLikely)
    assert draft.tokens.equal(theirs["path"])
    torch.testing.assert_close(draft.confidence.exp(), theirs["confidence"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", DSPARK)
def test_the_speculators_package_loads_and_saves_dspark(kind, tmp_path):
    if not SPECULATORS.exists():
        pytest.skip(f"the speculators package is not installed at {SPECULATORS}; run `make peers`")
    drafter = tiny_drafter(**DSPARK[kind])
    tiny_target("llama").save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "ours")
    export_drafter(str(tmp_path / "ours"), tmp_path / "out", "speculators", target=str(tmp_path / "target"))
    command = [SPECULATORS, ROOT / "tests" / "helpers" / "speculators_dspark.py", tmp_path / "out", tmp_path / "saved"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    import_drafter(str(tmp_path / "saved"), tmp_path / "back", target=str(tmp_path / "target"))
    back, config = load_file(tmp_path / "back" / "model.safetensors"), DFlashConfig.from_pretrained(tmp_path / "back")
    assert {*back} == {*drafter.state_dict()}
    assert all(back[name].equal(tensor) for name, tensor in drafter.state_dict().items())
    assert all(getattr(config, name) == value for name, value in DSPARK[kind].items())


@pytest.mark.parametrize(
    "fields",
    (
        {},
        # Its window is counted from the anchor, so that the two agree as long as nothing has left it.
        {"layer_types": [SLIDING, FULL], "sliding_window": 64},
        {"layer_types": [SLIDING] * 2, "sliding_window": 64, "block_causal": [False] * 2},
        {"attention_bias": True, "rope_parameters": YARN},
        {"draft_vocab_size": 40},
    ),
)
def test_the_speculators_package_computes_what_ours_does(fields, tmp_path):
    if not SPECULATORS.exists():
        pytest.skip(f"the speculators package is not installed at {SPECULATORS}; run `make peers`")
    target, drafter = tiny_target("llama"), with_some_tokens(tiny_drafter(**fields))
    target.save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "ours")
    export_drafter(str(tmp_path / "ours"), tmp_path / "out", "speculators", target=str(tmp_path / "target"))
    script = ROOT / "tests" / "helpers" / "speculators_forward.py"
    done = subprocess.run(
        [SPECULATORS, script, tmp_path / "out", tmp_path / "made.safetensors", tmp_path / "saved"],
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = load_file(tmp_path / "made.safetensors")
    assert torch.equal(made["embed_tokens"], target.get_input_embeddings().weight)
    rows = slice(None) if drafter.d2t is None else token_ids_of(drafter.d2t)
    assert torch.equal(made["lm_head"], target.get_output_embeddings().weight[rows])
    block = drafter.config.block_size
    anchors = made["block_indices"].view(-1, block)[:, 0].tolist()
    assert any(anchor > 1 for anchor in anchors)
    for number, anchor in enumerate(anchors):
        ids = torch.full((1, block), drafter.config.mask_token_id)
        ids[0, 0] = made["input_ids"][0, anchor]
        with torch.no_grad():
            ours = drafter(target.get_input_embeddings()(ids), made["features"][:, :anchor]).last_hidden_state
        theirs = made["hidden"][:, number * block : (number + 1) * block]
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        # Slot 0 is the anchor; a shift by one slot or one tap would show here.
        logits = make_head(drafter, target)(ours).logits  # no text was shown to it: of the listed tokens alone
        torch.testing.assert_close(
            logits, made["logits"][:, number * block : (number + 1) * block], rtol=1e-4, atol=1e-4
        )

    import_drafter(str(tmp_path / "saved"), tmp_path / "back")  # what the package saved itself
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[name], tensor) for name, tensor in drafter.state_dict().items())
    config = DFlashConfig.from_pretrained(tmp_path / "back")
    for name in (
        "target_layer_ids",
        "block_causal",
        "layer_types",
        "sliding_window",
        "rope_parameters",
        "mask_token_id",
    ):
        assert getattr(config, name) == getattr(drafter.config, name), name


def functions_of(path, names: str, **namespace) -> SimpleNamespace:
    """Some top-level definitions of a foreign file, run without what the file imports: an engine needs a GPU to import."""
    if not path.exists():
        pytest.skip(f"the engine's files are not at {path}; run `make peers`")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wanted = names.split()
    tree.body = [
        node
        for node in tree.body
        if getattr(node, "name", None) in wanted
        or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) in wanted)
    ]
    assert len(tree.body) == len(wanted), f"{path} no longer has all of {wanted}"
    code = compile("from __future__ import annotations\n" + ast.unparse(tree), str(path), "exec")
    space = {"dataclass": dataclass, "Integral": Integral, "Sequence": Sequence, **vars(typing), **namespace}
    space["__name__"] = "functions_of"
    sys.modules.setdefault("functions_of", types.ModuleType("functions_of"))
    exec(code, space)
    return SimpleNamespace(**space)


@pytest.fixture(params=SERVED)
def served(request, tmp_path):
    """(folder for engines, the drafter's config)"""
    config = drafter_of(tmp_path / "ours", request.param).config
    export_drafter(str(tmp_path / "ours"), tmp_path / "out", "vllm")
    return tmp_path / "out", config


def test_vllms_own_functions_read_our_folder(served):
    folder, config = served
    hf = AutoConfig.from_pretrained(folder)
    runner = SimpleNamespace(use_v2_model_runner=True)
    model = functions_of(
        ENGINES / "vllm/model_executor/models/qwen3_dflash.py",
        "_SLIDING_ATTENTION _dflash_layer_causal _resolve_layer_attention",
        get_current_vllm_config=lambda: runner,
    )
    layers = [model._resolve_layer_attention(hf, layer) for layer in range(config.num_hidden_layers)]
    assert layers == list(zip(config.windows, config.block_causal))
    taps = functions_of(
        ENGINES / "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py", "get_eagle3_aux_layers_from_config"
    )
    spec = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=hf))
    # Counted from the embeddings there.
    assert taps.get_eagle3_aux_layers_from_config(spec) == tuple(tap + 1 for tap in config.target_layer_ids)
    mask = functions_of(ENGINES / "vllm/v1/worker/gpu/spec_decode/utils.py", "get_parallel_drafting_token_id")
    assert mask.get_parallel_drafting_token_id(hf) == config.mask_token_id
    read = engine_rules.vllm(json.loads((folder / "config.json").read_text()))
    assert layers == list(zip(read.windows, read.causal))


def test_vllms_own_functions_read_our_speculators_folder(tmp_path):
    tiny_target("llama").to(torch.bfloat16).save_pretrained(tmp_path / "target")
    algos = functions_of(
        ENGINES / "vllm/transformers_utils/configs/speculators/algos.py",
        "SUPPORTED_SPECULATORS_TYPES register_speculator update_dflash",
    )
    for kind in ("plain", "mixed", "sliding, causal", "sliding, bidirectional"):
        drafter_of(tmp_path / kind, kind)
        out = tmp_path / f"{kind}-out"
        export_drafter(str(tmp_path / kind), out, "speculators", target=str(tmp_path / "target"))
        written = json.loads((out / "config.json").read_text())
        theirs = dict(written["transformer_layer_config"])
        algos.update_dflash(config_dict=written, pre_trained_config=theirs)
        ours = engine_rules.vllm_from_speculators(written)
        assert {name: value for name, value in theirs.items() if value is not None} == {
            name: value for name, value in ours.items() if value is not None
        }


def test_sglangs_own_functions_read_our_folder(served):
    folder, config = served
    hf = AutoConfig.from_pretrained(folder)
    utils = functions_of(
        ENGINES / "sglang/srt/speculative/dflash_utils.py",
        "DEFAULT_DFLASH_MASK_TOKEN _cfg_get _get_text_config _get_dflash_config _parse_optional_int DFlashDraftConfig "
        "is_nemotron_35_draft_config get_dflash_layer_types get_dflash_attention_sliding_window_size "
        "parse_dflash_draft_config build_target_layer_ids",
    )
    read = utils.parse_dflash_draft_config(draft_hf_config=hf)
    assert (read.resolve_block_size(), read.mask_token_id) == (config.block_size, config.mask_token_id)
    assert read.num_target_layers == config.num_target_layers
    assert read.resolve_target_layer_ids(target_num_layers=config.num_target_layers) == config.target_layer_ids
    kinds = SimpleNamespace(DECODER="causal", ENCODER_ONLY="bidirectional")
    model = functions_of(
        ENGINES / "sglang/srt/models/dflash.py",
        "_get_dflash_attention_type _get_dflash_layer_attention_params",
        get_dflash_layer_types=utils.get_dflash_layer_types,
        get_dflash_attention_sliding_window_size=utils.get_dflash_attention_sliding_window_size,
        AttentionType=kinds,
    )
    for layer, (window, causal) in enumerate(zip(config.windows, config.block_causal)):
        # They count the positions to the left of a query, without itself.
        assert model._get_dflash_layer_attention_params(hf, layer) == (
            -1 if window is None else window - 1,
            "causal" if causal else "bidirectional",
        )
