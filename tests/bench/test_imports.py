"""Which package may import which, and what importing `bench` may cost."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("bench", "methods", "data", "runners", "reports")
MAY_IMPORT = {
    "bench": {"bench"},
    "methods": {"bench", "methods"},
    "data": {"bench", "data"},
    "runners": {"bench", "methods", "data", "runners"},
    "reports": set(PACKAGES),
}
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imports(tree: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield each imported package of ours, and whether a function (or the type checker alone) does it."""
    for node in ast.iter_child_nodes(tree):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            found = [node.module or ""]
        yield from ((name.split(".")[0], inside) for name in found if name.split(".")[0] in PACKAGES)
        deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        yield from imports(node, inside or deferred or typing_only)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    allowed = MAY_IMPORT[package]
    for imported, inside in imports(ast.parse(path.read_text(encoding="utf-8"))):
        if package == "bench" and path.name.startswith("cli"):
            assert imported == "bench" or inside, f"{imported} must be imported by the command that needs it"
        else:
            assert imported in allowed


def test_the_scan_sees_everything() -> None:
    tree = ast.parse(
        "import runners.run\nfrom reports import page\nif TYPE_CHECKING:\n    import data\n"
        "def f():\n    from methods.pot import PoT\n    import json\nclass C:\n    import runners\n"
    )
    assert list(imports(tree)) == [
        ("runners", False),
        ("reports", False),
        ("data", True),
        ("methods", True),
        ("runners", False),
    ]
    assert len(MODULES) > 40


def loaded_by(modules: list[str]) -> set[str]:
    code = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in done.stdout.split()}


HEAVY = {"torch", "vllm", "matplotlib", "seaborn", "pandas", "scipy", "uvicorn", "fastapi", "aiohttp"}
OTHERS = set(PACKAGES) - {"bench"}


def test_importing_bench_is_light() -> None:
    names = [
        "bench" if path.stem == "__init__" else f"bench.{path.stem}" for path in (ROOT / "bench").glob("*.py")
    ]
    loaded = loaded_by(names)
    assert not loaded & (HEAVY | OTHERS)
    assert {"pydantic", "typer"} <= loaded


def test_the_command_line_starts_light() -> None:
    assert not loaded_by(["bench.cli"]) & (HEAVY | OTHERS | {"numpy"})
