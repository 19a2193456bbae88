"""The arrows of ARCHITECTURE.md: who may import whom, and what stays pure."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "metis"

LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "model": {"errors"},
    "config": {"errors"},
    "clock": set(),
    "api": set(),
    "rpc.connection": {"errors"},
    "rpc.transport": {"errors"},
    "rpc.server": {"api", "errors", "rpc.connection", "rpc.transport"},
    "rpc.channel": {"api", "errors", "rpc.connection", "rpc.transport"},
    "store.sql": {"model", "errors"},
    "store.database": {"store.sql", "model", "errors", "clock"},
    "store.store": {"store.sql", "store.database", "model", "errors", "clock"},
    "engine": {"store.store", "model", "errors", "clock"},
    "service": {"api", "engine", "model", "errors", "store.store"},
    "health": {"api"},
    "daemon": {
        "errors",
        "clock",
        "config",
        "engine",
        "health",
        "rpc.server",
        "rpc.transport",
        "service",
        "store.store",
    },
    "cni.spec": {"errors", "model", "config"},
    "cni.plugin": {
        "api",
        "cni.spec",
        "config",
        "errors",
        "model",
        "rpc.channel",
        "rpc.transport",
    },
    "cni.install": {"errors"},
}
"""What each module may import of the project; what is not listed may not."""

PURE = ["errors", "model", "config", "rpc.connection", "store.sql", "cni.spec"]
"""Modules without trio, sockets, files, a clock or a coroutine of their own."""

IMPURE_IMPORTS = {"anyio", "asyncio", "os", "pathlib", "subprocess", "threading"} | {
    "time",
    "trio",
}


def path_of(module: str) -> Path:
    path = ROOT / (module.replace(".", "/") + ".py")
    return path if path.exists() else ROOT / module.replace(".", "/") / "__init__.py"


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it the import stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found.add(node.module)
    return found


def own_modules() -> list[str]:
    modules = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] in {"api", "cli"} or parts[-1] in {"__init__", "__main__"}:
            continue
        modules.append(".".join(parts))
    return modules


def test_every_module_has_its_place_in_the_layers() -> None:
    assert set(own_modules()) == set(LAYERS) - {"api"}


@pytest.mark.parametrize("module", own_modules())
def test_a_module_imports_only_what_its_layer_allows(module: str) -> None:
    allowed = LAYERS[module]
    for imported in imports_of(path_of(module)):
        if imported == "metis" or not imported.startswith("metis."):
            assert imported != "metis", f"{module} imports the public package"
            continue
        name = imported.removeprefix("metis.")
        name = "api" if name.split(".")[0] == "api" else name
        assert name in allowed, f"{module} may not import {imported}"


def test_no_module_imports_one_below_it() -> None:
    order = list(LAYERS)
    for module, allowed in LAYERS.items():
        for other in allowed:
            assert order.index(other) < order.index(module), f"{module} <- {other}"


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_touches_nothing(module: str) -> None:
    path = path_of(module)
    roots = {name.split(".")[0] for name in imports_of(path)}
    assert not roots & IMPURE_IMPORTS
    tree = ast.parse(path.read_text())
    coroutines = [n for n in ast.walk(tree) if isinstance(n, ast.AsyncFunctionDef)]
    assert not coroutines
    opened = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.Call)
        and isinstance(n.func, ast.Name)
        and n.func.id == "open"
    ]
    assert not opened


def test_nothing_of_asyncio_runs_in_the_product() -> None:
    for path in ROOT.rglob("*.py"):
        assert "asyncio" not in imports_of(path), path
