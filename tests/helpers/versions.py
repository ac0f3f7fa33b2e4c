"""Try the versions of Python, torch and transformers that are supported: `make versions` prints a table, a row each.

Of older transformers only the sentence is tried in which loading must end. One environment a Python and torch is made and kept in
`.venv-versions`, in which transformers is changed. Beside torch 2.13.0 with Python 3.11, each takes several GB of disk.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
OLDEST, NEWEST = "5.17.0", "5.24.0"
SUPPORTED = (
    *(("3.11", "2.13.0", release) for release in (OLDEST, "5.18.0", "5.20.2", "5.22.2", NEWEST)),
    ("3.13", "2.14.1", NEWEST),
)
REFUSED = (("3.11", "2.13.0", "4.57.6"), ("3.11", "2.13.0", "5.0.0"), ("3.11", "2.13.0", "5.10.2"))
# A few minutes a row: configs, the remote code from a folder, and greedy text of one family against plain `generate`.
TESTS = ("hub/test_configuration_dflash.py", "hub/test_remote_code.py", "hub/test_generation_dflash.py")
SMOKE = "configuration or test_from_a_folder or (greedy_equals_plain and qwen3- and half) or logits_processors"
LOAD = "import sys, transformers; transformers.AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)"


def environment(python: str, torch: str, transformers: str) -> Path:
    """Make an environment, or take that of an earlier row, and put this transformers into it; returns its interpreter."""
    # Of older releases each has its own: pip leaves files behind between releases that are far apart.
    apart = "" if is_supported(transformers) else f"-{transformers}"
    folder = ROOT / ".venv-versions" / f"{python}-{torch}{apart}"
    interpreter = folder / "bin" / "python"
    if not (folder / "made").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([f"python{python}", "-m", "venv", folder], check=True)
        install(
            interpreter, f"torch=={torch}", "pytest>=8", "hypothesis<7", "gguf", "matplotlib", "typer", "rich", "PyYAML"
        )
        (folder / "made").touch()
    install(interpreter, f"torch=={torch}", f"transformers=={transformers}", "accelerate", "huggingface_hub")
    return interpreter


def install(interpreter: Path, *packages: str):
    """Install packages with pip, quietly."""
    subprocess.run([interpreter, "-m", "pip", "install", "-q", *packages], check=True)


def importable(folder: Path) -> dict:
    """An environment in which `import dflash_hub` takes this checkout."""
    (folder / "dflash_hub").symlink_to(ROOT, target_is_directory=True)
    return os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}


def run_tests(interpreter: Path) -> str:
    """Run the smoke tests and return the last line of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        tests = [str(ROOT / "tests" / name) for name in TESTS]
        marks = ["-m", "not slow and not peers", "-k", SMOKE]
        command = [interpreter, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *marks, *tests]
        done = subprocess.run(command, cwd=ROOT, env=importable(Path(folder)), capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    for line in failures:
        print(line, file=sys.stderr)
    return (lines or done.stderr.strip().splitlines())[-1].strip("= ")


def is_supported(release: str) -> bool:
    """Whether a release of transformers is one of those that must work."""
    return tuple(map(int, release.split("."))) >= tuple(map(int, OLDEST.split(".")))


def refusal(row: tuple[str, str, str]) -> str:
    """Return the last line of what loading a drafter as remote code prints."""
    with tempfile.TemporaryDirectory() as folder:
        drafter = save_drafter(environment(*row[:2], NEWEST), Path(folder))
        command = [environment(*row), "-c", LOAD, drafter]
        variables = os.environ | {"HF_MODULES_CACHE": folder}
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
    return done.stderr.strip().splitlines()[-1] if done.returncode else "loaded"


def save_drafter(interpreter: Path, folder: Path) -> Path:
    """Save a tiny drafter, as a Hub folder with its code."""
    save = "import sys; from helpers.tiny import tiny_drafter; tiny_drafter().save_pretrained(sys.argv[1])"
    variables = importable(folder)
    variables["PYTHONPATH"] += os.pathsep + str(ROOT / "tests")
    subprocess.run([interpreter, "-c", save, folder / "drafter"], env=variables, check=True)
    return folder / "drafter"


def chosen(texts: list[str]) -> list[tuple[str, str, str]]:
    """Read rows as `3.11,2.13.0,5.17.0`.

    Raises:
        SystemExit: a text is no row.
    """
    rows = [tuple(text.split(",")) for text in texts]
    if wrong := [text for text, row in zip(texts, rows) if len(row) != 3]:
        sys.exit(f"{wrong[0]!r} is no PYTHON,TORCH,TRANSFORMERS, as 3.11,2.13.0,5.17.0.")
    return rows


def main():
    parser = argparse.ArgumentParser(description="Try versions of Python, torch and transformers.")
    parser.add_argument("rows", nargs="*", metavar="PYTHON,TORCH,TRANSFORMERS", help="default: all that the page lists")
    rows = chosen(parser.parse_args().rows) or SUPPORTED + REFUSED
    print("| Python | torch | transformers | result |\n|---|---|---|---|", flush=True)
    failed = False
    for row in rows:
        result = run_tests(environment(*row)) if is_supported(row[2]) else refusal(row)
        failed |= not re.match(r"\d+ passed(?!.*(failed|error))" if is_supported(row[2]) else f".*{OLDEST[:4]}", result)
        print("| " + " | ".join([*row, result]) + " |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
