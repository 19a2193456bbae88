from __future__ import annotations

from collections.abc import Sequence, Set

import pytest

from benchmarks.guard import GUARDED, TRIES, Verdict, is_worse, judge, values
from benchmarks.series import Series

RECORDED = {guarded.name: 1.0 for guarded in GUARDED}
SUSPECT = GUARDED[0]


def series_with(suspect: float) -> Series:
    """Everything as recorded but the first quantity."""
    series: dict[str, Sequence[float]] = {}
    for guarded in GUARDED:
        series[guarded.quantity.under] = [2.0]
        series[guarded.quantity.over] = [2.0]
    series[SUSPECT.quantity.over] = [2.0 * suspect]
    return series


class Again:
    """Measures anew with values that were laid out, and notes what was asked for."""

    def __init__(self, *suspects: float) -> None:
        self.suspects = list(suspects)
        self.asked: list[Set[str]] = []

    def __call__(self, sections: Set[str]) -> Series:
        self.asked.append(sections)
        return series_with(self.suspects.pop(0))


def failed(verdicts: Sequence[Verdict]) -> list[str]:
    return [verdict.name for verdict in verdicts if not verdict.holds]


@pytest.mark.parametrize(
    ("measured", "worse"), [(0.5, False), (1.0, False), (1.2, False), (1.21, True)]
)
def test_a_fifth_more_is_worse_and_less_never_is(measured: float, worse: bool) -> None:
    assert is_worse(measured, 1.0) is worse


def test_what_is_as_recorded_holds_without_a_second_look() -> None:
    again = Again()
    assert not failed(judge(RECORDED, series_with(1.15), again))
    assert not again.asked


def test_noise_is_measured_again_and_its_best_counts() -> None:
    again = Again(1.6, 1.1)
    verdicts = judge(RECORDED, series_with(1.5), again)
    assert not failed(verdicts)
    assert again.asked == [{SUSPECT.section}] * 2
    assert verdicts[0].measured == pytest.approx(1.1)
    assert verdicts[0].measurements == 3


def test_what_stays_worse_fails_after_its_tries() -> None:
    again = Again(*[1.5] * TRIES)
    verdicts = judge(RECORDED, series_with(1.6), again)
    assert failed(verdicts) == [SUSPECT.name]
    assert len(again.asked) == TRIES
    assert verdicts[0].measured == pytest.approx(1.5)
    assert verdicts[0].row()[-1] == "WORSE"


def test_a_good_figure_beside_a_bad_one_is_not_replaced() -> None:
    verdicts = judge(RECORDED, series_with(1.6), Again(*[1.5] * TRIES))
    assert {verdict.measurements for verdict in verdicts[1:]} == {1}


def test_what_is_unknown_fails_instead_of_passing_unseen() -> None:
    measured = series_with(1.0)
    lacking = {
        name: rounds
        for name, rounds in measured.items()
        if name != SUSPECT.quantity.over
    }
    verdicts = judge(RECORDED, lacking, Again())
    assert failed(verdicts) == [SUSPECT.name]
    assert verdicts[0].row()[-1] == "not measured"
    verdicts = judge({**RECORDED, SUSPECT.name: 1.0} | {}, measured, Again())
    assert not failed(verdicts)
    unrecorded = {k: v for k, v in RECORDED.items() if k != SUSPECT.name}
    verdicts = judge(unrecorded, measured, Again())
    assert failed(verdicts) == [SUSPECT.name]
    assert verdicts[0].row()[-1] == "not recorded"


def test_every_guarded_quantity_is_a_ratio_of_what_neighbours_cannot_disturb() -> None:
    for guarded in GUARDED:
        for name in (guarded.quantity.over, guarded.quantity.under):
            figure = name.rpartition("/")[2]
            assert "cpu" in figure or figure == "rss_mib", name


def test_the_values_of_a_run_are_those_that_were_measured() -> None:
    only = {
        SUSPECT.quantity.over: [3.0, 4.0, 5.0],
        SUSPECT.quantity.under: [2.0, 2.0, 2.0],
    }
    assert values(only) == {SUSPECT.name: 2.0}
