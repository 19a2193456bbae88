"""What a reboot means for addresses."""

from __future__ import annotations

import apsw
import pytest

from metis.errors import PoolExhausted
from metis.model import Allocation, Pod
from metis.store import schema
from metis.store.history import Selection, select
from metis.store.holdings import Residence
from metis.store.sql import allocate, held, release
from tests.store.databases import (
    START_MS,
    check_invariants,
    memory_connection,
    owner,
    want,
)

COOLDOWN_MS = 60_000
SMALL = want("10.0.0.0/29")  # five addresses for pods


def give(
    connection: apsw.Connection,
    now_ms: int,
    name: str,
    boot_id: str = "boot-1",
    pod: Pod = Pod(),  # noqa: B008  # frozen
    *,
    sticky: bool = False,
) -> Allocation:
    with connection:
        (got,) = allocate(
            connection,
            now_ms,
            owner(name),
            [SMALL],
            pod,
            sticky=sticky,
            residence=Residence(boot_id, f"/run/netns/{name}"),
        )
    return got


def reboot(connection: apsw.Connection, walltime_ms: int, boot_id: str) -> None:
    with connection:
        schema.prepare(
            connection,
            boot_id=boot_id,
            boottime_ms=1000,
            walltime_ms=walltime_ms,
            cooldown_ms=COOLDOWN_MS,
        )


def test_a_full_pool_is_free_at_once_after_a_reboot() -> None:
    connection = memory_connection()
    before = [give(connection, START_MS, f"c{n}").address for n in range(5)]
    with pytest.raises(PoolExhausted):
        give(connection, START_MS, "c5")
    reboot(connection, START_MS + 10, "boot-2")
    check_invariants(connection)
    after = [give(connection, START_MS + 10, f"d{n}").address for n in range(5)]
    assert sorted(after) == sorted(before)
    assert held(connection, owner("c0")) == ()
    check_invariants(connection)


def test_addresses_of_a_former_boot_are_used_after_all_others_that_are_free() -> None:
    connection = memory_connection()
    first = give(connection, START_MS, "c0").address
    reboot(connection, START_MS + 10, "boot-2")
    others = [
        give(connection, START_MS + 10, f"d{n}", "boot-2").address for n in range(4)
    ]
    assert first not in others
    assert give(connection, START_MS + 10, "d4", "boot-2").address == first


def test_what_cools_goes_on_cooling_after_a_reboot() -> None:
    connection = memory_connection()
    give(connection, START_MS, "c0")
    with connection:
        release(connection, START_MS, owner("c0"), COOLDOWN_MS)
    reboot(connection, START_MS + 10, "boot-2")
    for number in range(4):
        give(connection, START_MS + 10, f"d{number}", "boot-2")
    with pytest.raises(PoolExhausted, match="1 cooling"):
        give(connection, START_MS + 10, "d4", "boot-2")


def test_the_next_start_in_the_same_boot_frees_nothing() -> None:
    connection = memory_connection()
    give(connection, START_MS, "c0")
    reboot(connection, START_MS + 10, "boot-1")
    assert len(held(connection, owner("c0"))) == 1


def test_a_sticky_pod_gets_its_address_again_after_a_reboot() -> None:
    connection = memory_connection()
    pod = Pod("db-0", "shop")
    give(connection, START_MS, "c0")
    had = give(connection, START_MS, "c1", pod=pod, sticky=True).address
    reboot(connection, START_MS + 10, "boot-2")
    again = give(connection, START_MS + 20, "d1", "boot-2", pod, sticky=True)
    assert again.address == had


def test_the_history_names_the_reboot() -> None:
    connection = memory_connection()
    give(connection, START_MS, "c0")
    reboot(connection, START_MS + 10, "boot-2")
    (entry,) = select(connection, Selection(container_id="c0")).entries
    assert (entry.given_at, entry.ended_at) == (START_MS, START_MS + 10)
    assert entry.reason == "rebooted"


def test_owners_without_a_boot_stay_until_the_reboot_after_the_one_that_is_seen() -> (
    None
):
    connection = memory_connection()
    give(connection, START_MS, "c0", boot_id="")
    connection.execute("UPDATE ip_addresses SET allocation_id = NULL")  # the original's
    reboot(connection, START_MS + 10, "boot-2")
    assert len(held(connection, owner("c0"))) == 1
    reboot(connection, START_MS + 20, "boot-3")
    assert held(connection, owner("c0")) == ()


def test_what_an_older_metis_gave_is_free_after_the_first_reboot() -> None:
    connection = memory_connection()
    give(connection, START_MS, "c0", boot_id="")
    reboot(connection, START_MS + 60_000, "boot-2")
    assert held(connection, owner("c0")) == ()


def test_an_id_that_the_original_left_in_a_row_makes_nobody_a_former_owner() -> None:
    """It took over from an older metis, and gave the row after the reboot."""
    connection = memory_connection()
    give(connection, START_MS + 60_000, "c0", boot_id="")
    reboot(connection, START_MS + 60_500, "boot-2")  # which began at 59,500
    assert len(held(connection, owner("c0"))) == 1


def test_the_wall_clock_of_a_former_boot_may_have_been_ahead() -> None:
    connection = memory_connection()
    give(connection, START_MS + 10**9, "c0")
    reboot(connection, START_MS, "boot-2")
    (entry,) = select(connection, Selection()).entries
    assert entry.given_at == entry.ended_at == START_MS
    give(connection, START_MS, "d0", "boot-2")
    check_invariants(connection)
