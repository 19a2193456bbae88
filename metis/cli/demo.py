"""`metis demo`: the main job on a temporary directory, for everybody to see.

A daemon is embedded in this very process (`metis.serve` in a nursery) and the
CNI plugin is installed and run as a runtime would run it: a program of its own,
with CNI_* variables and a configuration on stdin. Needs no root: without a main
plugin above it, metis only hands out addresses and makes no interface.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
import trio
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

import metis
from metis.api.admin.v1 import AdminStub, ListIpAddressesRequest
from metis.cli.options import RPC_TIMEOUT, run_reported
from metis.cni.install import install
from metis.cni.protocol import TRY_AGAIN_LATER

COOLDOWN = 3.0
"""Seconds a released address rests in the demo: long enough to be seen."""

IPV4_SUBNET = "10.88.0.0/29"
"""Eight addresses, three of them reserved: five pods fill it."""

IPV6_SUBNET = "fd00:88::/64"

INTERFACE = "eth0"


@dataclass(slots=True)
class Runtime:
    """What a container runtime does for metis: run the plugin, keep results.

    Attributes:
      plugin: the installed program.
      config: the network configuration, as a bridge would pass it on.
      table: gets a row a call.
      results: the last result of each pod, which CHECK needs as prevResult.
      surprises: calls that did not end as the demo expects.
    """

    plugin: Path
    config: dict[str, Any]
    table: Table
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    surprises: list[str] = field(default_factory=list)

    async def call(
        self, verb: str, pod: str, note: str, expected_code: int = 0
    ) -> None:
        """Run one verb for one pod and add a row on how it went."""
        config = self.config
        if verb == "CHECK":
            config = {**config, "prevResult": self.results.get(pod)}
        start = time.monotonic()
        done = await trio.run_process(
            [self.plugin],
            env={
                "CNI_COMMAND": verb,
                "CNI_CONTAINERID": f"demo-{pod}",
                "CNI_NETNS": f"/run/netns/demo-{pod}",
                "CNI_IFNAME": INTERFACE,
                "CNI_PATH": str(self.plugin.parent),
                "CNI_ARGS": f"K8S_POD_NAMESPACE=demo;K8S_POD_NAME={pod}",
            },
            stdin=json.dumps(config).encode(),
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
        seconds = time.monotonic() - start
        code, answer = self._read(pod, done)
        if code != expected_code:
            self.surprises.append(f"{verb} {pod}")
            answer = f"[red]{answer}"
        self.table.add_row(f"{verb} {pod}", answer, f"{seconds:.2f} s", note)

    def _read(
        self, pod: str, done: subprocess.CompletedProcess[bytes]
    ) -> tuple[int, str]:
        """The error code, 0 for none, and a text for a cell; results are kept."""
        if not done.stdout:
            stderr = escape(done.stderr.decode(errors="replace"))
            if done.returncode:
                return done.returncode, f"exit {done.returncode}: {stderr}"
            return 0, "ok"
        answer = json.loads(done.stdout)
        if done.returncode:
            return answer["code"], f"code {answer['code']}: {escape(answer['msg'])}"
        self.results[pod] = answer
        return 0, " ".join(entry["address"] for entry in answer["ips"])


@click.command(
    "demo", short_help="Show the main job on a temporary directory, without root."
)
def command() -> None:
    """Run a daemon and the plugin on a temporary directory and show what happens.

    Needs no root and no configuration, touches nothing else and leaves nothing
    behind.
    """
    run_reported(_demo)


async def _demo() -> None:
    console = Console()
    with _temporary_directory() as name:
        directory = Path(name)
        config = metis.DaemonConfig(
            db_path=str(directory / "metis.sqlite"),
            socket_path=str(directory / "metis.sock"),
            release_cooldown=COOLDOWN,
        )
        plugin = await trio.to_thread.run_sync(
            partial(install, directory, socket_path=config.socket_path)
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(metis.serve, config)
            console.print(
                f"A daemon serves {IPV4_SUBNET} and {IPV6_SUBNET} from {directory}.\n"
                f"A released address rests for {COOLDOWN:g} s.\n"
            )
            calls = Table("Call", "Answer", "Time", "What it shows")
            runtime = Runtime(plugin, _network(config, directory), calls)
            with Live(calls, console=console):
                await _play(runtime)
            console.print(
                "\nWhat the daemon holds now (metis admin ip-addresses list):"
            )
            console.print(await _held(config.socket_path))
            nursery.cancel_scope.cancel()
    console.print("The daemon has stopped and its directory is gone.")
    if runtime.surprises:
        raise click.ClickException(
            f"these calls went otherwise than expected: {', '.join(runtime.surprises)}"
        )


def _temporary_directory() -> tempfile.TemporaryDirectory[str]:
    """A new directory, by a path without links: of some the plugin wants nothing."""
    place = os.path.realpath(tempfile.gettempdir())
    return tempfile.TemporaryDirectory(prefix="metis-demo-", dir=place)


async def _play(runtime: Runtime) -> None:
    """The calls, in an order that shows each rule once."""
    call = runtime.call
    await call("ADD", "web-0", "two addresses in one transaction")
    await call("ADD", "web-1", "the next ones")
    await call("ADD", "web-0", "a repeated ADD gets the same")
    await call("CHECK", "web-0", "prevResult agrees with the database")
    await call("DEL", "web-1", "its addresses begin to cool")
    async with trio.open_nursery() as nursery:
        for pod in ("web-2", "db-0", "db-1"):
            nursery.start_soon(call, "ADD", pod, "at once: each its own")
    await call("ADD", "db-2", "full: waited until web-1's cooled down")
    await call("ADD", "db-3", "full, nothing cools: told at once", TRY_AGAIN_LATER)
    await call("DEL", "db-3", "nothing held is nothing to do")


def _network(config: metis.DaemonConfig, directory: Path) -> dict[str, Any]:
    """The configuration that a bridge would hand to its IPAM plugin."""
    return {
        "cniVersion": "1.0.0",
        "name": "demo",
        "type": "bridge",
        "ipam": {
            "type": "metis",
            "ranges": [[{"subnet": IPV4_SUBNET}], [{"subnet": IPV6_SUBNET}]],
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
            "daemonSocket": config.socket_path,
            # Where a plugin goes that the daemon does not answer in time.
            "dbPath": config.db_path,
            "releaseCooldown": f"{COOLDOWN:g}s",
            "logFile": str(directory / "cni.log"),
        },
    }


async def _held(socket_path: str) -> Table:
    """The rows of all pods, asked over the socket as `metis admin` does."""
    async with metis.open_channel(metis.UnixTransport(socket_path)) as channel:
        page = await AdminStub(channel).list_ip_addresses(
            ListIpAddressesRequest(filter="is_allocated=true AND pod_namespace=demo"),
            timeout=RPC_TIMEOUT,
        )
    columns = ("address", "cidr", "pod_name", "container_id", "allocated_at")
    table = Table(*columns)
    for row in page.rows:
        record = dict(zip(page.headers, row.values, strict=True))
        table.add_row(*(record[column] for column in columns))
    return table
