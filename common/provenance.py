"""Where a number comes from: command, commit, versions, device, memory."""

import platform
import resource
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers


def peak_bytes() -> int:
    """Peak memory of this process so far: of the GPU where there is one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resident_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def resident_bytes(maxrss: int) -> int:
    """A peak as the system notes it: macOS counts in bytes, others in kilobytes."""
    return maxrss if sys.platform == "darwin" else maxrss * 1024


def environment() -> dict:
    """Code, machine and versions of this run."""
    return {
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "device": device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def origin(command: str) -> str:
    """The same in a line, for below a table."""
    of = environment()
    return f"`{command}`, commit {of['commit']}, {of['date']}, {of['device']}, torch {of['torch']}, transformers {of['transformers']}"


def commit() -> str:
    """Of this checkout; a package that was installed from elsewhere has none."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=9"]
    try:
        git = subprocess.run(describe, capture_output=True, text=True, cwd=Path(__file__).parent)
    except OSError:  # there is no git
        return "not a git checkout"
    return git.stdout.strip() or "not a git checkout"


def device_name() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads, {_processor()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
