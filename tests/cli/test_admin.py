"""`metis admin` and `metis health` against a daemon in another process."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import trio

import metis
from metis.api.adaptiveipam.v1 import (
    AdaptiveIpamStub,
    AllocatePodIpRequest,
    IpConfig,
)
from tests.cli.conftest import DaemonProcess, StartDaemon, run_metis


def allocate(daemon: DaemonProcess, count: int, cidr: str) -> None:
    async def run() -> None:
        transport = metis.UnixTransport(str(daemon.socket_path))
        async with metis.open_channel(transport) as channel, trio.open_nursery() as n:
            for i in range(count):
                config = IpConfig(
                    interface_name="eth0", container_id=f"c{i}", initial_pod_cidr=cidr
                )
                request = AllocatePodIpRequest(
                    ipv4_config=config, pod_name=f"p{i}", pod_namespace="ns"
                )
                n.start_soon(AdaptiveIpamStub(channel).allocate_pod_ip, request)

    trio.run(run)


def test_tables_are_shown_to_people_and_to_programs(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    path = ("--socket-path", str(daemon.socket_path))
    empty = run_metis("admin", "cidr-blocks", "list", "-o", "json", *path)
    assert json.loads(empty.stdout) == []
    allocate(daemon, 3, "10.9.0.0/24")

    done = run_metis("admin", "cidr-blocks", "list", "-o", "json", *path)
    [block] = json.loads(done.stdout)
    assert (block["cidr"], block["total_ips"]) == ("10.9.0.0/24", "256")
    assert block["allocated_ips"] == "6"  # three pods and three reserved addresses

    done = run_metis(
        *("admin", "ip-addresses", "list", *path),
        *("--filter", "container_id = 'c1' AND is_allocated=true"),
    )
    header, row = done.stdout.splitlines()
    assert "CONTAINER_ID" in header
    assert "p1" in row.split()
    # Columns stand under their headers.
    assert row[header.index("CONTAINER_ID") :].startswith("c1 ")


def test_a_large_table_comes_whole_though_no_message_could_hold_it(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon()
    allocate(daemon, 1, "10.9.0.0/16")
    import_rows(daemon, 40_000)
    done = run_metis(
        *("admin", "ip-addresses", "list", "-o", "json"),
        *("--socket-path", daemon.socket_path),
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(done.stdout) > 2 * 4 * 1024 * 1024
    assert len({row["address"] for row in rows}) == len(rows) >= 40_000


def import_rows(daemon: DaemonProcess, count: int) -> None:
    """Add free rows to the first block, as another process may at any time."""
    import apsw

    connection = apsw.Connection(str(daemon.db_path))
    connection.set_busy_timeout(60_000)
    connection.execute(
        "WITH RECURSIVE series (n) AS "
        "(SELECT 0 UNION ALL SELECT n + 1 FROM series WHERE n < ?) "
        "INSERT INTO ip_addresses (address, cidr_block_id, is_allocated) "
        "SELECT printf('10.9.%d.%d', n / 256, n % 256), 1, FALSE "
        "FROM series WHERE TRUE ON CONFLICT DO NOTHING",
        (count - 1,),
    )
    connection.close()


def test_a_wrong_filter_is_named_with_what_would_be_right(
    start_daemon: StartDaemon,
) -> None:
    path = ("--socket-path", str(start_daemon().socket_path))
    done = run_metis("admin", "ip-addresses", "list", "--filter", "pod=x", *path)
    assert done.returncode == 1
    assert "'pod'" in done.stderr
    assert "pod_name" in done.stderr
    assert "Traceback" not in done.stderr
    done = run_metis(
        *("admin", "cidr-blocks", "list", *path),
        *("--filter", "1=0; DELETE FROM cidr_blocks"),
    )
    assert done.returncode == 1
    assert "INVALID_ARGUMENT" in done.stderr


def test_health_is_the_exit_status(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = start_daemon()
    path = ("--socket-path", str(daemon.socket_path))
    done = run_metis("health", *path)
    assert (done.returncode, done.stdout) == (0, "SERVING\n")
    done = run_metis("health", "--service", "nope", *path)
    assert done.returncode == 1
    assert "NOT_FOUND" in done.stderr
    daemon.end(signal.SIGTERM)
    done = run_metis("health", *path)
    assert done.returncode == 1
    assert str(daemon.socket_path) in done.stderr
    assert "Traceback" not in done.stderr
