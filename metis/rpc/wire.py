"""The protobuf encoding of betterproto2 messages, strict and quick.

Pure. betterproto2's own takes a message that is cut off for a shorter one, and
puts a number into a text field when the bytes say so; a handler would then meet
values of types that cannot be. It also takes so long that it was a sixth of the
server's time for a call. What is not used here is not supported: oneof groups
and wrapped well-known types.

See the protobuf documentation, "Encoding"; fields of a newer peer are passed
over. Of a field that comes twice the last value counts, of a message field as well,
where Google's library would take the sum of both; no encoder writes that.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, NamedTuple

import betterproto2

VARINT = betterproto2.WIRE_VARINT
FIXED64 = betterproto2.WIRE_FIXED_64
LENGTH = betterproto2.WIRE_LEN_DELIM
FIXED32 = betterproto2.WIRE_FIXED_32

MAX_VARINT_BYTES = 10
"""Longest varint: 64 bits, seven a byte."""

TWO_TO_64 = 1 << 64

MAX_TAG = (1 << 32) - 1
"""Largest tag: a field number of 29 bits, and the wire type."""

SMALL = tuple(bytes((number,)) for number in range(0x80))
"""The varints of one byte, which nearly all of them are."""

Read = Callable[[Any], Any]
"""Makes a value of what the wire has: a number for VARINT, else bytes."""

Write = Callable[[Any], bytes]
"""Makes the bytes that follow the tag."""


class _Kind(NamedTuple):
    """How one value is encoded."""

    wire_type: int
    read: Read
    write: Write


class _Shape(Enum):
    """How the values of one field stand together."""

    SINGLE = auto()
    REPEATED = auto()
    PACKED = auto()
    MAP = auto()


_SINGLE = _Shape.SINGLE
"""At hand: an attribute of an enumeration takes its time."""


class _Field(NamedTuple):
    name: str
    tag: int
    shape: _Shape
    kind: _Kind
    value_class: type[Any]
    has_presence: bool


def _varint(data: bytes, pos: int, end: int) -> tuple[int, int]:
    """The number at `pos`, and where what follows it begins."""
    if pos < end and data[pos] < 0x80:
        return data[pos], pos + 1
    value = shift = 0
    for index in range(pos, min(end, pos + MAX_VARINT_BYTES)):
        byte = data[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value % TWO_TO_64, index + 1
        shift += 7
    raise ValueError("a number is cut off or longer than 64 bits")


def _write_varint(value: int) -> bytes:
    if 0 <= value < 0x80:
        return SMALL[value]
    if not -TWO_TO_64 // 2 <= value < TWO_TO_64:
        raise ValueError(f"{value} does not fit into 64 bits")
    value %= TWO_TO_64
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _write_bytes(value: bytes) -> bytes:
    size = len(value)
    return (SMALL[size] if size < 0x80 else _write_varint(size)) + value


def _write_text(value: str) -> bytes:
    return _write_bytes(value.encode())


def _signed(bits: int) -> Read:
    """Two's complement in the lowest bits, as negative numbers are encoded."""
    sign = 1 << (bits - 1)
    return lambda value: ((value & ((sign << 1) - 1)) ^ sign) - sign


def _zigzag(value: int) -> int:
    return (value >> 1) ^ -(value & 1)


def _write_zigzag(value: int) -> bytes:
    return _write_varint((value << 1) ^ (value >> 63))


def _fixed(code: str) -> _Kind:
    """A number of 4 or 8 bytes, by its code in `struct`."""
    form = struct.Struct("<" + code)
    wire_type = FIXED32 if form.size == 4 else FIXED64
    return _Kind(wire_type, lambda data: form.unpack(data)[0], form.pack)


_KINDS = {
    betterproto2.TYPE_STRING: _Kind(LENGTH, bytes.decode, _write_text),
    betterproto2.TYPE_BYTES: _Kind(LENGTH, bytes, _write_bytes),
    betterproto2.TYPE_BOOL: _Kind(VARINT, bool, _write_varint),
    betterproto2.TYPE_INT32: _Kind(VARINT, _signed(32), _write_varint),
    betterproto2.TYPE_INT64: _Kind(VARINT, _signed(64), _write_varint),
    betterproto2.TYPE_UINT32: _Kind(VARINT, lambda v: v & 0xFFFFFFFF, _write_varint),
    betterproto2.TYPE_UINT64: _Kind(VARINT, int, _write_varint),
    betterproto2.TYPE_SINT32: _Kind(VARINT, _zigzag, _write_zigzag),
    betterproto2.TYPE_SINT64: _Kind(VARINT, _zigzag, _write_zigzag),
    betterproto2.TYPE_FIXED32: _fixed("I"),
    betterproto2.TYPE_SFIXED32: _fixed("i"),
    betterproto2.TYPE_FLOAT: _fixed("f"),
    betterproto2.TYPE_FIXED64: _fixed("Q"),
    betterproto2.TYPE_SFIXED64: _fixed("q"),
    betterproto2.TYPE_DOUBLE: _fixed("d"),
}


def _kind(proto_type: str, value_class: type[Any]) -> _Kind:
    if proto_type == betterproto2.TYPE_ENUM:
        number = _signed(32)
        return _Kind(VARINT, lambda value: value_class(number(value)), _write_varint)
    if proto_type in (betterproto2.TYPE_MESSAGE, betterproto2.TYPE_MAP):
        # betterproto2 has a message class for the entries of a map, too
        return _Kind(
            LENGTH,
            lambda data: decode(data, value_class),
            lambda message: _write_bytes(encode(message)),
        )
    return _KINDS[proto_type]


@functools.cache
def _fields_of(message_type: Any) -> tuple[tuple[_Field, bytes], ...]:
    """The fields of a message type, each with the bytes that announce it."""
    # betterproto2 keeps the classes of enum, message and map fields here alone
    classes = message_type._betterproto.cls_by_field  # noqa: SLF001
    fields = []
    for each in dataclasses.fields(message_type):
        meta = betterproto2.FieldMetadata.get(each)
        if meta.group or meta.unwrap:
            raise TypeError(
                f"{message_type.__name__}.{each.name} is part of a oneof group or a "
                "wrapped type, which this encoding does not have"
            )
        kind = _kind(meta.proto_type, classes[each.name])
        wire_type, shape = kind.wire_type, _Shape.SINGLE
        if meta.proto_type == betterproto2.TYPE_MAP:
            shape = _Shape.MAP
        elif meta.repeated:
            shape = _Shape.REPEATED if wire_type == LENGTH else _Shape.PACKED
            wire_type = LENGTH
        tag = meta.number << 3 | wire_type
        single_message = (
            meta.proto_type == betterproto2.TYPE_MESSAGE and not meta.repeated
        )
        field = _Field(
            each.name,
            tag,
            shape,
            kind,
            classes[each.name],
            has_presence=bool(meta.optional) or single_message,
        )
        fields.append((field, _write_varint(tag)))
    return tuple(fields)


@functools.cache
def _readers_of(message_type: Any) -> dict[int, tuple[str, _Shape, Read, _Kind]]:
    """How to read the fields of a message type, by number and wire type together."""
    by_tag = {}
    for field, _ in _fields_of(message_type):
        kind = field.kind
        by_tag[field.tag] = (field.name, field.shape, kind.read, kind)
        if field.shape is _Shape.PACKED:
            # a list of numbers may come one by one as well
            tag = field.tag & ~7 | kind.wire_type
            by_tag[tag] = (field.name, _Shape.REPEATED, kind.read, kind)
    return by_tag


@functools.cache
def _writers_of(
    message_type: Any,
) -> tuple[tuple[str, bytes, _Shape, bool, Write, type[Any]], ...]:
    """How to write the fields of a message type, in order."""
    return tuple(
        (
            field.name,
            tag,
            field.shape,
            field.has_presence,
            field.kind.write,
            field.value_class,
        )
        for field, tag in _fields_of(message_type)
    )


def encode(message: Any) -> bytes:
    """A betterproto2 message as protobuf bytes.

    Raises:
      Exception: a field holds what its type does not allow; of various kinds.
    """
    parts = []
    message_type: Any = type(message)
    for name, tag, shape, presence, write, value_class in _writers_of(message_type):
        value = getattr(message, name)
        # a message is not asked whether it is empty: it would look at all its fields
        if value is None or not (presence or value):
            continue
        if shape is _SINGLE:
            parts.append(tag)
            parts.append(write(value))
        elif shape is _Shape.REPEATED:
            parts += [tag + write(item) for item in value]
        elif shape is _Shape.PACKED:
            parts.append(tag + _write_bytes(b"".join(map(write, value))))
        else:
            entries = [value_class(key=k, value=v) for k, v in value.items()]
            parts += [tag + write(entry) for entry in entries]
    return b"".join(parts)


def decode(data: bytes, message_type: Any) -> Any:
    """The message of a betterproto2 class that the bytes hold.

    Raises:
      ValueError: they are no such message: what is wrong, and in which field.
        UnicodeDecodeError is one, for a text that is not UTF-8.
    """
    readers = _readers_of(message_type)
    values: dict[str, Any] = {}
    pos, end = 0, len(data)
    while pos < end:
        tag = data[pos]
        if tag < 0x80:
            pos += 1
        else:
            tag, pos = _varint(data, pos, end)
            if tag > MAX_TAG:
                raise ValueError(f"there is no field {tag >> 3}: it has over 29 bits")
        # nearly all fields are texts and messages of less than 128 bytes
        if tag & 7 == LENGTH and pos < end and (size := data[pos]) < 0x80:
            start = pos + 1
            pos = start + size
            if pos > end:
                raise ValueError(f"field {tag >> 3} is cut off")
            raw: Any = data[start:pos]
        else:
            raw, pos = _value(data, pos, end, tag)
        reader = readers.get(tag)
        if reader is None:
            _check_unknown(tag, message_type)
            continue
        name, shape, read, kind = reader
        if shape is _SINGLE:
            values[name] = read(raw)
        elif shape is _Shape.REPEATED:
            values.setdefault(name, []).append(read(raw))
        elif shape is _Shape.PACKED:
            values.setdefault(name, []).extend(map(read, _unpack(raw, kind)))
        else:
            entry = read(raw)
            values.setdefault(name, {})[entry.key] = entry.value
    return message_type(**values)


def _value(data: bytes, pos: int, end: int, tag: int) -> tuple[Any, int]:
    """What follows a tag, a number or bytes, and where it ends."""
    wire_type = tag & 7
    if wire_type == VARINT:
        return _varint(data, pos, end)
    if wire_type == LENGTH:
        size, pos = _varint(data, pos, end)
    elif wire_type == FIXED64:
        size = 8
    elif wire_type == FIXED32:
        size = 4
    else:
        raise ValueError(f"field {tag >> 3} has the unknown wire type {wire_type}")
    if size > end - pos:
        raise ValueError(f"field {tag >> 3} is cut off")
    return data[pos : pos + size], pos + size


def _unpack(data: bytes, kind: _Kind) -> list[Any]:
    """The values of a packed list as the wire has them."""
    values, pos = [], 0
    while pos < len(data):
        value, pos = _value(data, pos, len(data), kind.wire_type)
        values.append(value)
    return values


def _check_unknown(tag: int, message_type: Any) -> None:
    """Pass over the field of a newer peer, but not one of ours in disguise."""
    number, wire_type = tag >> 3, tag & 7
    if number == 0:
        raise ValueError("there is no field 0")
    for field, _ in _fields_of(message_type):
        if field.tag >> 3 == number:
            raise ValueError(
                f"field {number} ({field.name}) has wire type {wire_type}: "
                f"it must be {field.tag & 7}"
            )
