"""The list that a GC brings: absent is not empty, and half of it is none."""

from __future__ import annotations

from typing import Any

import pytest

from metis.cni.attachments import MAX_REPORTED, valid_attachments
from metis.cni.protocol import CNIError
from tests.cni.calls import config, request

C1 = {"containerID": "c1", "ifname": "eth0"}
C2 = {"containerID": "c2", "ifname": "net1"}
NEW, OLD = "cni.dev/valid-attachments", "cni.dev/attachments"


def staying(fields: dict[str, Any]) -> set[tuple[str, str]]:
    found = valid_attachments(fields)
    assert found is not None
    return set(found)


def refused(fields: dict[str, Any]) -> CNIError:
    with pytest.raises(CNIError) as caught:
        valid_attachments(fields)
    assert caught.value.code == 7
    assert "nothing was freed" in caught.value.details
    return caught.value


@pytest.mark.parametrize("fields", [{}, {NEW: None}, {OLD: None}, {"attachments": []}])
def test_without_a_list_nothing_is_known(fields: dict[str, Any]) -> None:
    assert valid_attachments(fields) is None


@pytest.mark.parametrize("fields", [{NEW: []}, {OLD: []}, {NEW: [], OLD: None}])
def test_an_empty_list_says_that_nothing_stays(fields: dict[str, Any]) -> None:
    assert staying(fields) == set()


@pytest.mark.parametrize("key", [NEW, OLD])
def test_both_keys_are_read(key: str) -> None:
    assert staying({key: [C1, C2, C1 | {"extra": 1}]}) == {
        ("c1", "eth0"),
        ("c2", "net1"),
    }


def test_what_stands_under_either_key_stays() -> None:
    assert staying({NEW: [C1], OLD: [C2]}) == {
        ("c1", "eth0"),
        ("c2", "net1"),
    }
    assert staying({NEW: [], OLD: [C2]}) == {("c2", "net1")}


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ("c1", "[1] is a text"),
        (None, "[1] is null"),
        ([], "[1] is a list"),
        ({}, "[1].containerID is None"),
        ({"containerID": "", "ifname": "eth0"}, "[1].containerID is ''"),
        ({"containerID": "c/1", "ifname": "eth0"}, "[1].containerID is 'c/1'"),
        ({"containerID": "c1\n", "ifname": "eth0"}, "[1].containerID is 'c1\\n'"),
        ({"containerID": 1, "ifname": "eth0"}, "[1].containerID is 1"),
        ({"containerID": "c1"}, "[1].ifname is None"),
        ({"containerID": "c1", "ifname": ""}, "[1].ifname is ''"),
        ({"containerID": "c1", "ifname": "é" * 8}, "[1].ifname is "),
        ({"containerID": "c1", "ifname": "\ud800"}, "[1].ifname is "),
        ({"containerid": "c1", "ifname": "eth0"}, "[1].containerID is None"),
    ],
)
@pytest.mark.parametrize("key", [NEW, OLD])
def test_an_entry_that_cannot_be_read_stops_the_collection(
    entry: object, named: str, key: str
) -> None:
    assert f"{key}{named}" in refused({key: [C1, entry]}).message


@pytest.mark.parametrize("value", [{}, "", 0, False, "c1"])
def test_a_list_that_is_none_stops_the_collection(value: object) -> None:
    assert f"{OLD} is " in refused({NEW: [C1], OLD: value}).message


def test_all_malformed_entries_are_reported_together() -> None:
    message = refused({NEW: [1, C1, {}], OLD: ["x"]}).message
    for place in (f"{NEW}[0]", f"{NEW}[2]", f"{OLD}[0]"):
        assert place in message
    message = refused({NEW: [None] * 100}).message
    assert message.endswith(f"and {100 - MAX_REPORTED} more")


def test_gc_alone_reads_them() -> None:
    broken = {**config("1.1.0"), NEW: "?"}
    for command in ("ADD", "DEL", "STATUS"):
        assert request(command, broken).attachments is None
    read = request("GC", {**config("1.1.0"), NEW: [C1]})
    assert read.attachments == frozenset({("c1", "eth0")})
    assert read.note == ""
    assert "no list" in request("GC", config("1.1.0")).note
