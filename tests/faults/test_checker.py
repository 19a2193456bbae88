"""The checker itself: faults that are planted are seen, and nothing else is."""

from __future__ import annotations

import pytest

from tests.faults.checker import Call, History, Outcome, Owner, judge, judge_rows

COOLDOWN = 10.0
A, B = "10.0.0.2", "10.0.0.3"


def owner(name: str, network: str = "pods") -> Owner:
    return Owner(network, name, "eth0")


def history(*calls: tuple[str, str, float, float, str]) -> History:
    """Calls as (verb, container, began, ended, answer).

    The answer is an address, "ok", "nothing", or how the call ended else: "refused",
    "dead", "unknown". A GC names the containers that it kept in place of its own.
    """
    noted = History()
    for verb, name, began, ended, answer in calls:
        kept = frozenset(name.split()) if verb == "GC" else frozenset()
        who = owner("" if verb == "GC" else name)
        call = noted.begin(verb, who, began, kept)
        outcome = {"refused": Outcome.REFUSED, "dead": Outcome.DEAD}.get(answer)
        if answer == "unknown":
            outcome = Outcome.UNKNOWN
        addresses = [answer] if answer.startswith("10.") else []
        noted.end(call, outcome or Outcome.ANSWERED, ended, addresses)
    return noted


def broken(*calls: tuple[str, str, float, float, str]) -> list[str]:
    return [fault.rule for fault in judge(history(*calls), COOLDOWN)]


@pytest.mark.parametrize(
    "calls",
    [
        [
            ("ADD", "a", 0, 1, A),
            ("CHECK", "a", 2, 3, A),
            ("ADD", "a", 4, 5, A),
            ("DEL", "a", 6, 7, "ok"),
            ("CHECK", "a", 8, 9, "nothing"),
            ("ADD", "b", 16, 17, A),
        ],
        # Its own address comes back to an owner before the cooldown is over.
        [("ADD", "a", 0, 1, A), ("DEL", "a", 2, 3, "ok"), ("ADD", "a", 4, 5, A)],
        # Calls that were not answered may have been carried out, or not.
        [("ADD", "a", 0, 1, "dead"), ("ADD", "b", 2, 3, A), ("ADD", "a", 4, 5, B)],
        [("ADD", "a", 0, 1, A), ("DEL", "a", 2, 3, "dead"), ("ADD", "a", 4, 5, A)],
        [("ADD", "a", 0, 1, A), ("DEL", "a", 2, 3, "dead"), ("ADD", "b", 13, 14, A)],
        [("ADD", "a", 0, 1, A), ("DEL", "a", 2, 3, "unknown"), ("CHECK", "a", 4, 5, A)],
        [
            ("ADD", "a", 0, 1, A),
            ("DEL", "a", 2, 3, "unknown"),
            ("ADD", "a", 4, 5, A),
            ("CHECK", "a", 6, 7, "nothing"),
        ],
        # A GC takes what is not on its list, and what began after it stays.
        [("ADD", "a", 0, 1, A), ("GC", "b", 2, 3, "ok"), ("ADD", "b", 14, 15, A)],
        [("GC", "", 0, 3, "ok"), ("ADD", "a", 1, 2, A), ("CHECK", "a", 4, 5, A)],
        # A CHECK beside the ADD may come before it.
        [("ADD", "a", 0, 3, A), ("CHECK", "a", 1, 2, "nothing")],
    ],
)
def test_a_history_that_keeps_every_promise_is_let_pass(
    calls: list[tuple[str, str, float, float, str]],
) -> None:
    assert broken(*calls) == []


@pytest.mark.parametrize(
    ("rule", "calls"),
    [
        ("alone", [("ADD", "a", 0, 1, A), ("ADD", "b", 2, 3, A)]),
        ("alone", [("ADD", "a", 0, 3, A), ("ADD", "b", 1, 2, A)]),
        ("alone", [("ADD", "a", 0, 1, A), ("CHECK", "b", 2, 3, A)]),
        # The second owner asked before the first was answered, and got it after.
        ("alone", [("ADD", "b", 0, 9, A), ("ADD", "a", 1, 2, A)]),
        # A DEL that was refused took nothing away.
        (
            "alone",
            [
                ("ADD", "a", 0, 1, A),
                ("DEL", "a", 2, 3, "refused"),
                ("ADD", "b", 20, 21, A),
            ],
        ),
        # Nor does one that is dead make room before its cooldown.
        (
            "cooldown",
            [("ADD", "a", 0, 1, A), ("DEL", "a", 2, 3, "dead"), ("ADD", "b", 8, 9, A)],
        ),
        (
            "cooldown",
            [
                ("ADD", "a", 0, 1, A),
                ("DEL", "a", 2, 3, "ok"),
                ("ADD", "b", 11, 11.9, A),
            ],
        ),
        (
            "cooldown",
            [("ADD", "a", 0, 1, A), ("GC", "", 2, 3, "ok"), ("ADD", "b", 8, 9, A)],
        ),
        (
            "alone",
            [("ADD", "a", 0, 1, A), ("GC", "a", 2, 3, "ok"), ("ADD", "b", 20, 21, A)],
        ),
    ],
)
def test_a_double_owner_and_an_early_one_are_seen(
    rule: str, calls: list[tuple[str, str, float, float, str]]
) -> None:
    assert rule in broken(*calls)


@pytest.mark.parametrize(
    "calls",
    [
        [("ADD", "a", 0, 1, A), ("CHECK", "a", 2, 3, "nothing")],
        [("ADD", "a", 0, 1, A), ("ADD", "a", 2, 3, B)],
        [("ADD", "a", 0, 2, A), ("ADD", "a", 1, 3, B)],
        [("ADD", "a", 0, 1, A), ("CHECK", "a", 2, 3, B)],
        [
            ("ADD", "a", 0, 1, A),
            ("GC", "a", 2, 3, "ok"),
            ("CHECK", "a", 4, 5, "nothing"),
        ],
        # A dead call does no harm after it died.
        [
            ("ADD", "a", 0, 1, A),
            ("DEL", "a", 2, 3, "dead"),
            ("CHECK", "a", 4, 5, A),
            ("CHECK", "a", 6, 7, "nothing"),
        ],
    ],
)
def test_a_lost_and_a_changed_address_are_seen(
    calls: list[tuple[str, str, float, float, str]],
) -> None:
    assert broken(*calls) == ["stays"]


@pytest.mark.parametrize(
    "calls",
    [
        [
            ("ADD", "a", 0, 1, A),
            ("DEL", "a", 2, 3, "ok"),
            ("CHECK", "a", 4, 5, A),
        ],
        # An ADD that began before the DEL and was carried out after it.
        [
            ("ADD", "a", 0, 1, "unknown"),
            ("DEL", "a", 2, 3, "ok"),
            ("CHECK", "a", 4, 5, A),
        ],
        [("ADD", "a", 0, 1, A), ("GC", "", 2, 3, "ok"), ("CHECK", "a", 4, 5, A)],
    ],
)
def test_what_is_held_though_it_was_deleted_is_seen(
    calls: list[tuple[str, str, float, float, str]],
) -> None:
    assert "gone" in broken(*calls)


LEFT = [
    ("ADD", "held", 0, 1, A),
    ("ADD", "gone", 0, 1, B),
    ("DEL", "gone", 2, 3, "ok"),
    ("ADD", "refused", 2, 3, "refused"),
    ("ADD", "nobody knows", 2, 3, "dead"),
]


@pytest.mark.parametrize(
    ("held", "count"),
    [
        ({"held": {A}}, 0),
        ({"held": {A}, "nobody knows": {B}}, 0),
        ({}, 1),
        ({"held": {B}}, 1),
        ({"held": {A}, "gone": {B}}, 1),
        ({"held": {A}, "refused": {B}}, 1),
        ({"held": {A}, "unheard of": {B}}, 1),
        ({"held": {A}, "nobody knows": {B, "10.0.0.4"}}, 1),
    ],
)
def test_a_database_that_differs_from_what_was_promised_is_seen(
    held: dict[str, set[str]], count: int
) -> None:
    rows = {owner(name): addresses for name, addresses in held.items()}
    assert len(judge_rows(history(*LEFT), rows)) == count


def test_half_of_a_dual_stack_allocation_is_seen() -> None:
    noted = history(("ADD", "a", 0, 1, "dead"))
    families = {"pods": 2}
    assert judge_rows(noted, {owner("a"): {A, "fd00::2"}}, families) == []
    assert len(judge_rows(noted, {owner("a"): {A}}, families)) == 1


def test_the_same_address_on_two_networks_is_two_addresses() -> None:
    noted = History()
    for network in ("one", "two"):
        call = noted.begin("ADD", owner("a", network), 0)
        noted.end(call, Outcome.ANSWERED, 1, [A])
    assert judge(noted, COOLDOWN) == []


def test_a_call_that_ends_twice_is_a_fault_of_the_bench() -> None:
    noted = History()
    call: Call = noted.begin("ADD", owner("a"), 0)
    noted.end(call, Outcome.DEAD, 1)
    with pytest.raises(AssertionError):
        noted.end(call, Outcome.ANSWERED, 2, [A])
