from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import markers, record, tables
from benchmarks.machine import in_words

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


def load(
    server: str, rate: float, p50: float, p99: float, cpu: float
) -> dict[str, list[float]]:
    prefix = f"load/{server}/AllocatePodIP/32"
    return {
        f"{prefix}/per_second": [rate],
        f"{prefix}/p50_ms": [p50],
        f"{prefix}/p99_ms": [p99],
        f"{prefix}/server_cpu_us": [cpu],
    }


SERIES = {**load("metis", 3000, 10, 20, 270), **load("bare", 2000, 8, 40, 300)}


def rows(table: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line
    ]


def test_servers_stand_side_by_side() -> None:
    table = rows(tables.load_table(SERIES, tables.SERVERS))
    assert table[0][2:6] == [
        "metis calls/s",
        "metis p50 ms",
        "metis p99 ms",
        "metis CPU us/call",
    ]
    assert table[2] == [
        *("AllocatePodIP", "32"),
        *("3,000", "10.0", "20.0", "270"),
        *("2,000", "8.00", "40.0", "300"),
    ]


def test_ratios_are_ours_to_theirs() -> None:
    table = rows(tables.load_ratios(SERIES, "metis", "bare", "the bare server"))
    assert table[2] == [
        *("AllocatePodIP", "32"),
        *("1.50", "0.50", "0.90", "2.00", "5.00"),
    ]


def test_a_server_without_a_process_has_no_cpu() -> None:
    other = {
        name.replace("bare", "other"): rounds
        for name, rounds in SERIES.items()
        if name != "load/bare/AllocatePodIP/32/server_cpu_us"
    }
    table = rows(tables.load_ratios(other, "metis", "other", "the other"))
    assert table[2][4] == tables.NOT_MEASURED


def test_cpu_in_turns_is_sorted_by_operation_and_level() -> None:
    series = {
        f"cpu/{server}/{operation}/{level}/server_cpu_us": [cpu]
        for server, cpu in (("metis", 300.0), ("bare", 200.0))
        for operation in ("DeallocatePodIP", "AllocatePodIP")
        for level in (32, 1)
    }
    table = rows(tables.cpu_table(series))
    assert table[2] == ["AllocatePodIP", "1", "300", "200", "1.50"]
    assert [row[:2] for row in table[3:]] == [
        ["AllocatePodIP", "32"],
        ["DeallocatePodIP", "1"],
        ["DeallocatePodIP", "32"],
    ]


def test_plugins_that_were_not_there_have_no_rows() -> None:
    series = {
        "cni/metis interpreter/wall_ms": [8.0],
        "cni/metis/ADD/wall_ms": [12.0],
        "cni/metis/ADD/cpu_ms": [9.0],
        "cni/metis/ADD/daemon_cpu_ms": [1.0],
    }
    table = rows(tables.cni_table(series))
    assert table[3] == ["metis ADD", "12.0", "9.00", "1.50", "-", "1.00"]
    assert not any("self-contained" in row[0] for row in table)


def test_layers_have_their_share_of_a_call() -> None:
    series = {"profile/server_cpu_us": [200.0], "profile/SQL/share": [0.25]}
    table = rows(tables.profile_table(series))
    assert ["SQL", "25%", "50.0"] in table
    assert ["Trio", "-", "-"] in table


def test_the_page_has_a_place_for_every_part_and_no_other() -> None:
    parts = tables.page_parts({}, "a machine")
    assert sorted(markers.parts(PAGE.read_text())) == sorted(parts)


def test_the_page_tells_what_is_recorded() -> None:
    recorded = record.read(record.RECORDED)
    if not recorded.series:
        pytest.skip("only what the guard compares with is recorded yet")
    page = PAGE.read_text()
    parts = tables.page_parts(recorded.series, in_words(recorded.machine))
    assert markers.replaced(page, parts) == page
