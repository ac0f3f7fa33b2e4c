"""Real foreign code beside ours, each package in an environment of its own (`make peers`)."""

import json
import subprocess

import pytest
import torch
from conftest import ROOT
from dflash_hub import DFlashDraftModel
from dflash_hub.convert.zlab import export_zlab, import_zlab
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.peers
PEERS = ROOT / ".venv-peers" / "bin" / "python"


@pytest.fixture(params=("as it is", "our export of our import"))
def zlab_folder(request, fixture_folder, tmp_path):
    if request.param == "as it is":
        return fixture_folder
    import_zlab(str(fixture_folder), tmp_path / "ours")
    export_zlab(str(tmp_path / "ours"), tmp_path / "zlab")
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
        [PEERS, ROOT / "tests" / "zlab_rounds.py", zlab_folder, smollm2_path, tmp_path / "prompts.json", "48"],
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


def test_the_bench_measures_z_labs_package(smollm2_path, tmp_path):
    if not PEERS.exists():
        pytest.skip(f"z-lab's package is not installed at {PEERS}; run `make peers`")
    from dflash_hub.benchmark.bench import Bench, read_records, run_bench

    bench = Bench(smollm2_path, str(ROOT), None, "float32", 24, 0.0, None)
    prompts = str(ROOT / "benchmark" / "demo_prompts.jsonl")
    run_bench(tmp_path / "run", bench, ["plain", "ours-7", "zlab"], [prompts], 2, None, 0, "the test")
    records = {(r["method"], r["id"]): r for r in read_records(tmp_path / "run")}
    for row_id in ("demo-0", "demo-1"):
        assert records["zlab", row_id]["same_text"] is True
        assert records["zlab", row_id]["rounds"][:-1] == records["ours-7", row_id]["rounds"][:-1]
        assert records["zlab", row_id]["seconds"] > 0
