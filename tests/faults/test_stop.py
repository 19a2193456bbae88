"""SIGTERM in the middle of everything: each call is answered or refused."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import trio

import metis
from tests.faults.checker import judge, judge_rows
from tests.faults.clients import PATIENT_SECONDS, Site, StubCaller
from tests.faults.counts import Counts
from tests.faults.daemon import Daemon
from tests.faults.load import Record, chance_of

STOPS = 100
CALLS = 100
"""At once, and each of another container: a half ADDs, a quarter DELs and CHECKs."""

CHANNELS = 8
COOLDOWN = 0.2
SITE = Site("pods", ("10.1.0.0/20",))


async def test_whoever_calls_while_the_daemon_stops_gets_an_answer_or_a_refusal(
    tmp_path: Path, scaled: Callable[[int], int], counts: Counts, seed: str
) -> None:
    chance = chance_of(seed)
    daemon, record = Daemon(tmp_path, COOLDOWN), Record()
    held: list[str] = []
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(
                metis.open_channel(metis.UnixTransport(str(daemon.socket_path)))
            )
            for _ in range(CHANNELS)
        ]
        callers = [
            StubCaller(channels[n % CHANNELS], PATIENT_SECONDS) for n in range(CALLS)
        ]
        for stop in range(scaled(STOPS)):
            daemon.start(more=["--shutdown-grace", f"{PATIENT_SECONDS:g}s"])
            assert await daemon.ready(), daemon.log()
            held += [f"first-{stop}-{n}" for n in range(CALLS // 2 - len(held))]
            async with trio.open_nursery() as nursery:
                for caller, name in zip(callers, held, strict=False):
                    nursery.start_soon(record.add, caller, SITE, name)
            fresh = [f"in-the-middle-{stop}-{n}" for n in range(CALLS // 2)]
            chance.shuffle(held)
            gone, checked = held[: CALLS // 4], held[CALLS // 4 :]
            async with trio.open_nursery() as nursery:
                for number, caller in enumerate(callers):
                    match number % 4:
                        case 0:
                            nursery.start_soon(
                                record.delete, caller, SITE, gone[number // 4]
                            )
                        case 1:
                            name = checked[number // 4]
                            nursery.start_soon(
                                record.check, caller, SITE, name, frozenset()
                            )
                        case _:
                            nursery.start_soon(
                                record.add, caller, SITE, fresh[number // 2]
                            )
                await record.progress(chance.randint(0, CALLS - 1))
                daemon.signal(signal.SIGTERM)
            assert not record.silences, record.silences
            assert await trio.to_thread.run_sync(daemon.wait) == 0, daemon.log()
            assert not daemon.socket_path.exists()
            counts.add("SIGTERM in the middle of 100 calls")
            left = daemon.left()
            faults = judge(record.history, COOLDOWN)
            faults += judge_rows(record.history, left)
            assert not faults, "\n".join(map(str, faults))
            held = [owner.container for owner in left][: CALLS // 2]
    record.count(counts)
    counts.add("lost, doubled or early", 0)
