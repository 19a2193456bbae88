"""What every answer of the plugin is made of: versions, error codes, error object.

Pure, and light on imports: VERSION is answered from this module alone.
"""

from __future__ import annotations

from metis.errors import MetisError

SUPPORTED_VERSIONS = ("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
"""Every released version of the protocol, oldest first."""

NEWEST_VERSION = SUPPORTED_VERSIONS[-1]

IMPLIED_VERSION = "0.1.0"
"""What a configuration without cniVersion means (libcni's rule)."""

# Error codes: section 5 "Error"; 0 to 99 are reserved by the specification.
INCOMPATIBLE_VERSION = 1
UNSUPPORTED_FIELD = 2  # the message holds the key and its value
INVALID_ENVIRONMENT = 4
IO_FAILURE = 5
DECODING_FAILURE = 6
INVALID_CONFIGURATION = 7
INVALID_NETNS = 8  # libcni's own, absent from the specification's table
TRY_AGAIN_LATER = 11
NOT_AVAILABLE = 50  # STATUS: no ADD can be served
NOT_ALLOCATED = 100  # CHECK: the interface holds no address
OTHER_ADDRESS = 101  # CHECK: it holds another one than prevResult says
INTERNAL = 999  # libcni's code for an error without one

SHOWN_LENGTH = 80
"""Longest rendering of an offending value in a message, in characters."""


class CNIError(MetisError):
    """A failure as a runtime is told of it (section 5, "Error").

    Attributes:
      code: one of the numbers above.
      message: one line that says what is wrong; runtimes show it to people.
      details: what would be right, or where it was seen; may be empty.
    """

    def __init__(self, code: int, message: str, details: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = _clean(message)
        self.details = _clean(details)


def internal(error: BaseException, details: str = "") -> CNIError:
    """An unforeseen error in one line."""
    lines = str(error).splitlines()
    message = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return CNIError(INTERNAL, message, details)


def unread(problem: object) -> CNIError:
    """The error of an ADD whose result could not be written."""
    return CNIError(IO_FAILURE, f"the result cannot be written to stdout: {problem}")


def error_text(error: CNIError, version: str | None) -> str:
    """The error object as JSON (section 5, "Error").

    Args:
      error: what went wrong.
      version: the protocol version of the call, or None while it is unknown;
        the key is then left out, as libcni's own plugins always do.
    """
    import json  # here, so that VERSION does not pay for it

    fields: dict[str, str | int] = {}
    if version is not None:
        fields["cniVersion"] = version
    fields["code"] = error.code
    fields["msg"] = error.message
    if error.details:
        fields["details"] = error.details
    return json.dumps(fields, indent=4)


def _clean(text: str) -> str:
    """The text without halves of surrogate pairs, which strict readers refuse."""
    return text.encode(errors="backslashreplace").decode()


def version_text() -> str:
    """The answer to VERSION, one line (section 5, "VERSION Success")."""
    supported = ",".join(f'"{version}"' for version in SUPPORTED_VERSIONS)
    return f'{{"cniVersion":"{NEWEST_VERSION}","supportedVersions":[{supported}]}}\n'


def about_text(program_version: str) -> str:
    """What a person sees who starts the plugin by hand."""
    return (
        f"CNI plugin metis v{program_version}\n"
        f"CNI protocol versions supported: {', '.join(SUPPORTED_VERSIONS)}\n"
        "For the commands of the daemon and its tools see `metis --help`.\n"
    )


def parse_version(text: str) -> tuple[int, int, int]:
    """Read "MAJOR[.MINOR[.MICRO]]" for comparisons.

    Raises:
      ValueError: not a version.
    """
    parts = text.split(".")
    # Bounded before int(): a version with thousands of digits is no version.
    if len(parts) > 3 or not all(p.isascii() and p.isdigit() for p in parts):
        raise ValueError(f"{shown(text)} is not a version: write 1.0.0")
    if len(text) > SHOWN_LENGTH:
        raise ValueError(f"{shown(text)} is not a version: it is too long")
    major, minor, micro = (*map(int, parts), 0, 0)[:3]
    return major, minor, micro


def shown(value: object) -> str:
    """An offending value as a message shows it: quoted, printable and short."""
    text = ascii(value)
    return text if len(text) <= SHOWN_LENGTH else f"{text[: SHOWN_LENGTH - 3]}..."
