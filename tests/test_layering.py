"""The arrows of ARCHITECTURE.md: who may import whom, and what stays pure."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "metis"

LAYERS: dict[str, set[str]] = {
    "api": set(),
    "errors": set(),
    "model": {"errors"},
    "config": {"errors"},
    "clock": set(),
    # gRPC on Trio: bytes at the top, services at the bottom
    "rpc.limits": set(),
    "rpc.http2": set(),
    "rpc.headers": set(),
    "rpc.wire": set(),
    "rpc.codec": {"api", "rpc.wire"},
    "rpc.connection": {"rpc.headers", "rpc.http2", "rpc.limits"},
    "rpc.memory": set(),
    "rpc.transport": {"errors", "rpc.memory"},
    "rpc.stream": {"rpc.codec", "rpc.connection", "rpc.http2"},
    "rpc.session": {"rpc.connection", "rpc.http2", "rpc.limits", "rpc.stream"},
    "rpc.call": {"rpc.codec", "rpc.headers", "rpc.http2", "rpc.stream"},
    "rpc.server": {
        "rpc.call",
        "rpc.connection",
        "rpc.headers",
        "rpc.http2",
        "rpc.limits",
        "rpc.session",
        "rpc.stream",
        "rpc.transport",
    },
    "rpc.client_stream": {
        "rpc.codec",
        "rpc.headers",
        "rpc.http2",
        "rpc.stream",
    },
    "rpc.channel": {
        "errors",
        "rpc.client_stream",
        "rpc.connection",
        "rpc.headers",
        "rpc.http2",
        "rpc.limits",
        "rpc.session",
        "rpc.stream",
        "rpc.transport",
    },
    # the database: SQL at the top, the writer task at the bottom
    "store.seeding": {"model"},
    "store.schema": {"errors"},
    "store.blocks": {"errors", "model"},
    "store.usage": {"errors", "model", "store.blocks", "store.seeding"},
    "store.claims": {"errors", "model", "store.blocks"},
    "store.sql": {
        "errors",
        "model",
        "store.blocks",
        "store.claims",
        "store.seeding",
        "store.usage",
    },
    "store.tables": {"errors", "model"},
    "store.database": {"clock", "errors", "store.schema", "store.seeding"},
    "store.store": {
        "clock",
        "errors",
        "model",
        "store.database",
        "store.blocks",
        "store.sql",
        "store.tables",
        "store.usage",
    },
    # the daemon
    "engine": {"errors", "model", "store.store"},
    "service": {"api", "engine", "errors", "model", "store.store"},
    "health": {"api"},
    "daemon": {
        "clock",
        "config",
        "engine",
        "errors",
        "health",
        "rpc.server",
        "rpc.transport",
        "service",
        "store.store",
    },
    # the plugin
    "cni.protocol": {"errors"},
    "cni.environment": {"cni.protocol", "errors", "model"},
    "cni.configuration": {"cni.protocol", "config", "errors", "model"},
    "cni.spec": {
        "cni.configuration",
        "cni.environment",
        "cni.protocol",
        "config",
        "model",
    },
    "cni.result": {"cni.spec", "model"},
    "cni.log": {"config"},
    "cni.client": {"cni.protocol", "errors", "rpc.channel", "rpc.transport"},
    "cni.verbs": {
        "api",
        "cni.client",
        "cni.protocol",
        "cni.result",
        "cni.spec",
        "errors",
        "model",
    },
    "cni.plugin": {
        "cni.client",
        "cni.environment",
        "cni.log",
        "cni.protocol",
        "cni.spec",
        "cni.verbs",
    },
    "cni.install": {"cni.protocol", "errors"},
}
"""What each module may import of the project; what is not listed may not."""

PURE = [
    "errors",
    "model",
    "config",
    "rpc.limits",
    "rpc.http2",
    "rpc.headers",
    "rpc.connection",
    "rpc.wire",
    "rpc.codec",
    "store.seeding",
    "store.schema",
    "store.blocks",
    "store.usage",
    "store.claims",
    "store.sql",
    "store.tables",
    "cni.protocol",
    "cni.environment",
    "cni.configuration",
    "cni.spec",
    "cni.result",
]
"""Modules without trio, sockets, files, a clock or a coroutine of their own."""

IMPURE_IMPORTS = {"anyio", "asyncio", "os", "pathlib", "subprocess", "threading"} | {
    "time",
    "trio",
}


def path_of(module: str) -> Path:
    path = ROOT / (module.replace(".", "/") + ".py")
    return path if path.exists() else ROOT / module.replace(".", "/") / "__init__.py"


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it the import stands.

    Those for type checkers alone do not count: they name a type and run nothing.
    """
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found |= {_imported(node.module, alias.name) for alias in node.names}
    return found


def _imported(module: str, name: str) -> str:
    """`from module import name`: the module, or the submodule that `name` is."""
    if module.startswith("metis"):
        below = ROOT.parent / module.replace(".", "/") / name
        if below.is_dir() or below.with_suffix(".py").exists():
            return f"{module}.{name}"
    return module


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
            # `from metis import __version__` is the one name that needs no module
            assert imported != "metis" or module == "cni.plugin", module
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
    for module in own_modules():
        assert "asyncio" not in imports_of(path_of(module)), module
