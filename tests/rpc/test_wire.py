"""`metis.rpc.wire`: protobuf bytes that betterproto2 would take for good."""

from __future__ import annotations

from dataclasses import dataclass

import betterproto2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metis.api.adaptiveipam.v1 import AllocatePodIpRequest, IpConfig
from metis.api.admin.v1 import AdminTableDumpResponse, Row
from metis.api.google.rpc import ErrorInfo, Status
from metis.rpc.wire import check_wire

PACKED = betterproto2.field(1, betterproto2.TYPE_UINT32, repeated=True)
FIXED = betterproto2.field(2, betterproto2.TYPE_FIXED32)
DOUBLE = betterproto2.field(3, betterproto2.TYPE_DOUBLE)


@dataclass(eq=False, repr=False)
class Numbers(betterproto2.Message):
    """Kinds of fields that the project's own messages do not have."""

    packed: list[int] = PACKED
    fixed: int = FIXED
    double: float = DOUBLE


text = st.text(max_size=8)
configs = st.builds(
    IpConfig, interface_name=text, container_id=text, initial_pod_cidr=text
)
messages = st.one_of(
    st.builds(AllocatePodIpRequest, network=text, ipv4_config=st.none() | configs),
    st.builds(ErrorInfo, reason=text, metadata=st.dictionaries(text, text, max_size=3)),
    st.builds(Status, code=st.integers(0, 2**31 - 1), message=text),
    st.builds(
        AdminTableDumpResponse,
        headers=st.lists(text, max_size=3),
        rows=st.lists(st.builds(Row, values=st.lists(text, max_size=3)), max_size=3),
    ),
    st.builds(
        Numbers,
        packed=st.lists(st.integers(0, 2**32 - 1), max_size=4),
        fixed=st.integers(0, 2**32 - 1),
        double=st.floats(allow_nan=False),
    ),
)


@given(messages)
def test_every_message_passes(message: betterproto2.Message) -> None:
    check_wire(bytes(message), type(message))


@given(messages, st.data())
def test_no_message_that_is_cut_inside_a_field_passes(
    message: betterproto2.Message, data: st.DataObject
) -> None:
    whole = bytes(message)
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    try:
        check_wire(cut, type(message))
    except ValueError:
        return
    # it was cut between two fields: what is left is a message of its own
    assert bytes(type(message).parse(cut)) == cut


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\x0a\x05abc", "field 1 is cut off"),
        (b"\x0a", "cut off"),
        (b"\x12\x04\x0a\x05ab", "field 1 is cut off"),
        (b"\x08\x05", r"field 1 \(network\) has wire type 0: it must be 2"),
        (b"\x15\0\0\0\0", r"field 2 \(ipv4_config\) has wire type 5"),
        (b"\x12\x02\x08\x05", r"field 1 \(interface_name\) has wire type 0"),
        (b"\x0b", "field 1 has the unknown wire type 3"),
        (b"\x00\x00", "no field 0"),
        (b"\xff", "cut off"),
        (b"\x98\x06" + b"\xff" * 11, "longer than 64 bits"),
        (b"\x9d\x06\0\0\0", "field 99 is cut off"),
        (b"\x99\x06\0\0\0\0\0\0\0", "field 99 is cut off"),
    ],
)
def test_what_no_encoder_writes_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_wire(data, AllocatePodIpRequest)


def test_fields_of_a_newer_peer_are_passed_over() -> None:
    newer = b"\x9a\x06\x01x" + b"\x98\x06\x05" + b"\x9d\x06\0\0\0\0"
    check_wire(b"\x0a\x01a" + newer, AllocatePodIpRequest)
    assert AllocatePodIpRequest.parse(b"\x0a\x01a" + newer).network == "a"


def test_a_list_of_numbers_may_be_packed_or_not() -> None:
    check_wire(b"\x0a\x02\x01\x02", Numbers)
    check_wire(b"\x08\x01\x08\x02", Numbers)
