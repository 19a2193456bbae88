"""Callers of a node: stubs on the socket, and the plugin with its direct mode.

Every call either returns, or raises what its end says about what it did.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_interface
from pathlib import Path
from typing import Any, Protocol

import trio
from grpclib import GRPCError, Status
from grpclib.exceptions import StreamTerminatedError

from metis.api.adaptiveipam.v1 import (
    AdaptiveIpamStub,
    AllocatePodIpRequest,
    CheckPodIpRequest,
    DeallocatePodIpRequest,
    IpConfig,
)
from metis.api.metis.v1 import Attachment, CollectGarbageRequest, NodeStub
from metis.clock import SystemClock
from metis.errors import TransportError
from metis.rpc.channel import Channel
from tests.e2e.daemon import METIS
from tests.faults.checker import Owner

SECONDS = 5.0
"""Until a call of a stub gives up; longer than a killed daemon is away."""

PATIENT_SECONDS = 120.0
"""The same where the answer is what the test is about, on a machine that is busy."""

BOOT_ID = SystemClock().boot_id()

DEFINITE = {
    Status.RESOURCE_EXHAUSTED,
    Status.INVALID_ARGUMENT,
    Status.ABORTED,
    Status.FAILED_PRECONDITION,
}
"""Statuses that a daemon alone sends, and after which nothing was changed."""

SILENT = {Status.UNAVAILABLE, Status.DEADLINE_EXCEEDED, Status.CANCELLED}
"""Statuses of calls of which nobody knows; every other one is a bug."""

NOTHING_DONE = (
    "nothing was written",
    "nothing was read",
    "the store is closing",
    "the server did not take the call",
    "the server ends every connection before it takes a call",
)
"""What the store says of itself, and a channel of calls that never were on their way;
a connection that breaks says something else."""

OTHER_ADDRESS, NOT_ALLOCATED = 101, 100
"""CNI codes of a CHECK: metis.cni.protocol."""


class Refused(Exception):
    """An error that says that nothing was changed."""


class NotSent(Exception):
    """Nobody was there to whom the call could have been sent."""


class NoAnswer(Exception):
    """Nobody said what became of the call."""


@dataclass(frozen=True)
class Site:
    """A network, as its clients configure it.

    Attributes:
      network: its name.
      subnets: one a family.
    """

    network: str
    subnets: tuple[str, ...]

    def owner(self, container: str) -> Owner:
        return Owner(self.network, container, "eth0")


class Caller(Protocol):
    """One client.

    Attributes:
      dies_with_daemon: whether a call that was not answered is carried out by the
        daemon or by nobody, and its client hears of the end at once.
    """

    dies_with_daemon: bool

    async def add(self, site: Site, container: str) -> frozenset[str]: ...

    async def delete(self, site: Site, container: str) -> None: ...

    async def check(
        self, site: Site, container: str, believed: frozenset[str]
    ) -> frozenset[str]: ...

    async def collect(self, site: Site, kept: Set[str], taken_ms: int) -> None: ...


def boottime_ms() -> int:
    """Now, on the clock with which calls say when they began."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


@contextmanager
def _told_apart() -> Iterator[None]:
    """Errors of a stub as one of the three that a caller raises."""
    try:
        yield
    except GRPCError as error:
        text = error.message or error.status.name
        if isinstance(error.__cause__, TransportError):
            raise NotSent(text) from error
        if error.status in DEFINITE or any(words in text for words in NOTHING_DONE):
            raise Refused(text) from error
        if error.status not in SILENT:
            raise  # a bug
        raise NoAnswer(f"{error.status.name}: {text}") from error
    except (StreamTerminatedError, OSError) as error:
        raise NoAnswer(str(error)) from error


class StubCaller:
    """The generated stubs on a channel, which connects as it needs to."""

    dies_with_daemon = True

    def __init__(self, channel: Channel, seconds: float = SECONDS) -> None:
        self.channel = channel
        self._ipam = AdaptiveIpamStub(channel)
        self._node = NodeStub(channel)
        self._seconds = seconds

    async def add(self, site: Site, container: str) -> frozenset[str]:
        message = AllocatePodIpRequest(
            network=site.network,
            # The next millisecond, so that it is later than a DEL that was just made.
            started_boottime_ms=boottime_ms() + 1,
            boot_id=BOOT_ID,
        )
        for subnet in site.subnets:
            config = IpConfig(
                interface_name="eth0", container_id=container, initial_pod_cidr=subnet
            )
            if ":" in subnet:
                message.ipv6_config = config
            else:
                message.ipv4_config = config
        with _told_apart():
            answer = await self._ipam.allocate_pod_ip(message, timeout=self._seconds)
        return frozenset(ip.ip_address for ip in (answer.ipv4, answer.ipv6) if ip)

    async def delete(self, site: Site, container: str) -> None:
        message = DeallocatePodIpRequest(
            network=site.network, interface_name="eth0", container_id=container
        )
        with _told_apart():
            await self._ipam.deallocate_pod_ip(message, timeout=self._seconds)

    async def check(
        self, site: Site, container: str, believed: frozenset[str] = frozenset()
    ) -> frozenset[str]:
        message = CheckPodIpRequest(
            network=site.network, interface_name="eth0", container_id=container
        )
        with _told_apart():
            try:
                answer = await self._ipam.check_pod_ip(message, timeout=self._seconds)
            except GRPCError as error:
                if error.status is Status.NOT_FOUND:
                    return frozenset()
                raise
        return frozenset(ip.ip_address for ip in answer.held)

    async def collect(self, site: Site, kept: Set[str], taken_ms: int) -> None:
        message = CollectGarbageRequest(
            network=site.network,
            valid_attachments=[Attachment(one, "eth0") for one in sorted(kept)],
            started_boottime_ms=taken_ms,
            boot_id=BOOT_ID,
        )
        with _told_apart():
            await self._node.collect_garbage(message, timeout=self._seconds)


class PluginCaller:
    """The plugin in a worker of its own (`tests.faults.worker`), one call at a time.

    Args:
      socket_path: where its daemon serves.
      db_path: what it uses without the daemon.
      cooldown: the daemon's, in seconds.

    Attributes:
      process: the worker, from the first call on.
    """

    dies_with_daemon = False

    def __init__(self, socket_path: Path, db_path: Path, cooldown: float) -> None:
        self.process: trio.Process | None = None
        self._turn = trio.Lock()
        # Something that is there, and so gives nobody a reason to reclaim.
        self._netns = str(db_path)
        self._keys = {
            "daemonSocket": str(socket_path),
            "dbPath": str(db_path),
            "releaseCooldown": f"{cooldown * 1000:.0f}ms",
            "logFile": f"{db_path}.cni.log",
        }

    def configuration(self, site: Site, **more: object) -> dict[str, Any]:
        """What the runtime gives to the plugin."""
        ranges = [[{"subnet": subnet}] for subnet in site.subnets]
        keys = {"type": "metis", "network": site.network, "ranges": ranges}
        return {
            "cniVersion": "1.1.0",
            "name": site.network,
            "type": "ptp",
            "ipam": keys | self._keys,
        } | more

    def environment(self, verb: str, container: str) -> dict[str, str]:
        """The variables of a call."""
        return {
            "CNI_COMMAND": verb,
            "CNI_CONTAINERID": container,
            "CNI_NETNS": self._netns,
            "CNI_IFNAME": "eth0",
            "CNI_PATH": "/opt/cni/bin",
        }

    async def add(self, site: Site, container: str) -> frozenset[str]:
        result = await self._call("ADD", site, container)
        return addresses_of(result)

    async def delete(self, site: Site, container: str) -> None:
        await self._call("DEL", site, container)

    async def check(
        self, site: Site, container: str, believed: frozenset[str]
    ) -> frozenset[str]:
        """Whether it holds what is believed; what it holds else, nobody tells."""
        suffix = {":": 128, ".": 32}
        ips = [
            {"address": f"{one}/{suffix[':' if ':' in one else '.']}"}
            for one in believed
        ]
        previous = {"cniVersion": "1.1.0", "ips": ips}
        result = await self._call("CHECK", site, container, prevResult=previous)
        if result.get("code") == NOT_ALLOCATED:
            return frozenset()
        if result.get("code") == OTHER_ADDRESS:
            return frozenset([str(result["msg"])])
        return believed

    async def collect(self, site: Site, kept: Set[str], taken_ms: int) -> None:
        attachments = [{"containerID": one, "ifname": "eth0"} for one in sorted(kept)]
        await self._call(
            "GC", site, "", taken_ms, **{"cni.dev/valid-attachments": attachments}
        )

    async def _call(
        self,
        verb: str,
        site: Site,
        container: str,
        started_ms: int = 0,
        **more: object,
    ) -> dict[str, Any]:
        request = {
            "environment": self.environment(verb, container),
            "configuration": self.configuration(site, **more),
            "started_boottime_ms": started_ms or boottime_ms() + 1,
        }
        async with self._turn:
            try:
                answer = await self._exchange(json.dumps(request).encode() + b"\n")
            except BaseException:  # killed, or given up
                self.kill()
                await self.end()
                raise
        result: dict[str, Any] = json.loads(answer["stdout"] or "{}")
        assert (answer["status"] == 0) == ("code" not in result), answer
        return told_apart(verb, result)

    async def _exchange(self, request: bytes) -> dict[str, Any]:
        process, line = await self._started(), b""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            await process.stdin.send_all(request)
            while not line.endswith(b"\n"):
                piece = await process.stdout.receive_some()
                if not piece:
                    raise NoAnswer("the plugin was killed")
                line += piece
        except trio.BrokenResourceError:
            raise NoAnswer("the plugin was killed") from None
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def _started(self) -> trio.Process:
        if self.process is None:
            self.process = await trio.lowlevel.open_process(
                [sys.executable, "-m", "tests.faults.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        return self.process

    def kill(self) -> bool:
        """kill -9, if it runs; whoever waits for an answer is told."""
        if self.process is None or self.process.poll() is not None:
            return False
        self.process.kill()
        return True

    async def end(self) -> None:
        """See the process end; the next call starts another."""
        process, self.process = self.process, None
        if process is not None:
            with trio.CancelScope(shield=True):  # it was killed or has no input
                assert process.stdin is not None
                assert process.stdout is not None
                await process.stdin.aclose()
                await process.wait()
                await process.stdout.aclose()


def told_apart(verb: str, result: dict[str, Any]) -> dict[str, Any]:
    """A plugin's answer, or what its error says about what was done."""
    if "code" not in result:
        return result
    code, details = result["code"], result.get("details", "")
    text = f"{code}: {result['msg']}; {details}"
    if verb == "CHECK" and code in (NOT_ALLOCATED, OTHER_ADDRESS):
        return result
    assert code == 11, f"{verb}: {text}"
    if details.startswith(("RESOURCE_EXHAUSTED", "ABORTED")):
        raise Refused(text)
    raise NoAnswer(text)


def addresses_of(result: dict[str, Any]) -> frozenset[str]:
    """The addresses of an ADD's result."""
    return frozenset(str(ip_interface(one["address"]).ip) for one in result["ips"])


class ProcessCaller(PluginCaller):
    """The installed plugin, a new process for every call, as a runtime has it.

    Attributes:
      program: the plugin, or what stands in for it.
    """

    program: Sequence[str] = (str(METIS),)

    async def _call(
        self,
        verb: str,
        site: Site,
        container: str,
        started_ms: int = 0,
        **more: object,
    ) -> dict[str, Any]:
        done = await trio.run_process(
            self.program,
            env=self.environment(verb, container),
            stdin=json.dumps(self.configuration(site, **more)).encode(),
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
        if done.returncode < 0:
            raise NoAnswer(f"the plugin ended by signal {-done.returncode}")
        result: dict[str, Any] = json.loads(done.stdout or "{}")
        assert (done.returncode == 0) == ("code" not in result), (result, done.stderr)
        return told_apart(verb, result)
