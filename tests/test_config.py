"""Durations as Go writes them, and a config that checks itself."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metis.config import (
    LAST_UID,
    LONGEST_DURATION,
    SYNCHRONOUS_LEVELS,
    DaemonConfig,
    parse_duration,
)
from metis.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("0s", 0),
        ("1m", 60),
        ("500ms", 0.5),
        ("5h", 18_000),
        ("1h30m", 5_400),
        ("1.5s", 1.5),
        (".5s", 0.5),
        ("2.s", 2),
        ("1h1m1s1ms", 3_661.001),
        ("10us", 1e-5),
        ("10µs", 1e-5),
        ("10μs", 1e-5),
        ("10ns", 1e-8),
    ],
)
def test_a_duration_of_go_is_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "s",
        "1 s",
        "-1s",
        "+1s",
        "1m 30s",
        "1.5.5s",
        "1d",
        "x1s",
        "1sx",
        "1s2",
        ".",
    ],
)
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_duration(text)
    assert repr(text) in str(caught.value)
    assert "'1h30m'" in str(caught.value)


def test_a_duration_is_no_longer_than_go_s_longest() -> None:
    assert parse_duration("2562047h") <= LONGEST_DURATION
    with pytest.raises(InvalidRequest, match=r"'2562048h' is too long .* '2562047h'"):
        parse_duration("2562048h")


@given(
    st.lists(
        st.tuples(
            st.integers(0, 10_000),
            st.sampled_from([("h", 3600), ("m", 60), ("s", 1), ("ms", 0.001)]),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_the_parts_of_a_duration_add_up(
    parts: list[tuple[int, tuple[str, float]]],
) -> None:
    text = "".join(f"{number}{unit}" for number, (unit, _) in parts)
    expected = sum(number * seconds for number, (_, seconds) in parts)
    assert parse_duration(text) == pytest.approx(expected)


@given(st.text(alphabet="0123456789.hmsun µ-", max_size=12))
def test_any_text_is_a_duration_or_refused(text: str) -> None:
    try:
        seconds = parse_duration(text)
    except InvalidRequest:
        return
    assert 0 <= seconds <= LONGEST_DURATION


def test_the_defaults_are_those_of_the_original() -> None:
    config = DaemonConfig()
    assert config.db_path == "/var/lib/cni/metis/metis.sqlite"
    assert config.socket_path == "/var/lib/cni/metis/metis-adaptive-ipam.sock"
    assert config.release_cooldown == parse_duration("1m")
    assert config.monitor_interval == parse_duration("2s")
    assert config.draining_expiration == parse_duration("5h")
    assert config.sustained_low_utilization_duration == parse_duration("8h")
    assert config.synchronous == "NORMAL"


def test_a_config_is_frozen() -> None:
    config = DaemonConfig()
    with pytest.raises(FrozenInstanceError):
        config.db_path = "x"  # type: ignore[misc]  # that it is refused is the point


@pytest.mark.parametrize("name", ["db_path", "socket_path"])
@pytest.mark.parametrize("path", ["", "a\0b"])
def test_a_path_must_be_one(name: str, path: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} is .* must be a file path"):
        DaemonConfig(**{name: path})  # type: ignore[arg-type]  # by name, to try each


@pytest.mark.parametrize(
    "name",
    [
        "release_cooldown",
        "monitor_interval",
        "draining_expiration",
        "sustained_low_utilization_duration",
        "shutdown_grace",
        "reclaim_interval",
        "reclaim_grace",
    ],
)
@pytest.mark.parametrize("seconds", [-0.001, 1e10, math.inf, math.nan])
def test_a_time_must_be_a_number_of_seconds(name: str, seconds: float) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} is .* seconds from 0 up"):
        DaemonConfig(**{name: seconds})  # type: ignore[arg-type]  # as above
    assert getattr(DaemonConfig(**{name: 0}), name) == 0  # type: ignore[arg-type]  # as above


def test_users_are_numbers() -> None:
    assert DaemonConfig().allow_uids == ()
    assert DaemonConfig(allow_uids=(0, 1001, LAST_UID)).allow_uids == (
        0,
        1001,
        LAST_UID,
    )


@pytest.mark.parametrize("uid", [-1, LAST_UID + 1, True, 1.0, "1001", "alice"])
def test_what_is_no_uid_is_refused(uid: object) -> None:
    with pytest.raises(
        InvalidRequest, match=f"allow_uids has {uid!r}: write the number"
    ):
        DaemonConfig(allow_uids=(1001, uid))  # type: ignore[arg-type]  # the test


@pytest.mark.parametrize("level", SYNCHRONOUS_LEVELS)
def test_a_level_of_sqlite_is_taken(level: str) -> None:
    assert DaemonConfig(synchronous=level).synchronous == level


@pytest.mark.parametrize("level", ["", "normal", "OFF"])
def test_another_level_is_refused(level: str) -> None:
    with pytest.raises(InvalidRequest, match="one of NORMAL, FULL"):
        DaemonConfig(synchronous=level)


@pytest.mark.parametrize("limit", [-1, 1.5, True, "9"])
def test_a_limit_is_a_number_of_addresses(limit: object) -> None:
    with pytest.raises(InvalidRequest, match=f"reclaim_limit is {limit!r}: it must"):
        DaemonConfig(reclaim_limit=limit)  # type: ignore[arg-type]  # that is the test
    assert DaemonConfig(reclaim_limit=0).reclaim_limit == 0


@pytest.mark.parametrize("path", ["containerd.sock", "unix:///run/c.sock", "/run/\0"])
def test_the_runtime_s_socket_is_an_absolute_path(path: str) -> None:
    with pytest.raises(InvalidRequest, match=r"cri_socket .* for example '/run/"):
        DaemonConfig(cri_socket=path)
    assert DaemonConfig(cri_socket="/run/c.sock").cri_socket == "/run/c.sock"


def test_the_directory_of_the_runtime_s_cache_is_a_path_or_empty() -> None:
    assert DaemonConfig().cni_cache_dir == "/var/lib/cni/results"
    assert DaemonConfig(cni_cache_dir="").cni_cache_dir == ""
    with pytest.raises(InvalidRequest, match="cni_cache_dir is"):
        DaemonConfig(cni_cache_dir="/a\0b")
