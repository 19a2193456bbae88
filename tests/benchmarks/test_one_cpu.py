from __future__ import annotations

import os

from benchmarks.one_cpu import one_cpu


def test_one_cpu_in_batches_and_then_as_before() -> None:
    before = os.sched_getaffinity(0), os.sched_getscheduler(0)
    with one_cpu():
        assert len(os.sched_getaffinity(0)) == 1
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
        inside = os.sched_getaffinity(0)
        with one_cpu():
            assert os.sched_getaffinity(0) == inside
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
    assert (os.sched_getaffinity(0), os.sched_getscheduler(0)) == before
