"""The floors of the house: imports point down only, and each heavy library has one place.

The rules are data; the imports are read from the source, also those inside functions and under TYPE_CHECKING; what a
process really loads is asked of a fresh one.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What each package may import of the project, besides itself.
BELOW: dict[str, set[str]] = {
    "plans": set(),
    "costmodel": {"plans"},
    "executor": {"plans"},
    "solver": {"plans", "costmodel"},
    "hotspa": {"plans", "costmodel", "executor", "solver"},
}
# The fewest modules of each that prove that the rules were applied to something.
LEAST_MODULES = {"plans": 8, "costmodel": 6, "executor": 8, "solver": 6, "hotspa": 2}
# No package imports these two.
OUTSIDE = {"tests", "benchmarks"}
SOLVER_LIBRARIES = {"pulp", "ortools", "highspy"}


def imports(source: str, package: str) -> Iterator[str]:
    """Dotted names of the modules that the source of a module of `package` imports, wherever the import stands."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, level=level):
                yield package if level else str(module)
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield package if name.startswith(".") else name


def breaches(source: str, package: str, module: str) -> list[str]:
    """The imports of `package/module.py` that its floor forbids, each with the rule."""
    found = []
    for name in imports(source, package):
        top = name.split(".")[0]
        if top in OUTSIDE or (top in BELOW and top != package and top not in BELOW[package]):
            found.append(f"{package}/{module}.py imports {name}: {package} may import {sorted(BELOW[package])} only")
        if top == "torch" and package in {"plans", "costmodel", "solver"}:
            found.append(f"{package}/{module}.py imports {name}: planning never imports torch")
        if top in SOLVER_LIBRARIES and not (package == "solver" and module.startswith("backend")):
            found.append(f"{package}/{module}.py imports {name}: only solver/backend*.py may")
    return found


def modules(package: str) -> dict[str, str]:
    """Source of every module of a package, by its name below the package."""
    assert (ROOT / package).is_dir()
    paths = {path.relative_to(ROOT / package): path for path in sorted((ROOT / package).rglob("*.py"))}
    return {".".join(name.with_suffix("").parts): path.read_text(encoding="utf-8") for name, path in paths.items()}


def loaded(statement: str) -> set[str]:
    """Top-level names in sys.modules of a fresh process after the statement."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.parametrize("package", BELOW)
def test_imports_point_down_only(package: str) -> None:
    """A plan made by the solver and run by the executor means the same to both only if neither knows the other."""
    sources = modules(package)
    assert len(sources) >= LEAST_MODULES[package], f"the rules saw only {sorted(sources)}"
    assert [line for module, source in sources.items() for line in breaches(source, package, module)] == []


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("costmodel", "plans"),
        ("executor", "plans"),
        ("executor", "torch"),
        ("solver", "costmodel"),
        ("solver", "ortools"),
        ("solver", "pulp"),
        ("hotspa", "solver"),
        ("hotspa", "typer"),
    ],
)
def test_the_imports_that_the_floors_are_about_exist(package: str, name: str) -> None:
    """The rules pass vacuously when the reader of imports sees nothing."""
    seen = {found.split(".")[0] for source in modules(package).values() for found in imports(source, package)}
    assert name in seen


@pytest.mark.parametrize(
    ("package", "module", "source"),
    [
        ("plans", "check", "import costmodel"),
        ("plans", "layout", "def f():\n    from torch import nn"),
        ("costmodel", "price", "from solver.planner import plan"),
        ("costmodel", "fit", "import numpy, torch.nn"),
        ("solver", "planner", "import executor.step as step"),
        ("solver", "planner", "from ortools.sat.python import cp_model"),
        ("solver", "planner", "import importlib\nimportlib.import_module('pulp')"),
        ("solver", "backend", "if TYPE_CHECKING:\n    import torch"),
        ("executor", "train", "from costmodel import price"),
        ("executor", "train", "__import__('solver')"),
        ("executor", "backend", "import pulp"),
        ("executor", "train", "import hotspa.cli"),
        ("hotspa", "doctor", "import highspy"),
        ("hotspa", "demo", "from tests.ranks import run_ranks"),
    ],
)
def test_a_forbidden_import_is_found(package: str, module: str, source: str) -> None:
    """Each rule catches each way of writing an import."""
    assert len(breaches(source, package, module)) == 1


@pytest.mark.parametrize(
    ("package", "module", "source"),
    [
        ("plans", "check", "from . import layout\nfrom .routes import x\nimport numpy"),
        ("solver", "backend_pulp", "import pulp\nimport ortools.sat\nfrom costmodel import price"),
        ("executor", "train", "import torch\nfrom plans.layout import Layout\nimport torchplans"),
        ("hotspa", "cli", "def run():\n    import torch, solver.planner, executor.train, costmodel, plans"),
    ],
)
def test_an_allowed_import_is_no_breach(package: str, module: str, source: str) -> None:
    """A rule that forbids everything would pass the test above."""
    assert breaches(source, package, module) == []


def test_planning_loads_no_torch() -> None:
    """Planning runs on a laptop without torch's start-up time; a library may load it behind our back."""
    packages = ("plans", "costmodel", "solver")
    names = [f"{package}.{module}" for package in packages for module in modules(package) if "__" not in module]
    seen = loaded("import " + ", ".join(names))
    assert {"plans", "costmodel", "solver", "numpy"} <= seen
    assert "torch" not in seen


def test_running_loads_no_solver_library() -> None:
    """A rank of a training run pays neither the time nor the memory of a solver, nor its native library's clashes."""
    names = [f"executor.{module}" for module in modules("executor") if "__" not in module]
    seen = loaded("import " + ", ".join(names))
    assert {"executor", "torch"} <= seen
    assert not seen & (SOLVER_LIBRARIES | {"solver", "costmodel"})


def test_the_command_line_loads_nothing_heavy() -> None:
    """`hotspa --help` answers at once only while commands import what they need when they run."""
    modules("hotspa")
    seen = loaded("import hotspa.cli")
    assert {"hotspa", "typer"} <= seen
    assert not seen & (SOLVER_LIBRARIES | {"torch", "matplotlib", "pandas", "tokenizers"})


def test_the_installed_command_shows_its_help() -> None:
    """`make env` promises `.venv/bin/hotspa`."""
    modules("hotspa")
    script = Path(sys.executable).with_name("hotspa")
    assert script.exists(), f"{script} is missing: run make env"
    run = subprocess.run([script, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    for command in ("profile", "lengths", "solve", "compare", "check", "show", "run", "doctor"):
        assert command in run.stdout
