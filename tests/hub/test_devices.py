"""`on_device.py` on a virtual GPU, which fails where tensors of two devices meet, and on a real one where there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration


@pytest.mark.parametrize("device", ["virtual", "cuda"])
def test_what_runs_on_the_cpu_runs_on_a_device(device):
    """In a process of its own: once a backend in Python is registered, torch has an accelerator for good."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    if device == "virtual" and not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip(f"torch {torch.__version__} has no backends in Python, of which the virtual GPU is made")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", Path(__file__).with_name("on_device.py")],
        env=os.environ | {"DFLASH_TEST_DEVICE": device}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]
