"""Who may import whom, read from the source: the rules of CONTRIBUTING.md."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from helpers.tiny import CODE, ROOT

ROOMS = ("common", "convert", "training", "benchmark", "demo", "cli", "experiments")
# All rooms may import Hub files and themselves; beside these:
ALLOWED = {
    "common": set(),
    "convert": {"common"},
    "demo": {"convert", "common"},
    "training": {"convert", "common"},
    "benchmark": {"convert", "common"},
    "cli": {*ROOMS},
    "experiments": {*ROOMS} - {"cli"},
}
# Hub files in layers: a file imports from its own layer and those before it.
LAYERS = ("configuration_", "hub_files"), "target_", "drafter_", "decode_", "generation_dflash", "modeling_dflash"


def layer_of(module: str) -> int:
    for number, names in enumerate(LAYERS):
        if module.startswith(names):
            return number
    raise AssertionError(f"{module}.py is in the root and belongs to no layer of Hub files {LAYERS}")


def imports_of(path: Path) -> set[str]:
    """Modules of the package that a file imports, from the package's root, as `convert.card`."""
    package, found = list(path.relative_to(ROOT).parent.parts), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            module = ".".join([*base, node.module] if node.module else base)
            found |= {module} if node.module else {".".join(filter(None, [module, name.name])) for name in node.names}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
            found |= {name.removeprefix("dflash_hub.") for name in names if name.startswith("dflash_hub.")}
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_it_may(room):
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    for path in files:
        rooms = {module.split(".")[0] for module in imports_of(path)} & {*ROOMS} - {room}
        assert rooms <= ALLOWED[room], f"{path.relative_to(ROOT)} imports {sorted(rooms - ALLOWED[room])}"


def test_hub_files_import_torch_transformers_and_earlier_layers():
    for name in CODE:
        path = ROOT / name
        for module in imports_of(path):
            assert f"{module}.py" in CODE, f"{name} imports {module}, which no Hub folder carries"
            assert layer_of(module) <= layer_of(path.stem), f"{name} imports {module}, a later layer"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                allowed = {"torch", "transformers", *sys.stdlib_module_names}
                assert {name.split(".")[0] for name in names} <= allowed, (path.name, names)


def test_every_root_module_is_a_hub_file_or_an_entry_of_the_package():
    assert {path.name for path in ROOT.glob("*.py")} == {*CODE, "__init__.py", "__main__.py"}


def test_no_test_file_imports_another():
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert not name.split(".")[-1].startswith(("test_", "conftest")), f"{path.name} imports {name}"


def test_the_package_imports_nothing_when_it_is_read():
    script = "import sys, dflash_hub; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_what_the_wheel_imports_is_declared():
    """At module level; what an extra brings is imported where it is used, and `demo.app` is the extra `app`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = {re.match(r"[\w-]+", one)[0].lower() for one in project["project"]["dependencies"]}
    rooms = [
        name.removeprefix("dflash_hub").lstrip(".").replace(".", "/")
        for name in project["tool"]["setuptools"]["packages"]
    ]
    own = {"dflash", "dflash_hub"}  # z-lab's package runs in an environment of its own
    for path in sorted(path for room in rooms for path in (ROOT / room).glob("*.py")):
        tree = ast.parse(path.read_text())
        names = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in tree.body if isinstance(node, ast.ImportFrom) and not node.level}
        found = {name.split(".")[0] for name in names} - {*sys.stdlib_module_names} - own
        found = {"pyyaml" if name == "yaml" else name for name in found}
        extra = {"gradio"} if path.parent.name == "demo" else {"matplotlib"} if path.name == "plots.py" else set()
        assert found <= declared | extra, f"{path.relative_to(ROOT)} imports {sorted(found - declared - extra)}"
    assert (ROOT / "py.typed").exists() and "py.typed" in project["tool"]["setuptools"]["package-data"]["dflash_hub"]


def test_a_spaces_folder_has_what_its_app_imports(tmp_path, monkeypatch):
    from dflash_hub.demo import space

    monkeypatch.setattr(space, "version", lambda name: "1.0")  # the app's own package need not be installed
    space.write_space(tmp_path / "space")
    code = "import dflash_hub.demo.pair, sys; print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('dflash_hub')))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "space", capture_output=True, text=True, timeout=300
    )
    inside = str(tmp_path / "space" / "dflash_hub")
    assert done.stdout and all(file.startswith(inside) for file in done.stdout.split()), done.stdout + done.stderr
