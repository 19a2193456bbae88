"""The arrows of ARCHITECTURE.md: who may import whom, and what stays pure."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "metis"

LAYERS: dict[str, set[str]] = {
    "api": set(),
    "errors": set(),
    "cidr": {"errors"},
    "ranges": {"cidr", "errors"},
    "model": {"cidr", "errors", "ranges"},
    "config": {"errors"},
    "paths": {"errors"},
    "clock": set(),
    # gRPC on Trio: bytes at the top, services at the bottom
    "rpc.limits": set(),
    "rpc.headers": set(),
    "rpc.http2": {"rpc.headers"},
    "rpc.events": {"rpc.headers"},
    "rpc.translation": {"rpc.events"},
    "rpc.shortcuts": {"rpc.events", "rpc.http2", "rpc.translation"},
    "rpc.wire": set(),
    "rpc.codec": {"api", "rpc.wire"},
    "rpc.connection": {
        "rpc.events",
        "rpc.headers",
        "rpc.http2",
        "rpc.limits",
        "rpc.shortcuts",
    },
    "rpc.prompt": set(),
    "rpc.memory": {"rpc.prompt"},
    "rpc.peers": set(),
    "rpc.socket_file": {"errors"},
    "rpc.socket_stream": {"rpc.prompt"},
    "rpc.transport": {
        "errors",
        "rpc.memory",
        "rpc.peers",
        "rpc.socket_file",
        "rpc.socket_stream",
    },
    "rpc.stream": {"rpc.codec", "rpc.connection", "rpc.http2"},
    "rpc.session": {
        "rpc.connection",
        "rpc.events",
        "rpc.http2",
        "rpc.limits",
        "rpc.prompt",
        "rpc.stream",
    },
    "rpc.call": {"rpc.codec", "rpc.headers", "rpc.http2", "rpc.stream"},
    "rpc.server": {
        "rpc.call",
        "rpc.events",
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
        "rpc.events",
        "rpc.headers",
        "rpc.http2",
        "rpc.limits",
        "rpc.session",
        "rpc.stream",
        "rpc.transport",
    },
    "rpc.local": {"rpc.channel", "rpc.client_stream"},
    # the database: SQL at the top, the writer task at the bottom
    "store.caution": set(),
    "store.history": {"errors", "ranges"},
    "store.seeding": {"model", "store.caution"},
    "store.blocks": {"errors", "model", "ranges"},
    "store.usage": {
        "errors",
        "model",
        "ranges",
        "store.blocks",
        "store.caution",
        "store.seeding",
    },
    "store.picking": {"model", "ranges", "store.blocks", "store.seeding"},
    "store.claims": {"errors", "model", "store.blocks", "store.picking"},
    "store.deletions": {"errors", "model"},
    "store.holdings": {
        "model",
        "store.blocks",
        "store.claims",
        "store.history",
        "store.seeding",
    },
    "store.reboot": {"store.history", "store.holdings"},
    "store.schema": {"errors", "store.reboot"},
    "store.garbage": {"errors", "model", "store.deletions", "store.holdings"},
    "store.reclaiming": {"errors", "model", "store.holdings"},
    "store.sql": {
        "errors",
        "model",
        "ranges",
        "store.blocks",
        "store.claims",
        "store.deletions",
        "store.holdings",
        "store.picking",
        "store.seeding",
        "store.usage",
    },
    "store.tables": {"errors", "model"},
    "store.violations": set(),
    "store.block_rules": {"model", "store.blocks", "store.violations"},
    "store.row_rules": {"model", "store.blocks", "store.violations"},
    "store.invariants": {
        "store.block_rules",
        "store.row_rules",
        "store.violations",
    },
    "store.repair": {
        "model",
        "store.blocks",
        "store.caution",
        "store.holdings",
        "store.invariants",
        "store.row_rules",
        "store.seeding",
        "store.violations",
    },
    "store.connecting": {
        "clock",
        "errors",
        "store.reboot",
        "store.schema",
        "store.seeding",
    },
    "store.opening": {"errors"},
    "store.arrival": {"clock", "errors", "store.opening"},
    "store.pages": {"store.arrival"},
    "store.salvage": {"errors", "model", "store.blocks", "store.pages"},
    "store.rebuilding": {
        "model",
        "store.blocks",
        "store.caution",
        "store.reboot",
        "store.salvage",
        "store.seeding",
    },
    "store.examining": {"store.rebuilding"},
    "store.telling": {"store.rebuilding", "store.salvage"},
    "store.traces": {
        "errors",
        "store.arrival",
        "store.connecting",
        "store.pages",
        "store.schema",
    },
    "store.healing": {
        "errors",
        "store.arrival",
        "store.caution",
        "store.connecting",
        "store.opening",
        "store.rebuilding",
        "store.salvage",
        "store.schema",
        "store.seeding",
        "store.telling",
        "store.traces",
    },
    "store.missing": {"errors", "store.connecting", "store.healing"},
    "store.transactions": {"clock", "errors", "store.connecting"},
    "store.database": {
        "clock",
        "errors",
        "store.arrival",
        "store.connecting",
        "store.examining",
        "store.healing",
        "store.missing",
        "store.opening",
        "store.traces",
        "store.transactions",
    },
    # beside the daemon, in a process of its own
    "store.reading": {
        "clock",
        "errors",
        "store.arrival",
        "store.connecting",
        "store.invariants",
        "store.opening",
        "store.schema",
        "store.traces",
    },
    "store.backup": {"errors", "store.connecting", "store.reading"},
    "store.merging": {
        "errors",
        "model",
        "store.blocks",
        "store.caution",
        "store.history",
        "store.invariants",
        "store.salvage",
        "store.seeding",
        "store.violations",
    },
    "store.changing": {
        "clock",
        "errors",
        "store.arrival",
        "store.database",
        "store.transactions",
    },
    "store.writer": {"clock", "errors", "store.transactions"},
    "store.store": {
        "clock",
        "errors",
        "model",
        "ranges",
        "store.database",
        "store.arrival",
        "store.blocks",
        "store.garbage",
        "store.history",
        "store.holdings",
        "store.reclaiming",
        "store.sql",
        "store.tables",
        "store.transactions",
        "store.writer",
        "store.usage",
    },
    # the daemon
    "waiting": {"model", "ranges"},
    "engine": {"errors", "model", "store.store", "waiting"},
    "requests": {"api", "errors", "model", "ranges"},
    "service": {"api", "engine", "errors", "model", "requests", "store.store"},
    # owners that are gone
    "verdicts": {"model"},
    "cri": {
        "api",
        "errors",
        "rpc.channel",
        "rpc.limits",
        "rpc.transport",
        "verdicts",
    },
    "evidence": {"cri", "model", "rpc.transport", "verdicts"},
    "reclaim": {"engine", "errors", "model", "store.store", "verdicts"},
    "node_service": {
        "api",
        "engine",
        "errors",
        "model",
        "reclaim",
        "service",
        "store.history",
        "store.store",
    },
    "health": {"api"},
    # written by the plugin, applied by whoever opens the database
    "cni.spool": {"clock", "errors", "model"},
    # the plugin, in a process and in the daemon
    "cni.relay": set(),
    "cni.protocol": {"errors"},
    "cni.environment": {"cni.protocol", "errors", "model"},
    "cni.fields": {"cni.protocol", "errors", "model"},
    "cni.configuration": {"cni.fields", "cni.protocol", "config", "errors", "model"},
    "cni.ranges": {"cni.fields", "cni.protocol", "errors", "model", "ranges"},
    "cni.requested": {"cni.fields", "cni.protocol", "cni.ranges"},
    "cni.attachments": {"cni.environment", "cni.fields", "cni.protocol"},
    "cni.dns": {"cni.fields"},
    "cni.spec": {
        "cni.attachments",
        "cni.configuration",
        "cni.dns",
        "cni.environment",
        "cni.fields",
        "cni.protocol",
        "cni.ranges",
        "cni.requested",
        "config",
        "model",
    },
    "cni.messages": {
        "api",
        "cni.protocol",
        "cni.ranges",
        "cni.spec",
        "errors",
        "model",
    },
    "cni.result": {"cni.dns", "cni.messages", "cni.spec", "model"},
    "cni.resolver": {"cni.dns", "cni.protocol"},
    "cni.log": {"cni.relay", "config"},
    "cni.client": {"cni.protocol", "errors", "rpc.channel", "rpc.transport"},
    "cni.origin": {"clock"},
    "cni.node": {
        "api",
        "cni.attachments",
        "cni.client",
        "cni.origin",
        "cni.protocol",
        "cni.spec",
        "rpc.channel",
    },
    "cni.verbs": {
        "api",
        "cni.client",
        "cni.messages",
        "cni.node",
        "cni.origin",
        "cni.protocol",
        "cni.relay",
        "cni.resolver",
        "cni.result",
        "cni.spec",
        "cni.spool",
        "errors",
        "model",
        "rpc.channel",
    },
    "cni.invocation": {
        "cni.environment",
        "cni.fields",
        "cni.log",
        "cni.protocol",
        "cni.spec",
        "errors",
        "paths",
    },
    "plugin_service": {
        "api",
        "clock",
        "cni.client",
        "cni.fields",
        "cni.invocation",
        "cni.origin",
        "cni.protocol",
        "cni.relay",
        "cni.spec",
        "cni.verbs",
        "rpc.channel",
    },
    # read when the database has lost records
    "cni.cache": {"config", "errors", "model", "store.rebuilding"},
    "daemon": {
        "clock",
        "cni.cache",
        "cni.spool",
        "config",
        "engine",
        "errors",
        "evidence",
        "health",
        "node_service",
        "plugin_service",
        "reclaim",
        "rpc.local",
        "rpc.server",
        "rpc.transport",
        "service",
        "store.store",
    },
    # the plugin without a daemon
    "cni.direct": {
        "clock",
        "cni.spool",
        "config",
        "daemon",
        "engine",
        "errors",
        "rpc.channel",
        "rpc.server",
        "rpc.transport",
        "store.store",
    },
    "cni.plugin": {
        "cni.client",
        "cni.direct",
        "cni.invocation",
        "cni.log",
        "cni.origin",
        "cni.protocol",
        "cni.relay",
        "cni.verbs",
        "paths",
    },
    # putting it into a CNI directory
    "cni.launcher": {"cni.protocol"},
    "cni.survey": {"errors"},
    "cni.bundle": {"cni.launcher", "cni.survey", "errors"},
    "cni.trees": {"cni.bundle", "errors"},
    "cni.trial": {"cni.protocol", "errors"},
    "cni.install": {
        "cni.bundle",
        "cni.launcher",
        "cni.survey",
        "cni.trees",
        "cni.trial",
        "config",
        "errors",
        "paths",
        "rpc.socket_file",
    },
}
"""What each module may import of the project; what is not listed may not."""

BECOMES: dict[str, set[str]] = {"cni.relay": {"__main__", "cni.plugin"}}
"""The way back up: what a module goes on as when it cannot do its work itself. The
plugin has the relay's own functions, so that nothing stands twice."""

VERSIONED = ("cni.plugin", "cni.trees")
"""Modules that tell the version, which is the package's own name for something."""

PURE = [
    "errors",
    "cidr",
    "ranges",
    "model",
    "config",
    "requests",
    "rpc.limits",
    "rpc.http2",
    "rpc.headers",
    "rpc.connection",
    "rpc.wire",
    "rpc.codec",
    "store.caution",
    "store.history",
    "store.reboot",
    "store.seeding",
    "store.schema",
    "store.blocks",
    "store.usage",
    "store.picking",
    "store.claims",
    "store.deletions",
    "store.holdings",
    "store.garbage",
    "store.reclaiming",
    "store.sql",
    "store.tables",
    "verdicts",
    "cni.protocol",
    "cni.environment",
    "cni.fields",
    "cni.configuration",
    "cni.ranges",
    "cni.requested",
    "cni.attachments",
    "cni.dns",
    "cni.spec",
    "cni.messages",
    "cni.result",
    "cni.launcher",
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
    allowed = LAYERS[module] | BECOMES.get(module, set())
    for imported in imports_of(path_of(module)):
        if imported == "metis" or not imported.startswith("metis."):
            # `from metis import __version__` is the one name that needs no module
            assert imported != "metis" or module in VERSIONED, module
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
