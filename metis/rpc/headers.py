"""Header lists as gRPC reads them: requests, statuses and metadata.

Pure. Requests are checked here, because h2's own checks are off (see
`metis.rpc.connection`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from grpclib.metadata import _Metadata, decode_metadata

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]
"""A header list as it was received."""

AnyHeaders: TypeAlias = Sequence[tuple[str | bytes, str | bytes]]
"""A header list to be sent."""

PSEUDO_HEADERS = frozenset({b":method", b":scheme", b":path", b":authority"})

CONNECTION_HEADERS = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Fields that make a message malformed, RFC 9113 section 8.2.2."""

_FIELD_NAME = re.compile(rb"[0-9a-z!#$%&'*+.^_`|~-]+")
_BAD_VALUE = re.compile(rb"[\x00\r\n]")

GRPC_FIELDS = frozenset({b"te", b"content-type", b"user-agent"})
"""Fields with a meaning of their own in gRPC, beside those named `grpc-*`."""


class MalformedRequest(Exception):
    """A request breaks RFC 9113 section 8; its stream is reset."""


@dataclass(slots=True)
class Request:
    """The headers of a request, read once.

    Attributes:
      fields: pseudo-headers and the fields that HTTP/2 or gRPC define.
      metadata: all other fields, in order.
    """

    fields: dict[bytes, bytes] = field(default_factory=dict)
    metadata: list[tuple[bytes, bytes]] = field(default_factory=list)

    @classmethod
    def read(cls, headers: Headers) -> Request:
        """Sort the headers of a request, and check what h2 was told not to.

        Raises:
          MalformedRequest: a rule of RFC 9113 section 8 is broken. An absent
            or empty `:authority` is none: section 8.3.1 allows the former, and
            gRPC clients over Unix sockets send the latter.
        """
        request = cls()
        fields, metadata = request.fields, request.metadata
        regular = False
        for name, value in headers:
            if name[:1] == b":":
                if regular or name not in PSEUDO_HEADERS or name in fields:
                    raise MalformedRequest(f"pseudo-header {name!r} in the wrong place")
                fields[name] = value
                continue
            regular = True
            if name in GRPC_FIELDS or name[:5] == b"grpc-":
                fields[name] = value
            elif name in CONNECTION_HEADERS or not _FIELD_NAME.fullmatch(name):
                raise MalformedRequest(f"header {name!r}")
            else:
                metadata.append((name, value))
            if _BAD_VALUE.search(value):
                raise MalformedRequest(f"the value of {name!r} has a control character")
        if not fields.get(b":method") or not fields.get(b":path"):
            raise MalformedRequest(":method and :path are required")
        return request


def text_of(value: bytes) -> str:
    """A header's value as text; what is not ASCII stays recognisable."""
    return value.decode("latin-1")


def metadata_of(headers: Headers) -> _Metadata:
    """The metadata among the headers, as grpclib's multi-dict.

    Raises:
      ValueError: a binary value ("-bin") is not base64.
    """
    return decode_metadata([(text_of(name), text_of(value)) for name, value in headers])
