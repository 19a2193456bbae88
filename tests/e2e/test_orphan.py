"""The orphan race: a runtime gives up on an ADD, and its plugin lives on.

When the deadline of a CRI call expires, containerd kills the main plugin and
sends DEL at once. The IPAM plugin below is not killed: it goes on with a new
parent, and its ADD may end after the DEL did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from tests.e2e import ledger
from tests.e2e.daemon import Daemon
from tests.e2e.ipam import conflist, metis_ipam
from tests.e2e.requirements import require
from tests.e2e.runtimes.containerd import DEFAULT_HANDLER, Containerd
from tests.e2e.waiting import until

SUBNET = "10.106.0.0/24"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "cni.log"


@pytest.fixture
def containerd(
    daemon: Daemon, plugin_directory: Path, image: Path, tmp_path: Path, log: Path
) -> Iterator[Containerd]:
    """containerd whose pods get an address of SUBNET."""
    require("containerd", "containerd", "ctr")
    require("runc", "runc")
    ipam = metis_ipam(daemon, log, SUBNET, network="pods")
    network = conflist("single", "0.4.0", {"type": "ptp", "ipam": ipam})
    containerd = Containerd(
        tmp_path / "containerd", plugin_directory, {DEFAULT_HANDLER: network}
    )
    try:
        containerd.start(image)
        yield containerd
    finally:
        containerd.close()
        print(containerd.log_path.read_text())


def plugins(verb: str = "") -> list[int]:
    """Processes of our plugin for any verb, or for one, whoever their parent is now."""
    wanted = f"CNI_COMMAND={verb}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        is_call = any(
            one == wanted or (not verb and one.startswith(wanted))
            for one in environment
        )
        if is_call and b"metis" in command:
            found.append(int(entry.name))
    return found


def asks(pid: int) -> bool:
    """Whether a plugin has got as far as to ask somebody: it has a socket."""
    with contextlib.suppress(OSError):
        return any(
            str(descriptor.readlink()).startswith("socket:")
            for descriptor in Path(f"/proc/{pid}/fd").iterdir()
        )
    return False


def give_up(containerd: Containerd, name: str) -> None:
    """Have a pod started by a client that does not wait for it."""
    with containerd.abandoned(name):
        until("the ADD of the pod asks", lambda: any(map(asks, plugins("ADD"))))


@pytest.mark.parametrize("away", [False, True], ids=["daemon", "direct"])
def test_an_add_that_ends_after_its_runtime_gave_up_leaks_nothing(
    away: bool, daemon: Daemon, containerd: Containerd, log: Path
) -> None:
    """The ADD waits for the database, which the test keeps to itself meanwhile."""
    if away:
        daemon.kill()
    keeper = apsw.Connection(str(daemon.db_path))
    keeper.set_busy_timeout(60_000)
    keeper.execute("BEGIN IMMEDIATE")
    try:
        give_up(containerd, "held")
        until("the DEL of the pod came", lambda: plugins("DEL"))
    finally:
        keeper.execute("ROLLBACK")
        keeper.close()
    until("no plugin runs any more", lambda: not plugins())
    if away:
        daemon.start()
    assert not ledger.read(daemon).owned
    print(log.read_text())
    [orphan] = [line for line in log.read_text().splitlines() if "verb=ADD" in line]
    assert "outcome=ok" not in orphan, "its runtime had given it up"

    pod = containerd.run("next")
    assert len(containerd.addresses(pod)) == 1
    containerd.stop(pod.sandbox_id)
    containerd.remove(pod.sandbox_id)
    assert not ledger.read(daemon).owned
