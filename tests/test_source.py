"""Rules of the source that a reader of one file cannot see: how long things are, and that nobody patches our classes."""

import ast
from pathlib import Path

import pytest
from helpers.tiny import CODE, ROOT

LONGEST_FUNCTION, LONGEST_HUB_MODULE = 80, 450
ROOMS = ("common", "convert", "training", "benchmark", "demo", "cli", "experiments")
HANDS_IN = ("benchmark", "experiments", "tests")
# Models of transformers by the names that tests give to them: they may do what a user's own may do.
MODELS = ("target", "small_pair.target")
# What is replaced in a module of ours, and why nothing could be handed in. A name in capitals is a table or a limit.
MAY_STAY = {
    "tests/benchmark/test_bench.py": {
        "provenance.commit": "the repository at another commit",
        "bench_module.Bench": "only the command's arguments are looked at",
        "bench_module.run_bench": "only the command's arguments are looked at",
    },
    "tests/convert/test_adopting.py": {"adopting.adopt": "must not run"},
    "tests/convert/test_init.py": {"init.get_safetensors_metadata": "huggingface_hub's, which would ask the Hub"},
    "tests/helpers/fake_hub.py": {"place": "modules of huggingface_hub"},
    "tests/hub/test_drafter_vocabulary.py": {"Candidates.over_vocabulary": "must not run"},
    "tests/hub/test_fuzzing.py": {"owner": "planted faults, which the search has to find"},
    "tests/test_imports.py": {"space.version": "another installed version"},
    "tests/training/test_check.py": {
        "checks.target_hidden_states": "a planted fault, which the check has to find",
        "blocks.block_positions": "a planted fault, which the check has to find",
        "blocks.layer_masks": "a planted fault, which the check has to find",
        "dflash_hub.training.trainer.sharding": "DeepSpeed, which is not installed",
        "trainer.evaluate": "scores of chosen size",
        "module.evaluate": "scores of chosen size",
        "module.train": "only the command's arguments are looked at",
        "responses.regenerate": "responses that are there already",
        "cost.origin": "the repository's state",
    },
    "tests/training/test_training.py": {
        "training_run.Console": "rich's, with a width",
        "training_run.target_features": "a target that takes its time",
    },
}


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def python_files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(path for path in found if not path.relative_to(ROOT).parts[0].startswith("."))


def test_no_function_and_no_hub_module_is_too_long():
    long = [name for name in CODE if len((ROOT / name).read_text().splitlines()) > LONGEST_HUB_MODULE]
    for path in [*ROOT.glob("*.py"), *python_files(*ROOMS, "custom_generate")]:
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = node.end_lineno - node.lineno + 1
                long += [f"{path.relative_to(ROOT)} {node.name}: {lines}"] * (lines > LONGEST_FUNCTION)
    assert not long


def imported(tree: ast.Module, is_test: bool) -> tuple[set[str], set[str]]:
    """Names that a file has from this package, and those that it has from others or defines as a class itself."""
    ours, others = set(), {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            mine = (node.module or "").split(".")[0] == "dflash_hub" or (node.level > 0 and not is_test)
            (ours if mine else others).update(name.asname or name.name for name in node.names)
        elif isinstance(node, ast.Import):
            for name in node.names:
                mine = name.name.split(".")[0] == "dflash_hub"
                (ours if mine else others).add(name.asname or name.name.split(".")[0])
    return ours, others


def root_of(node: ast.AST) -> str:
    """The name that an expression such as `module.thing` or `module.thing().part` begins with."""
    while isinstance(node, (ast.Attribute, ast.Call)):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else ""


def assignments(node: ast.AST):
    """(owner, attribute) of all that a statement or call assigns to; the owner is an expression, or a dotted name."""
    if isinstance(node, (ast.Assign, ast.Delete, ast.AugAssign, ast.AnnAssign)):
        targets = [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else node.targets
        for target in targets:
            for part in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
                if isinstance(part, ast.Attribute):
                    yield part.value, part.attr
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("setattr", "patch.object", "mock.patch")):
        owner = node.args[0]
        name = node.args[1] if len(node.args) > 1 and not isinstance(owner, ast.Constant) else None
        yield owner, name.value if isinstance(name, ast.Constant) else ""


def patches(path: Path, root: Path = ROOT) -> list[str]:
    """What a file assigns to attributes of our classes and modules, or of objects of which that cannot be said."""
    tree, file, found = parsed(path), path.relative_to(root).as_posix(), []
    ours, others = imported(tree, is_test=file.startswith("tests/"))
    for node in ast.walk(tree):
        for owner, name in assignments(node):
            called = isinstance(node, ast.Call)
            if isinstance(owner, ast.Constant):
                text, foreign = owner.value, not owner.value.startswith("dflash_hub")
            else:
                text, first = ast.unparse(owner), root_of(owner)
                model = text.removeprefix("type(").removesuffix(")") in MODELS
                # A plain assignment to an attribute of a local object is mostly that object's own business.
                foreign = model or (first in others if called else first not in ours)
            full = ".".join(filter(None, [text, name]))
            if not foreign and not name.isupper() and not {full, text} & MAY_STAY.get(file, {}).keys():
                found.append(f"{file}:{node.lineno} {full}")
    return found


def test_nobody_patches_our_classes():
    assert not [patch for path in python_files(*HANDS_IN) for patch in patches(path)]


@pytest.mark.parametrize(
    ("line", "expected"),
    (
        ("from dflash_hub.a import A\nA.run = 1", ["A.run"]),
        ("from dflash_hub import a\na.A.run, other = 1, 2", ["a.A.run"]),
        ("from dflash_hub.a import A\nmonkeypatch.setattr(A, 'run', 1)", ["A.run"]),
        ("from dflash_hub import a\nwith mock.patch.object(a.A, 'run'): pass", ["a.A.run"]),
        ("monkeypatch.setattr('dflash_hub.a.A.run', 1)", ["dflash_hub.a.A.run"]),
        ("monkeypatch.setattr(drafter, 'run', 1)", ["drafter.run"]),
        ("monkeypatch.setattr(type(drafter), 'run', 1)", ["type(drafter).run"]),
        ("import torch\nmonkeypatch.setattr(torch.cuda, 'run', 1)", []),
        ("monkeypatch.setattr(type(target), 'forward', 1)", []),
        ("from dflash_hub import a\nmonkeypatch.setattr(a, 'LIMIT', 1)", []),
        ("class Own: pass\nOwn.run = 1", []),
    ),
)
def test_a_patch_is_found(line, expected, tmp_path):
    (tmp_path / "tests").mkdir()
    path = tmp_path / "tests" / "x.py"
    path.write_text(line)
    found = patches(path, tmp_path)
    assert [patch.split(" ", 1)[1] for patch in found] == expected
