from __future__ import annotations

import pytest

from benchmarks.series import Quantity, Rounds, median_of, spread


def test_a_ratio_is_taken_round_by_round_and_its_median_counts() -> None:
    # The medians are 20 and 10; the machine was slow in the second round only.
    series = {"a": [20.0, 90.0, 19.0], "b": [10.0, 30.0, 10.0]}
    assert Quantity("a", "b").rounds(series) == [2.0, 3.0, 1.9]
    assert Quantity("a", "b").value(series) == 2.0


def test_what_was_not_measured_has_no_value() -> None:
    series = {"a": [1.0]}
    assert Quantity("b").value(series) is None
    assert Quantity("a", "b").value(series) is None
    assert Quantity("b", "a").value(series) is None
    assert median_of(series, "a") == 1.0


def test_a_ratio_of_rounds_that_do_not_belong_together_is_refused() -> None:
    with pytest.raises(ValueError, match="a has 2 rounds and b 3"):
        Quantity("a", "b").rounds({"a": [1, 2], "b": [1, 2, 3]})


def test_rounds_are_kept_in_their_order() -> None:
    rounds = Rounds()
    rounds.add("a", 1.0)
    rounds.extend({"a": [2.0, 3.0], "b": [4.0]})
    assert rounds == {"a": [1.0, 2.0, 3.0], "b": [4.0]}


def test_the_spread_is_a_part_of_the_median() -> None:
    assert spread([9.0, 10.0, 11.0]) == pytest.approx(0.2)
