"""podman: containers come, restart, are rewired and go, on a bridge with metis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e import ledger
from tests.e2e.daemon import Daemon
from tests.e2e.image import NAME as IMAGE
from tests.e2e.ipam import Config, conflist, metis_ipam
from tests.e2e.ledger import Holding
from tests.e2e.requirements import require
from tests.e2e.runtimes.podman import Podman
from tests.e2e.waiting import until

SUBNET, SUBNET6 = "10.102.0.0/24", "fd00:102::/64"
FIRST = {"10.102.0.2", "fd00:102::2"}
SECOND = {"10.102.0.3", "fd00:102::3"}
FIXED, FIXED6 = "10.102.0.77", "fd00:102::77"


@pytest.fixture
def podman(
    daemon: Daemon, plugin_directory: Path, image: Path, tmp_path: Path
) -> Iterator[Podman]:
    """podman with the network "pods": a dual-stack bridge with metis as its IPAM."""
    ipam = metis_ipam(daemon, tmp_path / "cni.log", SUBNET, SUBNET6, network="pods")
    bridge = {"type": "bridge", "bridge": "metis1", "isGateway": True, "ipam": ipam}
    with started(tmp_path, plugin_directory, image, bridge) as podman:
        yield podman


@pytest.fixture
def fixing(
    daemon: Daemon, plugin_directory: Path, image: Path, tmp_path: Path
) -> Iterator[Podman]:
    """The same with the capability by which podman asks for two addresses at once."""
    ipam = metis_ipam(daemon, tmp_path / "cni.log", SUBNET, SUBNET6, network="pods")
    bridge = {"type": "bridge", "bridge": "metis1", "isGateway": True, "ipam": ipam}
    able = {**bridge, "capabilities": {"ips": True}}
    with started(tmp_path, plugin_directory, image, able) as podman:
        yield podman


@contextmanager
def started(
    directory: Path, plugin_directory: Path, image: Path, bridge: Config
) -> Iterator[Podman]:
    require("podman", "podman")
    require("runc", "runc")
    podman = Podman(
        directory / "podman", plugin_directory, conflist("pods", "0.4.0", bridge)
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
        podman("exec", container, "ping", "-c", "1", "-w", "60", address)


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
        *("ping", "-c", "1", "-w", "60", "10.102.0.2"),
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


@pytest.mark.parametrize(
    ("options", "fixed"),
    [
        (("--ip", FIXED), {FIXED}),
        (("--ip6", FIXED6), {FIXED6}),
        (("--ip", FIXED, "--ip6", FIXED6), {FIXED, FIXED6}),
    ],
    ids=["ip", "ip6", "both"],
)
def test_a_fixed_address_stays_through_reload_and_restart(
    daemon: Daemon, fixing: Podman, options: tuple[str, ...], fixed: set[str]
) -> None:
    two = fixing.run("two", IMAGE)
    one = fixing.run("one", IMAGE, *options)
    given = fixing.addresses("one")
    assert len(given) == 2
    assert fixed <= given
    on_the_interface(fixing, "one", given)
    ping(fixing, "two", given)

    fixing("network", "reload", "one")

    assert fixing.addresses("one") == given
    on_the_interface(fixing, "one", given)
    ping(fixing, "two", given)
    assert ledger.read(daemon).holdings == owned_by(one, given) | owned_by(two, FIRST)

    fixing("restart", "--time", "0", "one")

    assert fixed <= fixing.addresses("one")
    on_the_interface(fixing, "one", fixed)
    ping(fixing, "one", FIRST)
    again = fixing.addresses("one")
    assert ledger.read(daemon).holdings == owned_by(one, again) | owned_by(two, FIRST)


def on_the_interface(podman: Podman, container: str, addresses: set[str]) -> None:
    shown = podman("exec", container, "ip", "address", "show", "dev", "eth0")
    assert all(f" {address}/" in shown for address in addresses), shown


def test_a_fixed_address_that_another_has_is_refused_in_words_that_say_so(
    daemon: Daemon, fixing: Podman
) -> None:
    one = fixing.run("one", IMAGE, "--ip", FIXED, "--ip6", FIXED6)
    both = {FIXED, FIXED6}

    for options, address in (
        (("--ip", FIXED), FIXED),
        (("--ip", "10.102.0.78", "--ip6", FIXED6), FIXED6),
    ):
        said = fixing.refused(f"late{options.index(address)}", IMAGE, *options)
        assert address in said
        assert "is held by another owner" in said
        # Not even the other family of a pod that was refused.
        assert ledger.read(daemon).holdings == owned_by(one, both)

    # What rests after its last owner is not to be had by name either.
    fixing("rm", "--force", "--time", "0", "one")
    assert FIXED in fixing.refused("early", IMAGE, "--ip", FIXED)
    assert not ledger.read(daemon).owned


def test_an_address_that_no_container_gets_is_refused_with_the_range(
    daemon: Daemon, fixing: Podman
) -> None:
    for name, address in (("gateway", "10.102.0.1"), ("elsewhere", "10.9.0.9")):
        said = fixing.refused(name, IMAGE, "--ip", address)
        assert address in said
    assert SUBNET in said
    assert not ledger.read(daemon).owned
