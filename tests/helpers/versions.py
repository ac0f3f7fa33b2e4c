"""Try the ends of the supported versions: `python tests/helpers/versions.py` makes an environment for each row and prints a table.

Rows are Python, torch and transformers; of older transformers only the sentence is tried in which loading must end.
Needs the interpreters, several GB of disk, and time.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUPPORTED = (("3.11", "2.9.1", "5.17.0"), ("3.13", "2.14.1", "5.24.0"))
REFUSED = (("3.11", "2.13.0", "4.57.6"), ("3.11", "2.13.0", "5.0.0"), ("3.11", "2.13.0", "5.10.2"))
TESTS = ("hub/test_configuration_dflash.py", "hub/test_remote_code.py", "hub/test_generation_dflash.py")
LOAD = "import sys, transformers; transformers.AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)"


def environment(python: str, torch: str, transformers: str) -> Path:
    """Make an environment, or take that of an earlier run; returns its interpreter."""
    folder = ROOT / ".venv-versions" / f"{python}-{torch}-{transformers}"
    interpreter = folder / "bin" / "python"
    if not (folder / "made").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([f"python{python}", "-m", "venv", folder], check=True)
        packages = [f"torch=={torch}", f"transformers=={transformers}", "accelerate", "pytest", "hypothesis<7"]
        subprocess.run([interpreter, "-m", "pip", "install", "-q", *packages], check=True)
        (folder / "made").touch()
    return interpreter


def importable(folder: Path) -> dict:
    """An environment in which `import dflash_hub` takes this checkout."""
    (folder / "dflash_hub").symlink_to(ROOT, target_is_directory=True)
    return os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}


def run_tests(interpreter: Path) -> str:
    """The last line of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        tests = [str(ROOT / "tests" / name) for name in TESTS]
        command = [interpreter, "-m", "pytest", "-q", "--no-header", "-m", "not slow and not peers", *tests]
        done = subprocess.run(command, cwd=ROOT, env=importable(Path(folder)), capture_output=True, text=True)
    return done.stdout.strip().splitlines()[-1]


def load_with(interpreter: Path, drafter: Path) -> str:
    """The last line of what loading a drafter as remote code prints."""
    with tempfile.TemporaryDirectory() as modules:
        done = subprocess.run(
            [interpreter, "-c", LOAD, drafter],
            env=os.environ | {"HF_MODULES_CACHE": modules},
            capture_output=True,
            text=True,
        )
    return done.stderr.strip().splitlines()[-1] if done.returncode else "loaded"


def main():
    rows = [(*versions, run_tests(environment(*versions))) for versions in SUPPORTED]
    with tempfile.TemporaryDirectory() as folder:
        save = "import sys; from helpers.tiny import tiny_drafter; tiny_drafter().save_pretrained(sys.argv[1])"
        drafter = Path(folder) / "drafter"
        variables = importable(Path(folder))
        variables["PYTHONPATH"] += os.pathsep + str(ROOT / "tests")
        subprocess.run([environment(*SUPPORTED[-1]), "-c", save, drafter], env=variables, check=True)
        rows += [(*versions, load_with(environment(*versions), drafter)) for versions in REFUSED]
    print("| Python | torch | transformers | result |\n|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    sys.exit(any("failed" in row[-1] or row[-1] == "loaded" for row in rows))


if __name__ == "__main__":
    main()
