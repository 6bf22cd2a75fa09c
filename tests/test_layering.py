"""Imports point one way: graft <- mtp <- quantize <- the two composition roots."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("graft", "mtp", "quantize")
ROOTS = ("mtp.cli", "mtp.release")
LEAF_MAY_IMPORT = {"numpy", "torch", "safetensors", "graft"}


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def is_root(module: str) -> bool:
    return any(is_in(module, root) for root in ROOTS)


def imports_of(source: str, module: str, is_package: bool) -> set[str]:
    """Absolute names of everything that a module imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".") if is_package else module.split(".")[:-1]
            parent = parts[: len(parts) - node.level + 1] if node.level else []
            target = ".".join([*parent, *([node.module] if node.module else [])])
            found |= {target} | {f"{target}.{alias.name}" for alias in node.names}
    return found


def violations(module: str, imported: set[str]) -> list[str]:
    """What a module may not import."""
    bad = []
    for name in sorted(imported):
        top = name.partition(".")[0]
        if is_in(module, "graft") and top not in sys.stdlib_module_names | LEAF_MAY_IMPORT:
            bad.append(f"{module} imports {name}: graft is a leaf")
        if is_in(module, "mtp") and not is_root(module) and is_in(name, "quantize"):
            bad.append(f"{module} imports {name}: quantize stands above mtp")
        if is_root(name) and not is_root(module):
            bad.append(f"{module} imports {name}: nothing imports a composition root")
        if top == "tests" or top == "shared":
            bad.append(f"{module} imports {name}: the project stands alone")
    return bad


def modules() -> list[tuple[str, Path]]:
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found.append((name.removesuffix(".__init__"), path))
    return found


def test_imports_point_one_way():
    assert len(modules()) > 10
    bad = []
    for module, path in modules():
        imported = imports_of(path.read_text(), module, path.name == "__init__.py")
        bad += violations(module, imported)
    assert bad == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("graft.plan", "import mtp.head"),
        ("graft.plan", "def f():\n    from quantize import experts"),
        ("graft.plan", "import transformers"),
        ("graft.plan", "from .. import mtp"),
        ("mtp.train", "from quantize.experts import quantize_experts"),
        ("mtp.train", "from mtp import cli"),
        ("mtp.train", "from .release import card"),
        ("quantize.experts", "import mtp.release.card"),
    ],
)
def test_negative_control_each_violation_is_seen(module, source):
    assert violations(module, imports_of(source, module, is_package=False))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("graft.plan", "import json, torch\nfrom safetensors import safe_open\nimport graft.index"),
        ("mtp.train", "import transformers\nfrom graft.plan import plan_graft"),
        ("quantize.experts", "from mtp.head import MtpHead"),
        ("mtp.cli", "import quantize.experts\nfrom mtp.release import card"),
    ],
)
def test_allowed_imports_pass(module, source):
    assert violations(module, imports_of(source, module, is_package=False)) == []


def test_graft_loads_nothing_heavy():
    code = (
        "import sys, graft.plan, graft.writer, graft.verify\n"
        "heavy = {'transformers', 'datasets', 'modelopt', 'vllm', 'typer', 'mtp', 'quantize'}\n"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
