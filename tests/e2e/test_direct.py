"""A node without its daemon: the installed plugin on the database alone."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from ipaddress import ip_address, ip_interface, ip_network
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import ledger
from tests.e2e.daemon import Daemon
from tests.e2e.ipam import Config, metis_ipam
from tests.e2e.network import output

SUBNET = "10.105.0.0/22"

MANY = 200
"""Plugins at once: a node that starts anew with all its pods, without a daemon."""

CONTENT = b"x" * 4096


class Plugin:
    """The plugin as a runtime starts it, on the files of a daemon."""

    def __init__(self, program: Path, daemon: Daemon, log: Path) -> None:
        self._program = program
        section = metis_ipam(daemon, log, SUBNET)
        section["dbPath"] = str(daemon.db_path)
        self._config: Config = {
            "cniVersion": "1.0.0",
            "name": "pods",
            "type": "ptp",
            "ipam": section,
        }

    def start(self, command: str, container: str) -> subprocess.Popen[bytes]:
        """Start one call."""
        process = subprocess.Popen(
            [self._program],
            env={
                "CNI_COMMAND": command,
                "CNI_CONTAINERID": container,
                "CNI_NETNS": "/run/netns/absent",
                "CNI_IFNAME": "eth0",
                "CNI_PATH": str(self._program.parent),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(self._config).encode())
        process.stdin.close()
        process.stdin = None
        return process

    def call(self, command: str, container: str) -> Any:
        """One call; what it printed, which is an error if it failed."""
        return finished(self.start(command, container))

    def add_many(self, names: Sequence[str]) -> dict[str, str]:
        """ADDs at once; addresses by container."""
        processes = [self.start("ADD", name) for name in names]
        return dict(zip(names, map(added, processes), strict=True))


def finished(process: subprocess.Popen[bytes]) -> Any:
    stdout, stderr = process.communicate()
    answer = json.loads(stdout) if stdout else {}
    assert (process.returncode == 0) == ("code" not in answer), (answer, stderr)
    return answer


def added(process: subprocess.Popen[bytes]) -> str:
    """The address that an ADD was given, which it must be."""
    answer = finished(process)
    assert "ips" in answer, answer
    return str(ip_interface(answer["ips"][0]["address"]).ip)


@pytest.fixture
def absent(node: None, tmp_path: Path) -> Daemon:
    """A daemon that does not run, and of which nothing is there yet."""
    return Daemon(tmp_path)


@pytest.fixture
def plugin(absent: Daemon, plugin_directory: Path, tmp_path: Path) -> Plugin:
    return Plugin(plugin_directory / "metis", absent, tmp_path / "cni.log")


def check(daemon: Daemon, given: dict[str, str]) -> None:
    """Every container has an address of its own, and the daemon knows it."""
    assert len(set(given.values())) == len(given)
    assert all(ip_address(ip) in ip_network(SUBNET) for ip in given.values())
    held = ledger.read(daemon)
    assert {name: held.held_by[name] for name in given} == {
        name: frozenset([address]) for name, address in given.items()
    }


def test_200_plugins_at_once_without_daemon_or_database_get_an_address_each(
    absent: Daemon, plugin: Plugin
) -> None:
    given = plugin.add_many([f"c{number}" for number in range(MANY)])
    absent.start()
    try:
        check(absent, given)
    finally:
        absent.stop()


def test_200_plugins_at_once_while_a_daemon_starts_get_an_address_each(
    absent: Daemon, plugin: Plugin
) -> None:
    names = [f"c{number}" for number in range(MANY)]
    processes = [plugin.start("ADD", name) for name in names[: MANY // 2]]
    absent.start()
    try:
        given = plugin.add_many(names[MANY // 2 :])
        for name, process in zip(names, processes, strict=False):
            given[name] = added(process)
        check(absent, given)
    finally:
        absent.stop()


def test_after_kill_9_of_the_daemon_the_next_calls_succeed(
    absent: Daemon, plugin: Plugin
) -> None:
    absent.start()
    first = plugin.call("ADD", "c1")
    absent.kill()
    assert absent.socket_path.is_socket()
    assert plugin.call("ADD", "c1") == first
    assert plugin.call("DEL", "c1") == {}
    second = plugin.call("ADD", "c2")
    assert second["ips"] != first["ips"]
    absent.start()
    try:
        assert plugin.call("ADD", "c2") == second
        assert ledger.read(absent).held_by.keys() == {"c2"}
    finally:
        absent.stop()


def test_a_full_disk_loses_no_del(
    absent: Daemon, plugin_directory: Path, tmp_path: Path
) -> None:
    """The database and its spool are on one small file system."""
    disk = tmp_path / "disk"
    disk.mkdir()
    output("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk))
    try:
        absent.db_path = disk / "metis.sqlite"
        plugin = Plugin(plugin_directory / "metis", absent, tmp_path / "cni.log")
        plugin.call("ADD", "c1")
        fill(disk / "filler")

        # Neither the database nor the spool takes anything: the runtime must know.
        refused = plugin.call("DEL", "c1")
        assert refused["code"] == 11
        assert "full" in refused["msg"]
        assert "No space left" in refused["msg"]
        assert plugin.call("ADD", "c2")["code"] == 11

        (disk / "filler").unlink()
        assert plugin.call("DEL", "c1") == {}
        absent.start()
        try:
            assert not ledger.read(absent).owned
        finally:
            absent.stop()
    finally:
        output("umount", str(disk))


def fill(path: Path) -> None:
    """Use up a file system to its last page."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while os.write(descriptor, CONTENT) == len(CONTENT):
            pass
    except OSError:
        return
    finally:
        os.close(descriptor)


def test_a_del_without_a_usable_database_is_kept_and_applied_by_the_daemon(
    absent: Daemon, plugin: Plugin
) -> None:
    plugin.call("ADD", "c1")
    plugin.call("ADD", "c2")
    aside = absent.db_path.with_suffix(".aside")
    absent.db_path.rename(aside)
    absent.db_path.mkdir()
    assert plugin.call("DEL", "c1") == {}
    assert plugin.call("ADD", "c3")["code"] == 11
    absent.db_path.rmdir()
    aside.rename(absent.db_path)

    absent.start()
    try:
        held = ledger.read(absent)
        assert held.held_by.keys() == {"c2"}
        assert len(held.cooling_addresses) == 1
    finally:
        absent.stop()
    assert list(Path(f"{absent.db_path}.spool").iterdir()) == []
