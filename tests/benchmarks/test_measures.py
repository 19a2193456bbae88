from __future__ import annotations

import os
import time

from benchmarks.measures import cpu_seconds, markdown_table, percentile, rss_mib


def test_the_cpu_of_a_process_is_what_it_says_itself() -> None:
    before = time.process_time()
    seen = cpu_seconds(os.getpid())
    assert before <= seen <= time.process_time()


def test_resident_memory_is_read_in_mib() -> None:
    assert 1 < rss_mib(os.getpid()) < 10_000


def test_percentiles_are_of_what_was_measured() -> None:
    values = [float(i) for i in range(100, 0, -1)]
    assert percentile(values, 50) == 51
    assert percentile(values, 99) == 100
    assert percentile([7.0], 99) == 7


def test_a_table_has_a_line_a_row() -> None:
    assert markdown_table(("a", "b"), [("x", 1), ("longer", 2)]).splitlines() == [
        "| a      | b |",
        "|--------|---|",
        "| x      | 1 |",
        "| longer | 2 |",
    ]
