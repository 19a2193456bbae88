"""Concurrent calls are as if one after the other: on an engine, between processes."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import apsw
import pytest
import trio

from metis.engine import Engine
from metis.store import holdings, picking, sql
from metis.store.store import Store, open_store
from tests.faults.counts import Counts
from tests.faults.linear import Call, Effect, Event, events_of, faults_of, order_of
from tests.faults.linear_worker import (
    COOLDOWN,
    OWNERS,
    Caller,
    History,
    call_of,
    chance,
    line_of,
    now,
)
from tests.store.databases import check_invariants

CALLS = 20_000
"""Calls of all tasks of one engine together, in a full run."""

PROCESSES = 4
KILLED = 2
"""Processes beside that of the test, and how many of them are killed."""

TRIES = 10
"""How often a planted fault may stay hidden: on a busy machine a rest of some
milliseconds is over before anybody else wants the address."""

CALLS_OF_PROCESSES = 6_000
"""Calls of all processes together, in a full run."""


def add(who: str, begin: float, end: float, *got: str) -> Call:
    return Call("ADD", who, begin, end, frozenset(got))


def delete(who: str, begin: float, end: float, *gave: str) -> Call:
    return Call("DEL", who, begin, end, frozenset(gave))


def check(who: str, begin: float, end: float, *held: str) -> Call:
    return Call("CHECK", who, begin, end, frozenset(held))


A = "10.0.0.2"


@pytest.mark.parametrize(
    "calls",
    [
        [add("x", 0, 1, A), add("x", 0, 1, A), check("x", 2, 3, A)],
        [add("x", 0, 1, A), delete("x", 2, 3, A), add("y", 7.5, 8, A)],
        [add("x", 0, 1, A), delete("x", 2, 3, A), add("x", 3, 4, A)],
        # An order is found though the calls overlap.
        [add("y", 0, 9, A), add("x", 0.5, 1, A), delete("x", 0.6, 2, A)],
        [delete("x", 0, 5, A), add("x", 1, 2, A), check("x", 3, 4)],
        # The one of two calls has it anew that the other has given back.
        [
            check("x", 1.6, 1.8),
            add("x", 0, 4, A),
            add("x", 1, 4, A),
            delete("x", 2, 3, A),
            delete("x", 5, 6, A),
        ],
        # Nobody knows whether these were carried out.
        [Call("ADD", "x", 0, math.inf, None), add("y", 1, 2, A)],
        [Call("ADD", "x", 0, math.inf, None), delete("x", 2, 3, A)],
        [add("x", 0, 1, A), Call("DEL", "x", 2, math.inf, None), add("y", 8, 9, A)],
        [add("x", 0, 1, A), Call("DEL", "x", 2, math.inf, None), check("x", 8, 9, A)],
    ],
)
def test_what_could_have_been_has_an_order(calls: list[Call]) -> None:
    assert faults_of(calls, cooldown=5) == []
    order = order_of(events_of(A, calls), 5)
    assert order is not None
    assert sum(event.certain for event in order) == sum(
        event.certain for event in events_of(A, calls)
    )


@pytest.mark.parametrize(
    "calls",
    [
        # Two owners.
        [add("x", 0, 1, A), add("y", 2, 3, A)],
        [add("x", 0, 5, A), add("y", 0, 5, A)],
        # Before the cooldown ended.
        [add("x", 0, 1, A), delete("x", 2, 3, A), add("y", 4, 6.9, A)],
        # What was answered is not there afterwards.
        [add("x", 0, 1, A), check("x", 2, 3)],
        [add("x", 0, 1, A), delete("x", 2, 3)],
        [add("x", 0, 1, A), delete("x", 2, 3, A), check("x", 4, 5, A)],
        [add("x", 0, 1, A), add("x", 2, 3, "10.0.0.3")],
        # A DEL that came to nothing explains nothing.
        [delete("x", 0, 5), add("x", 1, 2, A), check("x", 3, 4)],
        # A read that goes back.
        [add("x", 0, 9, A), check("x", 1, 2, A), check("x", 3, 4)],
        # A call without an answer explains one of the two alone.
        [
            add("x", 0, 1, A),
            Call("DEL", "x", 2, math.inf, None),
            add("y", 8, 9, A),
            check("x", 10, 11, A),
        ],
    ],
)
def test_what_cannot_have_been_is_found(calls: list[Call]) -> None:
    (fault,) = faults_of(calls, cooldown=5)
    assert fault.startswith(f"{A} cannot have had this life:\n")


def lived(seed: int, cooldown: float) -> list[Event]:
    """What was told of a life of an address: of each point a time that has it in it."""
    dice = chance(str(seed))
    holder = former = ""
    point = free_at = 0.0
    events = []
    for _ in range(dice.choice([10, 20, 40])):
        point += dice.expovariate(1 / (cooldown / 5))
        who, certain = f"c{dice.randrange(3)}", dice.random() < 0.9
        is_done = certain or dice.random() < 0.5
        is_free = not holder and (former == who or point >= free_at)
        effect = Effect.HELD if holder == who else Effect.LACKED
        match dice.choice([Effect.GOT, Effect.GAVE, Effect.HELD]):
            case Effect.GOT if holder == who or is_free or not is_done:
                effect = Effect.GOT
                holder = who if is_done else holder
            case Effect.GAVE if holder == who or not is_done:
                effect = Effect.GAVE
                if is_done:
                    holder, former, free_at = "", who, point + cooldown
            case _:
                certain = True
        begin, end = (dice.expovariate(2 / cooldown) for _ in "be")
        events.append(Event(effect, who, point - begin, point + end, certain))
    return sorted(events, key=lambda event: event.begin)


def test_lives_that_were_have_an_order() -> None:
    for seed in range(500):
        assert order_of(lived(seed, 0.02), 0.02) is not None, seed


def test_a_history_of_thousands_is_judged_quickly() -> None:
    calls = []
    for turn in range(2_000):
        calls += [add(f"c{turn}", 4 * turn, 4 * turn + 3, A)]
        calls += [delete(f"c{turn}", 4 * turn + 1, 4 * turn + 3.5, A)]
    assert faults_of(calls, cooldown=0.1) == []


async def load(store: Store, tasks: int, calls: int, seed: str) -> History:
    """Random calls of many tasks on one engine."""
    engine, history = Engine(store), History()

    async def work(number: int) -> None:
        caller = Caller(engine, chance(f"{seed} {number}"), history.note)
        for _ in range(calls // tasks):
            await caller.call()

    async with trio.open_nursery() as nursery:
        for number in range(tasks):
            nursery.start_soon(work, number)
    return history


@pytest.mark.parametrize("synchronous", ["NORMAL", "FULL"])
async def test_calls_on_one_engine_are_as_if_one_after_the_other(
    tmp_path: Path,
    counts: Counts,
    scaled: Callable[[int], int],
    seed: str,
    synchronous: str,
) -> None:
    path = str(tmp_path / "metis.sqlite")
    async with open_store(
        path, release_cooldown=COOLDOWN, synchronous=synchronous
    ) as store:
        history = await load(store, 16, scaled(CALLS) // 2, seed)
        await look_at_the_end(store, history)
    note(counts, history)
    judge(history)


def judge(history: History) -> None:
    """See that there is an order; tell all that was called where there is none.

    It may take a hundred runs to see the same once more.
    """
    if faults := faults_of(history.calls, COOLDOWN):
        calls = sorted([*history.calls, *history.undone], key=lambda call: call.begin)
        pytest.fail("\n".join([*faults, *(line_of(call, "") for call in calls)]))


async def look_at_the_end(store: Store, history: History) -> None:
    """What is there in the end is what all of it has led to."""
    caller = Caller(Engine(store), chance("none"), history.note)  # asks, no more
    for who in OWNERS:
        begin = now()
        held = await caller.answer("CHECK", who)
        history.note(Call("CHECK", who, begin, now(), held))


def note(counts: Counts, history: History) -> None:
    """Count what was judged; a load that does not meet is none."""
    verbs = {"got": 0, "gave": 0}
    for call in history.answered:
        counts.add(f"linearisable calls: {call.verb}")
        verbs["got"] += call.verb == "ADD" and bool(call.addresses)
        verbs["gave"] += call.verb in ("DEL", "GC") and bool(call.addresses)
    counts.add("linearisable calls: without a known outcome", len(history.open))
    assert verbs["got"] > 50
    assert verbs["gave"] > 50


async def test_calls_of_many_processes_are_as_if_one_after_the_other(
    tmp_path: Path, counts: Counts, scaled: Callable[[int], int], seed: str
) -> None:
    """The daemon's engine and plugins without it, two of which are killed."""
    path = tmp_path / "metis.sqlite"
    calls = scaled(CALLS_OF_PROCESSES) // (PROCESSES + 1)
    histories = [History() for _ in range(PROCESSES)]
    async with open_store(str(path), release_cooldown=COOLDOWN) as store:
        async with trio.open_nursery() as nursery:
            for number, history in enumerate(histories):
                is_killed = number < KILLED
                many = calls * 1000 if is_killed else calls
                name = f"p{number}"
                output = tmp_path / name
                process = await start(path, name, f"{seed} {name}", many, output)
                nursery.start_soon(follow, process, history, output, is_killed, calls)
            history = await load(store, 8, calls, seed)
        for other in histories:
            history.add(other)
        await look_at_the_end(store, history)
        assert len(history.open) <= KILLED * len(OWNERS)
    note(counts, history)
    counts.add("linearisable calls: processes killed", KILLED)
    judge(history)
    connection = apsw.Connection(str(path))
    check_invariants(connection)
    connection.close()


async def start(
    path: Path, name: str, seed: str, calls: int, output: Path
) -> trio.Process:
    with output.open("wb") as file:
        return await trio.lowlevel.open_process(
            [
                *(sys.executable, "-m", "tests.faults.linear_worker"),
                *(str(path), name, seed, str(calls)),
            ],
            stdout=file,
        )


async def follow(
    process: trio.Process, history: History, output: Path, is_killed: bool, calls: int
) -> None:
    """Wait until a process has ended, or kill it amid its calls; take its history."""
    file = trio.Path(output)
    if is_killed:
        while (await file.read_bytes()).count(
            b"\n"
        ) < calls:  # what another process writes into a file sets no event
            assert process.poll() is None
            await trio.sleep(0.01)
        process.kill()
    status = await process.wait()
    died = now()
    assert is_killed or status == 0
    for line in (await file.read_text()).splitlines():
        with contextlib.suppress(ValueError):  # cut off as it was killed
            history.note(call_of(line))
    # What it was at, it has done by now or never will.
    history.open = {key: replace(call, end=died) for key, call in history.open.items()}


def give_what_is_taken(patch: pytest.MonkeyPatch) -> None:
    taken = tuple(
        query.replace("AND is_allocated = FALSE", "AND container_id IS NOT ''")
        for query in picking.FIRST_FREE
    )
    patch.setattr(picking, "FIRST_FREE", taken)


def forget_a_deletion(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sql, "take_back", lambda *_: None)


def rest_for_less(patch: pytest.MonkeyPatch) -> None:
    def take_back(
        connection: apsw.Connection,
        now_ms: int,
        rows: Sequence[holdings.Held],
        cooldown_ms: int,
        reason: str,
    ) -> None:
        holdings.take_back(connection, now_ms, rows, cooldown_ms // 2, reason)

    patch.setattr(sql, "take_back", take_back)


@pytest.mark.damages_database("a fault is planted")
@pytest.mark.parametrize(
    "plant", [give_what_is_taken, forget_a_deletion, rest_for_less]
)
async def test_a_planted_fault_has_no_order(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    plant(monkeypatch)
    faults: list[str] = []
    for number in range(TRIES):
        path = str(tmp_path / f"{number}.sqlite")
        async with open_store(path, release_cooldown=COOLDOWN) as store:
            history = await load(store, 16, 800, f"planted {number}")
        faults = faults_of(history.calls, COOLDOWN)
        if faults:
            break
    assert faults != []
