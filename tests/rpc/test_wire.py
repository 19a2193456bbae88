"""`metis.rpc.wire`: protobuf as Google's own library has it, and no laxer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import betterproto2
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from metis.api.adaptiveipam.v1 import AllocatePodIpRequest, IpConfig
from metis.api.admin.v1 import AdminTableDumpResponse, Row
from metis.api.google.rpc import ErrorInfo, Status
from metis.api.grpc.health.v1 import (
    HealthCheckResponse,
    HealthCheckResponseServingStatus,
)
from metis.rpc.wire import decode, encode

text = st.text(max_size=8)
configs = st.builds(
    IpConfig, interface_name=text, container_id=text, initial_pod_cidr=text
)
messages = st.one_of(
    st.builds(
        AllocatePodIpRequest,
        network=text,
        ipv4_config=st.none() | configs,
        ipv6_config=st.none() | configs,
        pod_namespace=text,
    ),
    st.builds(ErrorInfo, reason=text, metadata=st.dictionaries(text, text, max_size=3)),
    st.builds(Status, code=st.integers(-(2**31), 2**31 - 1), message=text),
    st.builds(
        HealthCheckResponse, status=st.sampled_from(HealthCheckResponseServingStatus)
    ),
    st.builds(
        AdminTableDumpResponse,
        headers=st.lists(text, max_size=3),
        rows=st.lists(st.builds(Row, values=st.lists(text, max_size=3)), max_size=3),
    ),
)


@given(messages)
def test_betterproto2_and_we_read_what_the_other_writes(
    message: betterproto2.Message,
) -> None:
    assert type(message).parse(encode(message)) == message
    assert decode(encode(message), type(message)) == message
    assert decode(bytes(message), type(message)) == message


# every kind of field, against Google's library

SCALARS: dict[str, st.SearchStrategy[Any]] = {
    # 0.0 + -0.0 is 0.0: betterproto2 takes -0.0 for the default, and so do we
    "double": st.floats(allow_nan=False).map(lambda value: value + 0.0),
    "float": st.floats(allow_nan=False, width=32).map(lambda value: value + 0.0),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "uint64": st.integers(0, 2**64 - 1),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "fixed64": st.integers(0, 2**64 - 1),
    "fixed32": st.integers(0, 2**32 - 1),
    "bool": st.booleans(),
    "string": text,
    "bytes": st.binary(max_size=8),
    "uint32": st.integers(0, 2**32 - 1),
    "sfixed32": st.integers(-(2**31), 2**31 - 1),
    "sfixed64": st.integers(-(2**63), 2**63 - 1),
    "sint32": st.integers(-(2**31), 2**31 - 1),
    "sint64": st.integers(-(2**63), 2**63 - 1),
}


def our_class() -> Any:
    """A message with each scalar once single, once optional and once as a list."""
    namespace: dict[str, Any] = {"__annotations__": {}}
    for number, kind in enumerate(SCALARS, start=1):
        for name, field in (
            (f"one_{kind}", betterproto2.field(number, kind)),
            (f"maybe_{kind}", betterproto2.field(100 + number, kind, optional=True)),
            (f"many_{kind}", betterproto2.field(200 + number, kind, repeated=True)),
        ):
            namespace[name] = field
            namespace["__annotations__"][name] = "object"
    made = type("Everything", (betterproto2.Message,), namespace)
    return dataclass(eq=False, repr=False)(made)


def google_class() -> Any:
    """The same for Google's library."""
    proto = descriptor_pb2.DescriptorProto(name="Everything")
    for number, kind in enumerate(SCALARS, start=1):
        code = getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{kind.upper()}")
        proto.field.add(name=f"one_{kind}", number=number, type=code, label=1)
        proto.oneof_decl.add(name=f"_maybe_{kind}")
        proto.field.add(
            name=f"maybe_{kind}",
            number=100 + number,
            type=code,
            label=1,
            proto3_optional=True,
            oneof_index=number - 1,
        )
        proto.field.add(name=f"many_{kind}", number=200 + number, type=code, label=3)
    file = descriptor_pb2.FileDescriptorProto(
        name="everything.proto", syntax="proto3", message_type=[proto]
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Everything"))


OURS, GOOGLES = our_class(), google_class()

everything = st.fixed_dictionaries(
    {},
    optional={
        name: strategy
        for kind, value in SCALARS.items()
        for name, strategy in (
            (f"one_{kind}", value),
            (f"maybe_{kind}", value),
            (f"many_{kind}", st.lists(value, min_size=1, max_size=3)),
        )
    },
)


@given(everything)
def test_every_kind_of_field_is_what_googles_library_reads_and_writes(
    values: dict[str, Any],
) -> None:
    google = GOOGLES(**values)
    read = GOOGLES.FromString(encode(OURS(**values)))
    assert read == google
    ours = decode(google.SerializeToString(), OURS)
    for name, value in values.items():
        if name.startswith("maybe_") or value:
            assert getattr(ours, name) == value
    assert ours == OURS(**values)


def test_a_list_of_numbers_may_be_packed_or_not() -> None:
    number = 200 + list(SCALARS).index("uint32") + 1
    packed = bytes([number << 3 & 0x7F | 2 | 0x80, number >> 4, 2, 1, 2])
    single = b"".join(
        bytes([number << 3 & 0x7F | 0x80, number >> 4, value]) for value in (1, 2)
    )
    for data in (packed, single, packed + single):
        assert decode(data, OURS).many_uint32 == [1, 2] * (len(data) // 5 or 1)


# what is refused


@given(messages, st.data())
def test_no_message_that_is_cut_inside_a_field_is_taken(
    message: betterproto2.Message, data: st.DataObject
) -> None:
    whole = encode(message)
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    try:
        taken = decode(cut, type(message))
    except ValueError:
        return
    # it was cut between two fields: what is left is a message of its own
    assert encode(taken) == cut


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
        (b"\x80\x80\x80\x80\x10\x01", "no field 536870912"),
        (b"\x98\x06" + b"\xff" * 11, "longer than 64 bits"),
        (b"\x9d\x06\0\0\0", "field 99 is cut off"),
        (b"\x99\x06\0\0\0\0\0\0\0", "field 99 is cut off"),
        (b"\x0a\x01\xff", "invalid start byte"),
    ],
)
def test_what_no_encoder_writes_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        decode(data, AllocatePodIpRequest)


@given(st.binary(max_size=60), st.sampled_from([AllocatePodIpRequest, ErrorInfo, OURS]))
def test_any_bytes_are_a_message_or_a_value_error(data: bytes, kind: type[Any]) -> None:
    try:
        message = decode(data, kind)
    except ValueError:
        return
    assert isinstance(message, kind)


def test_fields_of_a_newer_peer_are_passed_over() -> None:
    newer = b"\x9a\x06\x01x" + b"\x98\x06\x05" + b"\x9d\x06\0\0\0\0"
    assert decode(b"\x0a\x01a" + newer, AllocatePodIpRequest).network == "a"


def test_an_empty_message_is_there_and_an_absent_one_is_not() -> None:
    assert encode(AllocatePodIpRequest(ipv4_config=IpConfig())) == b"\x12\x00"
    request = decode(b"\x12\x00", AllocatePodIpRequest)
    assert request.ipv4_config == IpConfig()
    assert request.ipv6_config is None


@pytest.mark.parametrize(
    "message",
    [
        AllocatePodIpRequest(network=5),  # type: ignore[arg-type]
        AllocatePodIpRequest(network="\ud800"),
        AllocatePodIpRequest(ipv4_config="text"),  # type: ignore[arg-type]
        Status(code=2**70),
    ],
)
def test_a_value_of_the_wrong_kind_is_not_encoded(
    message: betterproto2.Message,
) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError)):
        encode(message)


def test_what_the_encoding_lacks_is_refused_by_name() -> None:
    field = betterproto2.field(1, betterproto2.TYPE_STRING, group="either")
    namespace = {"__annotations__": {"choice": "str | None"}, "choice": field}
    made = type("Choice", (betterproto2.Message,), namespace)
    choice: Any = dataclass(eq=False, repr=False)(made)
    with pytest.raises(TypeError, match=r"Choice\.choice is part of a oneof"):
        encode(choice())
