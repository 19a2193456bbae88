"""A transaction of many requests, each of which stands or falls by itself."""

from __future__ import annotations

from collections.abc import Sequence

import apsw
import pytest

from metis.clock import StoredClock
from metis.errors import InvalidRequest
from metis.store.transactions import Work, run_group
from tests.store.databases import ManualClock


class TickingClock(ManualClock):
    """A clock that goes on by a millisecond whenever it is read."""

    def boottime_ms(self) -> int:
        self.advance(1)
        return self.boottime


@pytest.fixture
def numbers() -> apsw.Connection:
    connection = apsw.Connection(":memory:")
    connection.execute("CREATE TABLE numbers (number INTEGER PRIMARY KEY, at INTEGER)")
    return connection


def put(number: int, error: Exception | None = None) -> Work[object]:
    """Write down a number and the time; then fail, perhaps."""

    def work(connection: apsw.Connection, now_ms: int) -> int:
        connection.execute("INSERT INTO numbers VALUES (?, ?)", (number, now_ms))
        if error is not None:
            raise error
        return number

    return work


def refuse(_: apsw.Connection, now_ms: int) -> object:
    raise InvalidRequest("nothing was begun")


def run(connection: apsw.Connection, group: Sequence[Work[object]]) -> list[object]:
    return run_group(connection, StoredClock(TickingClock(boottime=0), 0), group)


def stored(connection: apsw.Connection) -> Sequence[object]:
    return connection.execute("SELECT number, at FROM numbers").fetchall()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_fails_half_way_is_undone_and_the_others_stand(
    numbers: apsw.Connection, place: int
) -> None:
    group = [put(number) for number in range(3)]
    wrong = InvalidRequest("half-way")
    group[place] = put(place, wrong)
    answers = run(numbers, group)
    # Run once more, as of then: others may have written in between.
    left = [number for number in range(3) if number != place]
    assert stored(numbers) == [(number, 2) for number in left]
    assert [answers[number] for number in left] == left
    assert answers[place] is wrong


def test_what_fails_before_it_writes_costs_the_others_nothing(
    numbers: apsw.Connection,
) -> None:
    answers = run(numbers, [put(1), refuse, put(2)])
    assert stored(numbers) == [(1, 1), (2, 1)]
    assert isinstance(answers[1], InvalidRequest)


def test_the_same_number_twice_is_an_error_of_the_second_alone(
    numbers: apsw.Connection,
) -> None:
    answers = run(numbers, [put(1), put(1), put(2)])
    assert stored(numbers) == [(1, 1), (2, 1)]
    assert "nothing was written" in str(answers[1])
