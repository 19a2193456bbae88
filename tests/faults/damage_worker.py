"""A store that is killed, and what it had promised: prints a line for every answer.

`python -m tests.faults.damage_worker DB FOLDINGS` makes a node's life of some hundred
calls, folds the log into the file FOLDINGS times on the way, says "done" and waits to
be killed.
"""

from __future__ import annotations

import json
import sys

import trio

from metis.engine import Engine
from metis.model import Pod
from metis.store.database import Database
from metis.store.store import Store, open_store
from tests.store.databases import owner, want

COOLDOWN = 60.0

IPV4 = want("10.0.0.0/25")
IPV6 = want("fd00::/121")
OTHER = want("10.1.0.0/26")

ROUNDS = 40


def tell(*values: object) -> None:
    print(json.dumps(values), flush=True)


async def live(store: Store, foldings: int) -> None:
    engine = Engine(store)
    for number in range(ROUNDS):
        for who, wanted in (
            (owner(f"a{number}"), [IPV4, IPV6]),
            (owner(f"b{number}", "other"), [OTHER]),
        ):
            got = await engine.allocate(who, wanted, Pod(f"pod-{number}", "ns"))
            addresses = [one.address for one in got]
            tell("ADD", who.network, who.container_id, addresses)
        if number % 3 == 2:
            gone = owner(f"a{number - 2}")
            released = await engine.deallocate(gone)
            end_ms = engine.now_ms() + round(COOLDOWN * 1000) - 1_000
            addresses = [one.address for one in released]
            tell("DEL", gone.network, gone.container_id, addresses, end_ms)
        if foldings and number % (ROUNDS // (foldings + 1)) == 7:
            inner = store._database
            assert isinstance(inner, Database)
            # Before the next write, and beside those after it.
            inner._checkpoint_at = inner._fold_at = 1


async def main(path: str, foldings: int) -> None:
    async with open_store(path, release_cooldown=COOLDOWN) as store:
        await live(store, foldings)
        print("done", flush=True)
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]))
