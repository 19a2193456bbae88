"""Who is gone, from what a node shows; and that no lie frees an owner that lives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metis.model import Family, Holding, Owner, Pod
from metis.verdicts import (
    LONGEST_SHOWN,
    Evidence,
    Namespaces,
    Sandboxes,
    Verdict,
    judge,
)

GRACE_MS = 300_000
NOW = 1_700_000_000_000
OLD = NOW - GRACE_MS
PATH = "/run/netns/a"

HOLDING = Holding(
    Owner("default", "c1", "eth0"),
    Pod("web-0", "shop"),
    Family.IPV4,
    "10.1.0.2",
    "id-1",
    OLD,
    "boot-1",
    PATH,
)

SHOWS_NOTHING = Evidence(NOW, "boot-1")
IS_THERE = Namespaces(present=frozenset({PATH}))
IS_MISSING = Namespaces(missing=frozenset({PATH}))
NAMED = Sandboxes(named=frozenset({"c1", "c2"}))
UNKNOWN = Sandboxes(named=frozenset({"c2"}), unknown=frozenset({"c1"}))


def verdict(
    namespaces: Namespaces = SHOWS_NOTHING.namespaces,
    sandboxes: Sandboxes = SHOWS_NOTHING.sandboxes,
    **changes: object,
) -> Verdict:
    holding = replace(HOLDING, **changes)  # type: ignore[arg-type]  # any field of a holding
    return judge(holding, Evidence(NOW, "boot-1", namespaces, sandboxes), GRACE_MS)


def test_an_owner_of_another_boot_is_gone_without_signs_of_life() -> None:
    assert verdict(boot_id="boot-0") == Verdict(True, "the node was rebooted since")
    assert not verdict(boot_id="").gone
    assert not verdict(IS_THERE, boot_id="boot-0").gone
    assert not verdict(sandboxes=NAMED, boot_id="boot-0").gone
    assert not verdict(boot_id="boot-0", allocated_at=NOW - 1).gone
    assert not judge(HOLDING, Evidence(NOW, ""), GRACE_MS).gone


def test_a_missing_namespace_is_proof_where_its_directory_is_seen() -> None:
    assert verdict(IS_MISSING) == Verdict(True, f"its network namespace {PATH} is gone")
    hidden = Namespaces(untold={PATH: "its directory is empty"})
    kept = verdict(hidden, Sandboxes(silence="no CRI socket is configured"))
    assert kept == Verdict(
        False,
        f"no evidence: its network namespace {PATH} tells nothing (its directory is "
        "empty); no CRI socket is configured",
    )


def test_what_the_runtime_does_not_know_is_gone_where_the_namespace_is_silent() -> None:
    assert verdict(Namespaces(), UNKNOWN, netns_path="") == Verdict(
        True, "the runtime has no such container"
    )
    assert verdict(Namespaces(untold={PATH: "?"}), UNKNOWN).gone


def test_a_list_alone_frees_nobody() -> None:
    short = Sandboxes(named=frozenset({"c2"}))
    kept = verdict(Namespaces(), short, netns_path="")
    assert not kept.gone
    assert "did not say that it is gone" in kept.reason


def test_a_silent_runtime_frees_nobody_though_it_said_so() -> None:
    assert not verdict(Namespaces(), replace(UNKNOWN, silence="?"), netns_path="").gone


def test_a_container_without_a_pod_namespace_is_none_of_the_cri_s() -> None:
    kept = verdict(Namespaces(), UNKNOWN, netns_path="", pod=Pod("box"))
    assert not kept.gone
    assert "no pod namespace" in kept.reason


@pytest.mark.parametrize(
    ("namespaces", "sandboxes"),
    [(IS_THERE, UNKNOWN), (IS_MISSING, NAMED), (IS_THERE, NAMED)],
)
def test_any_sign_of_life_keeps(namespaces: Namespaces, sandboxes: Sandboxes) -> None:
    assert not verdict(namespaces, sandboxes).gone


@pytest.mark.parametrize(
    ("allocated_at", "gone"),
    [
        (OLD, True),
        (OLD + 1, False),
        (NOW - 1, False),
        (NOW, False),
        (NOW + 1, False),
        (0, True),
    ],
)
def test_within_the_grace_period_and_after_the_look_nobody_is_gone(
    allocated_at: int, gone: bool
) -> None:
    assert verdict(IS_MISSING, UNKNOWN, allocated_at=allocated_at).gone is gone


def test_without_a_grace_period_what_came_with_the_look_is_kept() -> None:
    for allocated_at, gone in ((NOW - 1, True), (NOW, False), (NOW + 1, False)):
        holding = replace(HOLDING, allocated_at=allocated_at)
        evidence = Evidence(NOW, "boot-1", IS_MISSING)
        assert judge(holding, evidence, grace_ms=0).gone is gone


def test_a_reason_has_no_room_for_a_path_without_end() -> None:
    path = "/run/netns/" + "n" * 4000
    gone = verdict(Namespaces(missing=frozenset({path})), netns_path=path)
    assert gone.gone
    assert len(gone.reason) < LONGEST_SHOWN + 100


# A node with its truth, and evidence of it that may lie.


@dataclass(frozen=True)
class Truth:
    """An owner as it really is.

    Attributes:
      holding: what the database has of it.
      lives: whether its container exists.
      is_listed: whether the runtime has it in its records already.
    """

    holding: Holding
    lives: bool
    is_listed: bool


@st.composite
def truths(draw: st.DrawFn) -> list[Truth]:
    found = []
    for number in range(draw(st.integers(1, 6))):
        lives = draw(st.booleans())
        is_young = draw(st.booleans())
        is_pod = draw(st.booleans())
        age_ms = draw(
            st.integers(-5, GRACE_MS - 1)
            if is_young
            else st.integers(GRACE_MS, 10 * GRACE_MS)
        )
        path = draw(
            st.sampled_from(
                [
                    "",
                    f"/run/netns/n{number}",
                    f"/hidden/netns/n{number}",
                    f"/proc/{number}/ns/net",
                ]
            )
        )
        holding = Holding(
            Owner("default", f"c{number}", "eth0"),
            Pod("pod", "ns" if is_pod else ""),
            Family.IPV4,
            f"10.1.0.{number}",
            f"id-{number}",
            NOW - age_ms,
            draw(st.sampled_from(["", "boot-1"])),
            path,
        )
        # A runtime lists a container some time after it got its address.
        is_listed = lives and is_pod and (not is_young or draw(st.booleans()))
        found.append(Truth(holding, lives, is_listed))
    return found


def namespaces_of(found: Sequence[Truth], unreadable: Sequence[str]) -> Namespaces:
    """What is seen of the namespaces, where some directories cannot be read."""
    present: set[str] = set()
    missing: set[str] = set()
    untold: dict[str, str] = {}
    for one in found:
        path = one.holding.netns_path
        if not path:
            continue
        if path.startswith(("/proc/", *unreadable)):
            untold[path] = "?"
        else:
            (present if one.lives else missing).add(path)
    return Namespaces(frozenset(present), frozenset(missing), untold)


@st.composite
def sandboxes_of(draw: st.DrawFn, found: Sequence[Truth]) -> Sandboxes:
    """A list with any lie about it, and answers by name that are true or none."""
    if draw(st.booleans()):
        return Sandboxes(silence="?")
    ids = [one.holding.owner.container_id for one in found if one.is_listed]
    stale = [f"former-{number}" for number in range(draw(st.integers(0, 3)))]
    told = draw(st.permutations(ids + stale))
    told = told[: draw(st.integers(0, len(told)))]  # cut
    told += told[: draw(st.integers(0, 2))]  # and with some twice
    unknown = {
        one.holding.owner.container_id
        for one in found
        if not one.is_listed and draw(st.booleans())
    }
    return Sandboxes(frozenset(told), frozenset(unknown), "" if told else "empty")


@given(st.data())
@settings(max_examples=500, deadline=None)
def test_no_combination_of_lies_frees_an_owner_that_lives(data: st.DataObject) -> None:
    found = data.draw(truths())
    unreadable = data.draw(
        st.lists(st.sampled_from(["/run/", "/hidden/"]), unique=True)
    )
    evidence = Evidence(
        NOW,
        data.draw(st.sampled_from(["", "boot-1"])),
        namespaces_of(found, unreadable),
        data.draw(sandboxes_of(found)),
    )
    for one in found:
        if one.lives:
            assert not judge(one.holding, evidence, GRACE_MS).gone, one


@given(truths())
@settings(deadline=None)
def test_on_an_honest_node_every_lost_pod_is_found(found: list[Truth]) -> None:
    evidence = Evidence(
        NOW,
        "boot-1",
        namespaces_of(found, ["/hidden/"]),
        Sandboxes(
            frozenset({"another"}),
            frozenset(
                one.holding.owner.container_id for one in found if not one.is_listed
            ),
        ),
    )
    for one in found:
        is_old = NOW - one.holding.allocated_at >= GRACE_MS
        is_seen = one.holding.pod.namespace or one.holding.netns_path.startswith("/run")
        expected = not one.lives and is_old and bool(is_seen)
        assert judge(one.holding, evidence, GRACE_MS).gone is expected, one
