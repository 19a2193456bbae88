"""What each program imports. Nothing costs as much as that, in time and in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import metis
from metis import daemon
from metis.errors import sole_error

SERVES = """
import json, sys, trio, metis
config = metis.DaemonConfig(db_path=sys.argv[1] + "/db", socket_path=sys.argv[1] + "/s")
async def main():
    async with trio.open_nursery() as nursery:
        await nursery.start(metis.serve, config)
        nursery.cancel_scope.cancel()
trio.run(main)
"""
TELLS = "\nimport json, sys; print(json.dumps(sorted(sys.modules)))"

HEALING = {
    f"metis.store.{name}"
    for name in (
        "healing",
        "invariants",
        "missing",
        "rebuilding",
        "repair",
        "salvage",
        "traces",
    )
}
STORE = {"anyio", "apsw", "metis.engine", "metis.store", "metis.store.store"}
GRPC = {"betterproto2", "grpclib.server", "h2", "metis.api", "metis.rpc.server"}


def modules_after(code: str, *arguments: str) -> set[str]:
    """What an interpreter has imported that ran some code."""
    done = subprocess.run(
        [sys.executable, "-c", code + TELLS, *arguments],
        capture_output=True,
        check=True,
        timeout=120,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_a_pod_s_call_of_the_whole_plugin_loads_no_store() -> None:
    loaded = modules_after("import metis.cni.plugin, metis.cni.verbs")
    assert "trio" in loaded
    assert not loaded & (STORE | {"metis.cni.direct", "metis.cni.node"})
    assert not loaded & {"click", "metis.daemon", "metis.store.reclaiming", "rich"}


def test_commands_that_ask_the_daemon_load_no_store() -> None:
    commands = ("admin", "health", "history", "reclaim")
    code = "".join(f"import metis.cli.{command}\n" for command in commands)
    loaded = modules_after(f"import metis.cli.main\n{code}")
    assert "metis.rpc.channel" in loaded
    assert not loaded & (STORE | {"metis.daemon", "metis.rpc.server", "rich"})


def test_a_daemon_opens_its_database_before_grpc_is_loaded() -> None:
    loaded = modules_after("import metis.cli.daemon, metis.daemon")
    assert "metis.store.database" in loaded
    assert not loaded & (GRPC | HEALING | {"asyncio", "metis.service"})


def test_a_daemon_that_serves_has_loaded_what_it_needs_and_no_more(
    tmp_path: Path,
) -> None:
    modules_after(SERVES, str(tmp_path))  # a new database takes other modules
    loaded = modules_after(SERVES, str(tmp_path))
    # A package that is replaced under a daemon must not come into it by halves.
    needed = {"cni.node", "evidence", "node_service", "plugin_service", "reclaim"}
    assert {f"metis.{name}" for name in needed} <= loaded
    assert not loaded & HEALING
    assert not loaded & {"click", "metis.cri", "metis.cni.direct", "rich", "sqlite3"}


async def test_a_module_that_is_not_there_ends_the_start_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "ANSWERING", ("metis.absent",))
    config = metis.DaemonConfig(db_path=str(tmp_path / "db"))
    with pytest.raises(BaseExceptionGroup) as raised:
        await metis.serve(config, transport=metis.MemoryTransport())
    assert isinstance(sole_error(raised.value), ModuleNotFoundError)
    assert "metis.absent" in str(sole_error(raised.value))
