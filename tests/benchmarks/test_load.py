from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import pytest

from benchmarks import daemon_load, pools
from benchmarks.grpc_load import Level
from benchmarks.series import Rounds

SERVED = Level(
    operation="AllocatePodIP",
    concurrency=8,
    calls=100,
    per_second=1000.0,
    p50_ms=1.0,
    p95_ms=2.0,
    p99_ms=3.0,
    max_ms=4.0,
    server_cpu_us=300.0,
    client_cpu_us=200.0,
    failures={},
    addresses_given_twice=0,
)


def test_a_level_becomes_figures_by_name() -> None:
    series = Rounds()
    daemon_load._note(series, "load/metis/AllocatePodIP/8", SERVED, "metis")
    assert series["load/metis/AllocatePodIP/8/per_second"] == [1000.0]
    assert series["load/metis/AllocatePodIP/8/server_cpu_us"] == [300.0]


def test_calls_that_failed_have_no_figures() -> None:
    failed = replace(SERVED, failures={"UNAVAILABLE: gone": 3})
    with pytest.raises(daemon_load.CallsFailedError, match="UNAVAILABLE"):
        daemon_load._note(Rounds(), "load/other", failed, "other")


def test_an_address_that_two_owners_have_is_no_result() -> None:
    twice = replace(SERVED, addresses_given_twice=2)
    with pytest.raises(daemon_load.CallsFailedError, match="2 addresses were given"):
        daemon_load._note(Rounds(), "load/metis", twice, "metis")
    # The yardstick's handler is a constant.
    daemon_load._note(Rounds(), "load/bare", twice, "bare")


def test_pools_take_turns_every_few_calls() -> None:
    order: list[str] = []

    def pool(name: str) -> pools.Pool:
        async def call(request: bytes, **options: float) -> None:
            assert name.encode() in request
            order.append(name)

        return pools.Pool(call, os.getpid(), "10.0.0.0/24", name)

    two = [pool("net-a"), pool("net-b")]
    calls = pools.CHUNK + 5
    asyncio.run(pools.take_turns(two, calls))
    warm_up, counted = order[: 2 * pools.WARM_UP], order[2 * pools.WARM_UP :]
    assert warm_up == ["net-a"] * pools.WARM_UP + ["net-b"] * pools.WARM_UP
    assert counted == [
        *(["net-a"] * pools.CHUNK + ["net-b"] * pools.CHUNK),
        *(["net-a"] * 5 + ["net-b"] * 5),
    ]
    assert [len(each.walls) for each in two] == [calls, calls]
