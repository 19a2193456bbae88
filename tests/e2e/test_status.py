"""STATUS, asked all the time of a node that is busy, nearly full, and restarted."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tests.e2e import ledger
from tests.e2e.daemon import Daemon
from tests.e2e.ipam import metis_ipam
from tests.e2e.load import CALL_SECONDS, Ipam
from tests.e2e.plugin import NO_ANSWER, Plugin, added, delegate, finished

NETWORK = "pods"

SUBNET = "10.110.0.0/27"
"""29 addresses for pods."""

RESIDENTS = 12
"""Pods that stay: with the callers' own, one address is free or cooling."""

CALLERS = 16
PLUGIN_CALLERS = 2
"""Callers by plugin, who go on without the daemon; the others speak gRPC to it."""

COOLDOWN = "50ms"
"""Short enough for an ADD to wait for it, long enough to have to."""

PERIOD = 0.1
"""Seconds from one STATUS to the next, if the first has been answered."""

POLLS = 12
"""STATUS calls before the kill, without a daemon, and after its return."""

LIMIT = 8.0
"""Seconds that a STATUS may take: a second of its own, the rest for an interpreter
that starts on a machine with everything else to do. It catches those that hang, or
have the 10 s of an ADD."""

SELDOM = 6
"""One STATUS of so many may take longer, or tell that there was no answer in its 0.4 s:
a busy machine may stand still for seconds."""


@dataclass(frozen=True)
class Answer:
    """What a poll saw."""

    status: int
    output: bytes
    seconds: float


@pytest.fixture
def restarting(node: None, tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with a short cooldown."""
    daemon = Daemon(tmp_path, COOLDOWN)
    daemon.start()
    yield daemon
    print(daemon.log_path.read_text())
    if daemon.running:
        daemon.stop()


@pytest.fixture
def plugin(restarting: Daemon, plugin_directory: Path, tmp_path: Path) -> Plugin:
    return of_network(restarting, plugin_directory, tmp_path, SUBNET)


def of_network(
    daemon: Daemon, plugin_directory: Path, directory: Path, subnet: str, **ipam: object
) -> Plugin:
    """The plugin, which can do without the daemon."""
    section = metis_ipam(daemon, directory / "cni.log", subnet, network=NETWORK)
    config = delegate(section | ipam, "1.1.0")
    return Plugin(plugin_directory / "metis", config)


class Poll:
    """STATUS every PERIOD, as a runtime asks, until `stop`."""

    def __init__(self, plugin: Plugin) -> None:
        self.answers: list[Answer] = []
        self._plugin = plugin
        self._stopped = threading.Event()
        self._progress = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait_for(self, answers: int) -> None:
        """Wait until so many more calls were answered."""
        for _ in range(answers):
            assert self._progress.acquire(timeout=CALL_SECONDS), self.answers

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        rest = 0.0
        while not self._stopped.wait(rest):
            began = time.monotonic()
            process = self._plugin.start("STATUS", "")
            try:
                stdout, stderr = process.communicate(timeout=CALL_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                stdout, stderr = process.communicate()
            seconds = time.monotonic() - began
            self.answers.append(Answer(process.returncode, stdout + stderr, seconds))
            self._progress.release()
            rest = max(0.0, PERIOD - seconds)


class Callers:
    """CALLERS who ADD and DEL one container after the other, until `stop`."""

    def __init__(self, daemon: Daemon, plugin: Plugin) -> None:
        self.serving = threading.Event()
        self.serving.set()
        self.done = [0] * CALLERS
        self._daemon = daemon
        self._plugin = plugin
        self._stopped = threading.Event()
        self._threads = ThreadPoolExecutor(CALLERS)
        self._running = [
            self._threads.submit(self._repeat, number) for number in range(CALLERS)
        ]

    def stop(self) -> None:
        """Stop them; raises what any of them met that none may meet."""
        self._stopped.set()
        self.serving.set()
        for caller in self._running:
            caller.result()
        self._threads.shutdown()

    def _repeat(self, number: int) -> None:
        turn = self._by_plugin if number < PLUGIN_CALLERS else self._by_grpc
        while not self._stopped.is_set():
            turn(f"caller{number}-{self.done[number]}")
            self.done[number] += 1

    def _by_plugin(self, container: str) -> None:
        """The daemon may be there or not, or go: it makes no difference."""
        added(self._plugin.start("ADD", container))
        assert finished(self._plugin.start("DEL", container)) == {}

    def _by_grpc(self, container: str) -> None:
        """A daemon that was killed may have given what it did not answer."""
        while True:
            self.serving.wait()
            ipam = Ipam(self._daemon.socket_path, NETWORK, SUBNET)
            try:
                ipam.add(container)
                ipam.delete(container)
            except grpc.RpcError as error:
                # CANCELLED is how grpcio names a stream that the transport took along.
                gone = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
                if error.code() not in gone:
                    raise
            else:
                return
            finally:
                ipam.close()


def test_status_is_silent_while_a_busy_and_nearly_full_node_loses_its_daemon(
    restarting: Daemon, plugin: Plugin
) -> None:
    ipam = Ipam(restarting.socket_path, NETWORK, SUBNET)
    residents = {f"resident{n}": ipam.add(f"resident{n}") for n in range(RESIDENTS)}
    ipam.close()
    callers = Callers(restarting, plugin)
    poll = Poll(plugin)
    try:
        poll.wait_for(POLLS)
        callers.serving.clear()
        restarting.kill()
        poll.wait_for(POLLS)
        restarting.start()
        callers.serving.set()
        poll.wait_for(POLLS)
    finally:
        poll.stop()
        if not restarting.running:
            restarting.start()
        callers.stop()

    wrong = [one for one in poll.answers if one.status or one.output]
    late = [one for one in wrong if NO_ANSWER.encode() in one.output]
    assert wrong == late
    slow = [one for one in poll.answers if one.seconds > LIMIT]
    most = len(poll.answers) // SELDOM
    assert len(late) <= most, late
    assert len(slow) <= most, slow
    assert all(callers.done), "every caller was served in between"
    # And whoever called has given everything back, whatever was killed under it.
    assert ledger.read(restarting).held_by == residents


def test_a_full_pool_fails_status_only_where_the_configuration_says_so(
    daemon: Daemon, plugin_directory: Path, tmp_path: Path
) -> None:
    # Four addresses, of which network, gateway and broadcast go to no pod.
    small = "10.110.0.0/30"
    strict, lenient = (
        of_network(
            *(daemon, plugin_directory, tmp_path, small),
            statusOnExhaustion=on_exhaustion,
        )
        for on_exhaustion in (True, False)
    )
    assert strict.call("STATUS", "") == {}
    added(strict.start("ADD", "c1"))

    for away in (False, True):
        if away:
            daemon.kill()
        full = strict.call("STATUS", "")
        assert full["code"] == 50
        assert f"no ipv4 address is free on network {NETWORK!r}: 1 owned" in full["msg"]
        assert lenient.call("STATUS", "") == {}
