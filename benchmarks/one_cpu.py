"""One CPU for client and servers, so that CPU time says the same on a busy machine.

On one CPU, where waking does not preempt, a server runs when its client has sent all
that it may. How many calls meet in one read or one commit, and how often threads meet
at the interpreter's lock, does then not depend on who else uses the machine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Set


@contextlib.contextmanager
def one_cpu() -> Iterator[None]:
    """Keep this process, and those that it starts meanwhile, on one CPU, in batches."""
    allowed, policy = os.sched_getaffinity(0), os.sched_getscheduler(0)
    # The last one: the first has most of the interrupts.
    _schedule({max(allowed)}, os.SCHED_BATCH)
    try:
        yield
    finally:
        _schedule(allowed, policy)


def _schedule(cpus: Set[int], policy: int) -> None:
    """Place all threads of this process; grpcio has some of its own."""
    for name in os.listdir("/proc/self/task"):
        # One that has just ended needs no place.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(name), cpus)
            os.sched_setscheduler(int(name), policy, os.sched_param(0))
