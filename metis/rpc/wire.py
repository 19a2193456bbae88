"""A strict look at protobuf bytes before betterproto2 reads them.

Pure. betterproto2 takes a message that is cut off for a shorter one, and puts a
number into a text field when the bytes say so; a handler would then meet values
of types that cannot be. `check_wire` refuses such bytes, by the rules of the
protobuf encoding; whether texts are UTF-8 is for betterproto2 to find out.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import betterproto2

VARINT = betterproto2.WIRE_VARINT
FIXED64 = betterproto2.WIRE_FIXED_64
LENGTH = betterproto2.WIRE_LEN_DELIM
FIXED32 = betterproto2.WIRE_FIXED_32

WIRE_TYPES = {
    **dict.fromkeys(betterproto2.WIRE_VARINT_TYPES, VARINT),
    **dict.fromkeys(betterproto2.WIRE_FIXED_32_TYPES, FIXED32),
    **dict.fromkeys(betterproto2.WIRE_FIXED_64_TYPES, FIXED64),
    **dict.fromkeys(betterproto2.WIRE_LEN_DELIM_TYPES, LENGTH),
}
"""How each protobuf type is encoded."""

MAX_VARINT_BYTES = 10
"""Longest varint: 64 bits, seven a byte."""


class _Field(NamedTuple):
    name: str
    wire_types: frozenset[int]
    message_type: type[betterproto2.Message] | None


@functools.cache
def _fields(message_type: type[betterproto2.Message]) -> dict[int, _Field]:
    """The fields of a message type by number."""
    described: Any = message_type  # a dataclass, which the base class does not say
    # betterproto2 keeps the classes of message and map fields in this table alone
    classes = described._betterproto.cls_by_field  # noqa: SLF001
    fields = {}
    for field in dataclasses.fields(described):
        meta = betterproto2.FieldMetadata.get(field)
        wire_types = {WIRE_TYPES[meta.proto_type]}
        if meta.repeated and meta.proto_type in betterproto2.PACKED_TYPES:
            wire_types.add(LENGTH)
        nested = meta.proto_type in (betterproto2.TYPE_MESSAGE, betterproto2.TYPE_MAP)
        fields[meta.number] = _Field(
            field.name,
            frozenset(wire_types),
            classes[field.name] if nested and meta.unwrap is None else None,
        )
    return fields


def check_wire(data: bytes, message_type: type[betterproto2.Message]) -> None:
    """Check that the bytes are a whole message, with values of the right kinds.

    Unknown fields are passed over: they are of a newer peer.

    Raises:
      ValueError: what is wrong, and in which field.
    """
    _check(data, 0, len(data), message_type)


def _check(
    data: bytes, pos: int, end: int, message_type: type[betterproto2.Message]
) -> None:
    fields = _fields(message_type)
    while pos < end:
        tag, pos = _varint(data, pos, end)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == LENGTH:
            size, pos = _varint(data, pos, end)
            stop = pos + size
        elif wire_type == VARINT:
            _, stop = _varint(data, pos, end)
        elif wire_type == FIXED64:
            stop = pos + 8
        elif wire_type == FIXED32:
            stop = pos + 4
        else:
            raise ValueError(f"field {number} has the unknown wire type {wire_type}")
        if number == 0:
            raise ValueError("there is no field 0")
        if stop > end:
            raise ValueError(f"field {number} is cut off")
        field = fields.get(number)
        if field is not None:
            if wire_type not in field.wire_types:
                raise ValueError(
                    f"field {number} ({field.name}) has wire type {wire_type}: "
                    f"it must be {' or '.join(map(str, sorted(field.wire_types)))}"
                )
            if field.message_type is not None:
                _check(data, pos, stop, field.message_type)
        pos = stop


def _varint(data: bytes, pos: int, end: int) -> tuple[int, int]:
    """The number at `pos`, and where what follows it begins."""
    value = shift = 0
    for index in range(pos, min(end, pos + MAX_VARINT_BYTES)):
        byte = data[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, index + 1
        shift += 7
    raise ValueError("a number is cut off or longer than 64 bits")
