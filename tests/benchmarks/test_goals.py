from __future__ import annotations

import pytest

from benchmarks.goals import GOALS, Goal, figure
from benchmarks.series import Quantity

MOST = Goal("memory", Quantity("rss"), 36.0, unit="MiB")
LEAST = Goal("rate", Quantity("ours", "theirs"), 0.9, at_least=True)


@pytest.mark.parametrize(
    ("goal", "value", "verdict"),
    [
        (MOST, 36.0, "met"),
        (MOST, 36.001, "not met, by 0.1%"),
        (MOST, 45.0, "not met, by 25.0%"),
        (MOST, 720.0, "not met, 20.0 times the limit"),
        (MOST, None, "not measured"),
        (LEAST, 0.9, "met"),
        (LEAST, 1.5, "met"),
        (LEAST, 0.45, "not met, by 50.0%"),
    ],
)
def test_the_verdict_says_by_how_much(
    goal: Goal, value: float | None, verdict: str
) -> None:
    assert goal.verdict(value) == verdict


def test_a_row_tells_goal_limit_figure_and_verdict() -> None:
    assert MOST.row({"rss": [40.0, 30.0, 31.0]}) == [
        "memory",
        "at most 36.0 MiB",
        "31.0 MiB",
        "met",
    ]
    assert LEAST.row({}) == ["rate", "at least 0.90", "-", "not measured"]


def test_every_goal_has_a_name_of_its_own() -> None:
    names = [goal.what for goal in GOALS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("value", "text"), [(0.904, "0.90"), (36.04, "36.0"), (12345.6, "12,346")]
)
def test_figures_have_the_digits_that_count(value: float, text: str) -> None:
    assert figure(value) == text
