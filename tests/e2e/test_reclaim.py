"""Pods of containerd that vanish without a DEL, and what becomes of their addresses."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import ledger
from tests.e2e.daemon import METIS, Daemon
from tests.e2e.ipam import Config, conflist, metis_ipam
from tests.e2e.network import output
from tests.e2e.plugin import added, delegate
from tests.e2e.requirements import require
from tests.e2e.runtimes.containerd import DEFAULT_HANDLER, Containerd, Pod
from tests.e2e.waiting import until

SUBNET = "10.106.0.0/24"

GHOST = "0123456789abcdef" * 4
"""A container id of the usual shape that no runtime has ever had."""

NO_PROCESS = 2**22
"""No process has this id: it is the limit of the kernel (PID_MAX_LIMIT)."""


@pytest.fixture
def daemon(node: None, tmp_path: Path) -> Iterator[Daemon]:
    """A daemon that asks containerd, and is in more of a hurry than by itself."""
    daemon = Daemon(
        tmp_path,
        flags=[
            *("--cri-socket", str(tmp_path / "containerd" / "containerd.sock")),
            *("--reclaim-interval", "500ms", "--reclaim-grace", "2s"),
        ],
    )
    daemon.start()
    yield daemon
    print(daemon.log_path.read_text())
    if daemon.running:
        daemon.stop()


@pytest.fixture
def ipam(daemon: Daemon, tmp_path: Path) -> Config:
    """The `ipam` key of everybody's configuration."""
    return metis_ipam(daemon, tmp_path / "cni.log", SUBNET, network="pods")


@pytest.fixture
def containerd(
    ipam: Config, plugin_directory: Path, image: Path, tmp_path: Path
) -> Iterator[Containerd]:
    """containerd whose pods get the addresses of SUBNET."""
    require("containerd", "containerd", "ctr")
    require("runc", "runc")
    network = conflist("pods", "0.4.0", {"type": "ptp", "mtu": 1400, "ipam": ipam})
    containerd = Containerd(
        tmp_path / "containerd", plugin_directory, {DEFAULT_HANDLER: network}
    )
    try:
        containerd.start(image)
        yield containerd
    finally:
        containerd.close()
        print(containerd.log_path.read_text())


def verdicts(daemon: Daemon) -> dict[str, dict[str, str]]:
    """What a round would find now, by container."""
    rows = json.loads(metis(daemon, "reclaim", "--dry-run"))
    return {row["container_id"]: row for row in rows}


def history(daemon: Daemon, container: str) -> list[str]:
    """Why the container's ownerships ended."""
    rows: list[dict[str, str]] = json.loads(
        metis(daemon, "history", "--container", container)
    )
    return [row["reason"] for row in rows]


def metis(daemon: Daemon, *command: str) -> str:
    return output(
        *(str(METIS), *command, "-o", "json"),
        *("--socket-path", str(daemon.socket_path)),
    )


def namespaces_of(containerd: Containerd) -> set[Path]:
    """The files of its network namespaces, one for each pod."""
    return set(containerd.socket_path.parent.glob("state/**/netns/*"))


def lose(containerd: Containerd, pod: Pod, netns: Path) -> None:
    """Take a pod and every trace of it away, and containerd with it: no DEL comes."""
    ctr = ("ctr", "--address", str(containerd.socket_path), "--namespace", "k8s.io")
    output(*ctr, "tasks", "kill", "--signal", "SIGKILL", pod.sandbox_id)
    remove = (*ctr, "containers", "rm", pod.sandbox_id)
    until(
        "the sandbox's record is gone",
        lambda: (
            subprocess.run(remove, check=False, capture_output=True).returncode == 0
        ),
    )
    containerd.power_off()
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    for point in reversed([line.split()[4] for line in mounts]):  # the last first
        if pod.sandbox_id in point or point == str(netns):
            output("umount", "--lazy", point)
    netns.unlink()


def add_ghost(plugin_directory: Path, ipam: Config) -> str:
    """An ADD for a pod that the runtime never lists; returns the address."""
    process = subprocess.Popen(
        [plugin_directory / "metis"],
        env={
            "CNI_COMMAND": "ADD",
            "CNI_CONTAINERID": GHOST,
            "CNI_NETNS": f"/proc/{NO_PROCESS}/ns/net",
            "CNI_IFNAME": "eth0",
            "CNI_PATH": str(plugin_directory),
            "CNI_ARGS": "K8S_POD_NAME=ghost;K8S_POD_NAMESPACE=e2e",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(delegate(ipam)).encode())
    process.stdin.close()
    process.stdin = None
    return added(process)


def test_pods_that_vanished_are_freed_by_what_the_node_shows_and_live_ones_kept(
    daemon: Daemon,
    containerd: Containerd,
    ipam: Config,
    plugin_directory: Path,
    image: Path,
) -> None:
    alive = [containerd.run("one"), containerd.run("two")]
    before = namespaces_of(containerd)
    lost = containerd.run("lost")
    (netns,) = namespaces_of(containerd) - before
    addresses = {pod: containerd.addresses(pod)[0] for pod in [*alive, lost]}
    stay = {pod.sandbox_id for pod in alive}

    # With containerd killed, the namespaces alone tell.
    lose(containerd, lost, netns)
    until("the lost pod is freed", lambda: lost.sandbox_id not in ledger.owners(daemon))
    assert ledger.owners(daemon) == stay
    assert ledger.read(daemon).cooling_addresses == {addresses[lost]}
    (reason,) = history(daemon, lost.sandbox_id)
    assert reason.startswith("reclaimed: its network namespace")
    assert reason.endswith(f"{netns} is gone")

    # Of this one nothing but the runtime's own word can tell.
    ghost = add_ghost(plugin_directory, ipam)
    until("the ghost is past its grace", lambda: "no evidence" in _reason(daemon))
    assert "does not tell its containers" in _reason(daemon)
    assert ledger.owners(daemon) == {*stay, GHOST}
    containerd.start(image)
    until("the ghost is freed", lambda: GHOST not in ledger.owners(daemon))
    assert history(daemon, GHOST) == ["reclaimed: the runtime has no such container"]

    found = verdicts(daemon)
    assert set(found) == stay
    for row in found.values():
        assert (row["verdict"], row["pod_namespace"]) == ("kept", "e2e")
        assert row["reason"].endswith(" is there")
    held = ledger.read(daemon)
    assert held.held_by == {
        pod.sandbox_id: frozenset({addresses[pod]}) for pod in alive
    }
    assert held.cooling_addresses == {addresses[lost], ghost}
    log = daemon.log_path.read_text()
    for container, pod in ((lost.sandbox_id, "e2e/lost"), (GHOST, "e2e/ghost")):
        (line,) = [
            line for line in log.splitlines() if f"container={container}" in line
        ]
        assert f"pod={pod}" in line

    one, two = alive
    container = containerd.start_container(one)
    containerd.execute(container, "ping", "-c1", "-w60", addresses[two])


def _reason(daemon: Daemon) -> str:
    """Why the ghost is kept."""
    found: dict[str, Any] = verdicts(daemon)
    return str(found[GHOST]["reason"])
