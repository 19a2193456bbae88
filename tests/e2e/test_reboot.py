"""The node reboots with a full pool: no DEL ever came, and its pods start anew."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tests.e2e import ledger, reboot
from tests.e2e.daemon import Daemon
from tests.e2e.ipam import conflist, metis_ipam
from tests.e2e.requirements import require
from tests.e2e.runtimes.containerd import DEFAULT_HANDLER, Containerd

SUBNET = "10.105.0.0/28"
PODS = 13
"""All that the subnet has: 16 less network, gateway and broadcast address."""


@pytest.fixture
def containerd(
    daemon: Daemon, plugin_directory: Path, image: Path, tmp_path: Path
) -> Iterator[Containerd]:
    """containerd whose pods get the addresses of SUBNET."""
    require("containerd", "containerd", "ctr")
    require("runc", "runc")
    ipam = metis_ipam(daemon, tmp_path / "cni.log", SUBNET, network="pods")
    network = conflist("pods", "0.4.0", {"type": "ptp", "mtu": 1400, "ipam": ipam})
    containerd = Containerd(
        tmp_path / "containerd", plugin_directory, {DEFAULT_HANDLER: network}
    )
    try:
        containerd.start(image)
        yield containerd
    finally:
        containerd.close()
        reboot.restore_boot_id()
        print(containerd.log_path.read_text())


def run_at_once(containerd: Containerd, names: list[str]) -> dict[str, str]:
    """Start pods at once; returns the address of each by its sandbox's id."""
    with ThreadPoolExecutor(len(names)) as threads:
        pods = list(threads.map(containerd.run, names))
    return {pod.sandbox_id: containerd.addresses(pod)[0] for pod in pods}


def test_after_a_reboot_a_full_pool_serves_all_its_pods_at_once(
    daemon: Daemon, containerd: Containerd, image: Path, tmp_path: Path
) -> None:
    before = run_at_once(containerd, [f"old-{n}" for n in range(PODS)])
    assert len(set(before.values())) == PODS
    with pytest.raises(grpc.RpcError, match="no ipv4 address is free"):
        containerd.run("one-too-many")

    daemon.kill()
    containerd.power_off()
    reboot.end_every_process()
    reboot.remove_namespaces_below(tmp_path / "containerd" / "state")
    reboot.change_boot_id(tmp_path)
    daemon.start()
    containerd.start(image)

    after = run_at_once(containerd, [f"new-{n}" for n in range(PODS)])
    assert sorted(after.values()) == sorted(before.values())
    assert not set(after) & set(before)

    # The kubelet removes what containerd remembers of the former boot. Those DELs
    # are for owners that have nothing any more.
    for sandbox_id in before:
        containerd.stop(sandbox_id)
        containerd.remove(sandbox_id)
    held = ledger.read(daemon)
    assert {
        container: next(iter(its)) for container, its in held.held_by.items()
    } == after
    assert not held.cooling
