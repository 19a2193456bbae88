"""`metis reclaim` against a daemon in another process, and what it says."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import trio

import metis
from metis.api.adaptiveipam.v1 import (
    AdaptiveIpamStub,
    AllocatePodIpRequest,
    IpConfig,
)
from metis.api.metis.v1 import ReclaimResponse, Verdict
from metis.cli.reclaim import HEADERS, summary
from tests.cli.conftest import DaemonProcess, StartDaemon, run_metis


def add(daemon: DaemonProcess, netns: Path, *containers: str) -> None:
    """An ADD each, of a container whose network namespace is in the directory."""

    async def run() -> None:
        transport = metis.UnixTransport(str(daemon.socket_path))
        async with metis.open_channel(transport) as channel:
            for container in containers:
                config = IpConfig(
                    interface_name="eth0",
                    container_id=container,
                    initial_pod_cidr="10.9.0.0/24",
                )
                await AdaptiveIpamStub(channel).allocate_pod_ip(
                    AllocatePodIpRequest(
                        ipv4_config=config,
                        pod_name=f"pod-{container}",
                        pod_namespace="shop",
                        netns_path=str(netns / container),
                    )
                )

    trio.run(run)


@pytest.fixture
def netns(tmp_path: Path) -> Path:
    """A directory in which c1 alone has a network namespace."""
    directory = tmp_path / "netns"
    directory.mkdir()
    (directory / "c1").touch()
    return directory


def reclaim(daemon: DaemonProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_metis("reclaim", "--socket-path", str(daemon.socket_path), *arguments)


def verdicts(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    rows: list[dict[str, str]] = json.loads(done.stdout)
    assert all(tuple(row) == HEADERS for row in rows)
    return {row["container_id"]: row for row in rows}


def test_every_verdict_is_explained_for_people_and_for_programs(
    start_daemon: StartDaemon, netns: Path
) -> None:
    daemon = start_daemon("--reclaim-interval", "1h", "--reclaim-grace", "0")
    add(daemon, netns, "c1", "c2")
    done = reclaim(daemon, "--dry-run")
    assert done.returncode == 0
    header, gone, kept = done.stdout.splitlines()
    assert header.split() == [name.upper() for name in HEADERS]
    assert gone.split()[:9] == [
        *("default", "10.9.0.3", "c2", "eth0", "shop", "pod-c2", "gone", "0", "3600s")
    ]
    assert gone.endswith(f"its network namespace {netns / 'c2'} is gone")
    assert kept.split()[6:9] == ["kept", "0", "NULL"]
    assert kept.endswith(f"its network namespace {netns / 'c1'} is there")
    assert done.stderr.splitlines() == [
        "1 address kept",
        "1 address of owners that are gone: a later round must find so too, "
        "in 3600s at the earliest",
    ]
    told = verdicts(reclaim(daemon, "--dry-run", "-o", "json"))
    assert {name: row["verdict"] for name, row in told.items()} == {
        "c1": "kept",
        "c2": "gone",
    }
    assert told["c2"]["strikes"] == "0"


def test_what_has_two_strikes_goes_unless_the_limit_stops_it(
    start_daemon: StartDaemon, netns: Path
) -> None:
    daemon = start_daemon(
        *("--reclaim-interval", "500ms", "--reclaim-grace", "0"),
        *("--reclaim-limit", "1"),
    )
    add(daemon, netns, "c1", "c2", "c3")
    tries = 0
    while not (held_back := reclaim(daemon, "-o", "json")).returncode:
        tries += 1
        assert tries < 20  # a try takes longer than the interval
    assert held_back.returncode == 1
    assert "Error: 2 addresses of 2 owners" in held_back.stderr
    assert "the limit is 1: nothing is (c2, c3)" in held_back.stderr
    assert {row["verdict"] for row in verdicts(held_back).values()} == {"gone", "kept"}
    dry = reclaim(daemon, "--dry-run")
    assert dry.returncode == 0
    assert "2 addresses may go in the next round" in dry.stderr
    assert "the limit is 1" in dry.stderr

    done = reclaim(daemon, "--limit", "2", "-o", "json")
    assert done.returncode == 0
    assert {name: row["verdict"] for name, row in verdicts(done).items()} == {
        "c1": "kept",
        "c2": "freed",
        "c3": "freed",
    }
    assert done.stderr.splitlines() == ["1 address kept", "2 addresses taken back"]
    for limit in ("0", str(2**32), "9" * 20):
        done = reclaim(daemon, "--limit", limit)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"{limit} is not in the range 1<=x<=" in done.stderr
    assert list(verdicts(reclaim(daemon, "-o", "json"))) == ["c1"]


def test_without_a_daemon_it_says_where_there_is_none(tmp_path: Path) -> None:
    done = run_metis("reclaim", "--socket-path", str(tmp_path / "none.sock"))
    assert done.returncode == 1
    assert "none.sock" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_limit_that_lets_nothing_go_is_refused() -> None:
    done = run_metis("reclaim", "--limit", "0")
    assert done.returncode == 2
    assert "--limit" in done.stderr


def test_every_kind_of_verdict_is_summed_up() -> None:
    kept = Verdict(gone=False)
    first = Verdict(gone=True, strikes=1, wait_ms=58_001)
    due = Verdict(gone=True, strikes=2)
    freed = Verdict(gone=True, strikes=2, released=True)
    answer = ReclaimResponse(
        verdicts=[kept, kept, first, first, due, freed], left_out=3
    )
    assert summary(answer) == [
        "5 addresses kept",
        "2 addresses of owners that are gone: a later round must find so too, "
        "in 59s at the earliest",
        "1 address may go in the next round",
        "1 address taken back",
        "3 addresses did not fit into the answer",
    ]
    assert summary(ReclaimResponse()) == ["0 addresses kept"]
