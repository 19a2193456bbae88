"""kill -9 at any moment, under everything at once: nothing is lost or given twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import trio

from tests.faults.checker import judge, judge_rows
from tests.faults.clients import Site
from tests.faults.counts import Counts
from tests.faults.daemon import Daemon
from tests.faults.load import Crowd, Record, at_work, chance_of

KILLS = 1000

COOLDOWN = 0.2
"""Seconds; so short that addresses come around again and again."""

SITES = [
    Site("small", ("10.1.0.0/28",)),
    Site("dual", ("10.2.0.0/28", "fd00:2::/124")),
    Site("wide", ("10.3.0.0/20",)),
]
"""Two from which there is not enough for all clients, and one that grows."""

FAMILIES = {site.network: len(site.subnets) for site in SITES}

CLIENTS = Crowd(on_socket=13, in_workers=2, processes=1)

MOST_ANSWERS = 60
"""Calls that are answered between two kills, at the most."""

START_SECONDS = 0.6
"""A start takes about so long; a daemon that is killed meanwhile dies within it."""


async def test_after_kill_9_at_any_moment_every_answer_holds(
    tmp_path: Path, scaled: Callable[[int], int], counts: Counts, seed: str
) -> None:
    chance = chance_of(seed)
    daemon, record = Daemon(tmp_path, COOLDOWN), Record()
    daemon.start()
    assert await daemon.ready()
    async with at_work(daemon, record, chance, SITES, CLIENTS) as workers:
        for _ in range(scaled(KILLS)):
            if starting := chance.random() < 0.1:
                await trio.sleep(chance.uniform(0, START_SECONDS))
            else:
                assert await daemon.ready()
                await record.progress(chance.randint(1, MOST_ANSWERS))
                await trio.sleep(chance.uniform(0, 0.005))
            daemon.kill()
            counts.add(f"kill -9 of the daemon {'as it starts' * starting}".strip())
            if chance.random() < 0.2:
                counts.add("kill -9 of a plugin", chance.choice(workers).kill())
            if chance.random() < 0.2:  # nobody but direct mode
                await record.bury()
                await record.progress(chance.randint(1, 10))
            daemon.start()
            await record.bury()
        assert await daemon.ready()
    daemon.stop()
    await record.bury()
    record.count(counts)
    faults = judge(record.history, COOLDOWN)
    faults += judge_rows(record.history, daemon.left(), FAMILIES)
    counts.add("lost, doubled or early", len(faults))
    assert not faults, "\n".join(map(str, faults))
