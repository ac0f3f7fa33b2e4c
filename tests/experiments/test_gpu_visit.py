"""`make gpu` at toy size, on the CPU: every part runs, says something, and is not run again."""

import json

import pytest
import torch
from dflash_hub.experiments import gpu_visit


@pytest.mark.parametrize("name", gpu_visit.NAMES)
def test_every_part_runs_on_a_cpu_and_goes_on_where_it_was(tmp_path, name):
    torch._dynamo.reset()
    assert gpu_visit.run_part(name, tmp_path, toy=True) == []
    path = tmp_path / f"{name}.json"
    found = json.loads(path.read_text())
    assert found["finished"] and found["rows"]
    for row in found["rows"].values():
        for key, value in row.items():
            assert value != 0 or "graphs" in key, row
    before = path.read_bytes()
    rows = gpu_visit.Rows(name, tmp_path)
    for kept, row in found["rows"].items():
        assert rows.add(kept, lambda: pytest.fail("measured again")) == row
    assert path.read_bytes() == before and gpu_visit.finished(tmp_path, name)


def test_an_error_in_a_row_is_a_row(tmp_path):
    rows = gpu_visit.Rows("compiled", tmp_path)
    rows.add("bad", lambda: 1 / 0)
    rows.add("good", lambda: {"ms": 2.0})
    assert json.loads((tmp_path / "compiled.json").read_text())["rows"]["good"] == {"ms": 2.0}
    assert rows.errors == ["bad"] and not gpu_visit.finished(tmp_path, "compiled")
    again = gpu_visit.Rows("compiled", tmp_path)
    again.add("bad", lambda: {"ms": 3.0})
    assert again.add("good", lambda: {"ms": 4.0}) == {"ms": 2.0} and not again.errors
