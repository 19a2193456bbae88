from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.machine import in_words, machine
from benchmarks.settings import QUICK


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    made = record.of_run({"cpus": 2}, QUICK, {"a/b_ms": [1.0, 2.5]}, {"q": 0.75})
    file = tmp_path / "recorded.json"
    file.write_text(made.as_text())
    found = record.read(file)
    assert found.machine == {"cpus": 2}
    assert found.series == {"a/b_ms": [1.0, 2.5]}
    assert found.guard == {"q": 0.75}
    assert found.settings["rounds"] == QUICK.rounds


def test_a_figure_is_a_line_and_noise_is_cut() -> None:
    text = record.of_run({}, QUICK, {"b": [2.0], "a": [1.23456789, 4]}, {}).as_text()
    assert '  "a": [1.2346, 4.0],\n  "b": [2.0]\n' in text
    assert json.loads(text)["schema"] == record.SCHEMA


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "is missing: record it with"),
        ("", "is not a record"),
        ("[]", "is not a record"),
        ('{"schema": 1}', "is not a record"),
        (
            '{"schema": 0, "machine": {}, "settings": {}, "series": {}, "guard": {}}',
            "has schema 0",
        ),
    ],
)
def test_something_else_is_refused_with_what_to_do(
    tmp_path: Path, text: str | None, complaint: str
) -> None:
    file = tmp_path / "recorded.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        record.read(file)


def test_the_machine_is_told_without_names_and_paths() -> None:
    told = in_words(machine())
    assert "CPUs" in told
    assert "trio" in told
    assert platform.node() not in told.replace(",", "").split()
    assert str(Path.cwd()) not in told


def test_what_is_recorded_can_be_read() -> None:
    record.read(record.RECORDED)
