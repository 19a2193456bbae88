"""One transaction: of many requests, which stand or fall one by one, or of a read.

A request that fails takes back what it wrote, and the others stand. SQLite has
savepoints for that, which copy every page that is touched, so they are made only
when a request has failed half-way: as a rule an error comes before the first write.

May touch: the database of the connection that it is given. Knows no thread; who runs
what, and where, is `metis.store.database`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import apsw

from metis.clock import StoredClock
from metis.errors import StoreError
from metis.store.connecting import translated

T = TypeVar("T")

Work: TypeAlias = Callable[[apsw.Connection, int], T]
"""What a request does: a function of a connection and the stored time in ms, and of
nothing else. It may be run again after all that it wrote was undone."""


def run_group(
    connection: apsw.Connection, clock: StoredClock, group: Sequence[Work[object]]
) -> list[object]:
    """Run requests as one transaction.

    Args:
      connection: with no transaction begun.
      clock: the clock of stored times.
      group: the requests.

    Returns:
      For each request what it returned, or the exception that it raised: then its
      own writes were undone, and those of the others stand.

    Raises:
      StoreError: SQLite's answer, translated; nothing of the group was written.
    """
    try:
        connection.execute("BEGIN IMMEDIATE")
        now_ms = clock.now_ms()
        if len(group) == 1:
            answers = [_run_alone(connection, now_ms, group[0])]
        else:
            found = _run_without_savepoints(connection, now_ms, group)
            if found is None:
                now_ms = clock.now_ms()  # others may have written in between
                found = [_run_in_savepoint(connection, now_ms, work) for work in group]
            answers = found
        if connection.in_transaction:
            connection.execute("COMMIT")
    except BaseException as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if isinstance(error, apsw.Error):
            raise translated(error, "nothing was written") from error
        raise
    return answers


def run_read(connection: apsw.Connection, clock: StoredClock, work: Work[T]) -> T:
    """Run a request that writes nothing.

    Raises:
      StoreError: SQLite's answer, translated; or whatever `work` raises.
    """
    try:
        connection.execute("BEGIN")
        return work(connection, clock.now_ms())
    except apsw.Error as error:
        raise translated(error, "nothing was read") from error
    except UnicodeDecodeError as error:
        raise _not_text(error) from error
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _run_alone(connection: apsw.Connection, now_ms: int, work: Work[object]) -> object:
    """Run the only request of a transaction; its error undoes the transaction."""
    try:
        return work(connection, now_ms)
    except Exception as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        return _answer(error)


def _run_without_savepoints(
    connection: apsw.Connection, now_ms: int, group: Sequence[Work[object]]
) -> list[object] | None:
    """Run requests as long as none fails that has written something.

    Returns:
      Their answers. None where one has: all is undone, and a transaction is begun
      anew, in which they can be run once more.
    """
    answers: list[object] = []
    written = connection.total_changes()
    for work in group:
        try:
            answers.append(work(connection, now_ms))
        except Exception as error:
            if not connection.in_transaction:  # SQLite undid the whole group
                raise
            if connection.total_changes() != written:
                connection.execute("ROLLBACK")
                connection.execute("BEGIN IMMEDIATE")
                return None
            answers.append(_answer(error))
        written = connection.total_changes()
    return answers


def _run_in_savepoint(
    connection: apsw.Connection, now_ms: int, work: Work[object]
) -> object:
    """Run one request of many; its error undoes its own writes."""
    connection.execute("SAVEPOINT request")
    try:
        answer = work(connection, now_ms)
    except Exception as error:
        if not connection.in_transaction:  # SQLite undid the whole group
            raise
        connection.execute("ROLLBACK TO request")
        answer = _answer(error)
    connection.execute("RELEASE request")
    return answer


def _answer(error: Exception) -> Exception:
    if isinstance(error, apsw.Error):
        return translated(error, "nothing was written")
    if isinstance(error, UnicodeDecodeError):
        return _not_text(error)
    return error


def _not_text(error: UnicodeDecodeError) -> StoreError:
    """SQLite keeps whatever bytes as text; only damage makes them none."""
    return StoreError(f"the database holds text that is none: {error}")
