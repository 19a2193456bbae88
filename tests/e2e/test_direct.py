"""A node without its daemon: the installed plugin on the database alone."""

from __future__ import annotations

import os
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from tests.e2e import ledger
from tests.e2e.daemon import Daemon
from tests.e2e.ipam import metis_ipam
from tests.e2e.network import output
from tests.e2e.plugin import Plugin, delegate

SUBNET = "10.105.0.0/22"

MANY = 200
"""Plugins at once: a node that starts anew with all its pods, without a daemon."""

CONTENT = b"x" * 4096


@pytest.fixture
def absent(node: None, tmp_path: Path) -> Daemon:
    """A daemon that does not run, and of which nothing is there yet."""
    return Daemon(tmp_path)


@pytest.fixture
def plugin(absent: Daemon, plugin_directory: Path, tmp_path: Path) -> Plugin:
    return on_its_files(absent, plugin_directory, tmp_path / "cni.log")


def on_its_files(absent: Daemon, plugin_directory: Path, log: Path) -> Plugin:
    """The plugin, which can do without the daemon."""
    config = delegate(metis_ipam(absent, log, SUBNET))
    return Plugin(plugin_directory / "metis", config)


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
    names = [f"c{number}" for number in range(MANY)]
    given = plugin.added_many(plugin.start_many(names))
    absent.start()
    try:
        check(absent, given)
    finally:
        absent.stop()


def test_200_plugins_at_once_while_a_daemon_starts_get_an_address_each(
    absent: Daemon, plugin: Plugin
) -> None:
    names = [f"c{number}" for number in range(MANY)]
    processes = plugin.start_many(names[: MANY // 2])
    absent.start()
    try:
        processes |= plugin.start_many(names[MANY // 2 :])
        given = plugin.added_many(processes)
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
        plugin = on_its_files(absent, plugin_directory, tmp_path / "cni.log")
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
