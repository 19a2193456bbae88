from __future__ import annotations

import pytest

from benchmarks.layers import REST, layer_of, shares

LIB = "/home/metis/metis/.venv/lib/python3.11/site-packages"
MAIN = "main (/home/metis/metis/.venv/bin/metis:8)"
TRIO = f"{MAIN};unrolled_run (trio/_core/_run.py:2700)".replace("(trio", f"({LIB}/trio")
SERVICE = f"{TRIO};allocate ({LIB}/metis/service.py:10)"


@pytest.mark.parametrize(
    ("stack", "layer"),
    [
        (MAIN, REST),
        (TRIO, "Trio"),
        (f"{TRIO};flush ({LIB}/metis/rpc/session.py:3)", "metis.rpc and grpclib"),
        (f"{TRIO};x ({LIB}/metis/rpc/s.py:3);d ({LIB}/h2/c.py:4)", "h2 and hpack"),
        (f"{TRIO};send ({LIB}/trio/_socket.py:10)", "sockets"),
        (f"{TRIO};WorkerThread._work ({LIB}/trio/_core/_thread_cache.py:211)", ""),
        (SERVICE, "messages and rules"),
        (f"{SERVICE};parse ({LIB}/betterproto2/__init__.py:9)", "messages and rules"),
        (f"{TRIO};run ({LIB}/metis/store/sql.py:9)", "SQL"),
    ],
)
def test_a_sample_belongs_to_the_innermost_layer(stack: str, layer: str) -> None:
    assert layer_of(stack) == layer


def test_what_the_standard_library_does_is_done_for_its_caller() -> None:
    stack = f"{SERVICE};dumps (/usr/lib/python3.11/json/__init__.py:231)"
    assert layer_of(stack) == "messages and rules"


def test_shares_add_up_to_one_and_name_every_layer() -> None:
    idle = f"{MAIN};WorkerThread._work ({LIB}/trio/_core/_thread_cache.py:211)"
    found = shares([f"{SERVICE} 3", f"{TRIO} 1", "", f"{MAIN} 4", f"{idle} 9"])
    assert found["messages and rules"] == 3 / 8
    assert found["Trio"] == 1 / 8
    assert found["SQL"] == 0
    assert sum(found.values()) == pytest.approx(1)


def test_a_profile_without_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        shares([])
