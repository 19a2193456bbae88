"""podman: containers come, restart, are rewired and go, on a bridge with metis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import ledger
from tests.e2e.daemon import Daemon
from tests.e2e.image import NAME as IMAGE
from tests.e2e.ipam import conflist, metis_ipam
from tests.e2e.ledger import Holding
from tests.e2e.requirements import require
from tests.e2e.runtimes.podman import Podman
from tests.e2e.waiting import until

SUBNET, SUBNET6 = "10.102.0.0/24", "fd00:102::/64"
FIRST = {"10.102.0.2", "fd00:102::2"}
SECOND = {"10.102.0.3", "fd00:102::3"}


@pytest.fixture
def podman(
    daemon: Daemon, plugin_directory: Path, image: Path, tmp_path: Path
) -> Iterator[Podman]:
    """podman with the network "pods": a dual-stack bridge with metis as its IPAM."""
    require("podman", "podman")
    require("runc", "runc")
    ipam = metis_ipam(daemon, tmp_path / "cni.log", SUBNET, SUBNET6, network="pods")
    bridge = {"type": "bridge", "bridge": "metis1", "isGateway": True, "ipam": ipam}
    podman = Podman(
        tmp_path / "podman", plugin_directory, conflist("pods", "0.4.0", bridge)
    )
    try:
        podman("load", "--input", str(image))
        yield podman
    finally:
        podman.close()


def owned_by(container_id: str, addresses: set[str]) -> set[Holding]:
    return {Holding("pods", container_id, "eth0", address) for address in addresses}


def ping(podman: Podman, container: str, addresses: set[str]) -> None:
    for address in addresses:
        podman("exec", container, "ping", "-c", "1", "-w", "5", address)


def test_a_container_has_its_address_from_run_to_rm(
    daemon: Daemon, podman: Podman
) -> None:
    one, two = podman.run("one", IMAGE), podman.run("two", IMAGE)

    assert podman.addresses("one") == FIRST
    assert podman.addresses("two") == SECOND
    ping(podman, "one", SECOND)
    ping(podman, "two", FIRST)
    assert ledger.read(daemon).holdings == owned_by(one, FIRST) | owned_by(two, SECOND)

    podman("rm", "--force", "--time", "0", "one")

    after = ledger.read(daemon)
    assert after.holdings == owned_by(two, SECOND)
    assert after.cooling_addresses == FIRST


def test_network_reload_keeps_the_address_of_a_running_container(
    daemon: Daemon, podman: Podman
) -> None:
    one, two = podman.run("one", IMAGE), podman.run("two", IMAGE)

    podman("network", "reload", "one")

    assert podman.addresses("one") == FIRST
    shown = podman("exec", "one", "ip", "address", "show", "dev", "eth0")
    assert all(f" {address}/" in shown for address in FIRST)
    ping(podman, "two", FIRST)
    after = ledger.read(daemon)
    assert after.holdings == owned_by(one, FIRST) | owned_by(two, SECOND)
    assert not after.cooling


def test_a_restarted_container_holds_what_podman_says_and_no_more(
    daemon: Daemon, podman: Podman
) -> None:
    one, two = podman.run("one", IMAGE), podman.run("two", IMAGE)

    podman("restart", "--time", "0", "one")

    again = podman.addresses("one")
    assert len(again) == len(FIRST)
    ping(podman, "one", SECOND)
    assert ledger.read(daemon).holdings == owned_by(one, again) | owned_by(two, SECOND)


def test_a_container_that_ends_by_itself_gives_its_address_back(
    daemon: Daemon, podman: Podman
) -> None:
    two = podman.run("two", IMAGE)

    # Nobody waits for this one: conmon cleans up after it, in an environment
    # without most of the variables of this session.
    podman(
        *("run", "--detach", "--rm", "--network", "pods", IMAGE),
        *("ping", "-c", "1", "-w", "5", "10.102.0.2"),
    )
    until(
        "the addresses came back",
        lambda: [
            row
            for row in daemon.table("ip-addresses")
            if row["release_at"] != ledger.NULL
        ],
    )

    after = ledger.read(daemon)
    assert after.holdings == owned_by(two, FIRST)
    assert after.cooling_addresses == SECOND
