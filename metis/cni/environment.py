"""The environment of a plugin call: which variables there must be, and CNI_ARGS.

Section 2 "Parameters" of the specification, with the order of checks and the
extra demands of libcni's plugin skeleton, because a runtime can see both. Pure:
the environment is a mapping that somebody else read.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from metis.cni.protocol import INVALID_ENVIRONMENT, CNIError, shown
from metis.errors import InvalidRequest
from metis.model import Pod, checked_name

NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.\-]*")
"""Container ids and network names (sections 1 and 2); matched as a whole."""

MAX_INTERFACE_BYTES = 15
"""Linux's IFNAMSIZ less the terminating zero (section 2, CNI_IFNAME)."""

_ATTACHMENT = ("CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH")

REQUIRED: Mapping[str, tuple[str, ...]] = {
    "ADD": _ATTACHMENT,
    "CHECK": _ATTACHMENT,
    # The namespace may be gone when DEL comes (section 2, "DEL").
    "DEL": ("CNI_CONTAINERID", "CNI_IFNAME", "CNI_PATH"),
    # The specification calls CNI_PATH optional for STATUS; the skeleton does not.
    "GC": ("CNI_PATH",),
    "STATUS": ("CNI_PATH",),
}
"""The commands that read a configuration, and the variables each one needs.

VERSION needs none and is answered before this module is asked.
"""

POD_ARGS = {
    "K8S_POD_NAME": "pod name",
    "K8S_POD_NAMESPACE": "pod namespace",
}
KNOWN_ARGS = frozenset(
    {"IgnoreUnknown", "IP", "K8S_POD_INFRA_CONTAINER_ID", "K8S_POD_UID", *POD_ARGS}
)
"""What we read and what Kubernetes runtimes pass; accepted with and without
IgnoreUnknown."""

_BOOLEANS = {"1": True, "true": True, "0": False, "false": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The variables of one call, checked as far as its command needs them.

    Attributes:
      command: CNI_COMMAND, not yet known to be one of REQUIRED: a configuration
        that cannot be read is reported before an unknown command.
      container_id: CNI_CONTAINERID.
      netns: CNI_NETNS, a path; may be empty on DEL.
      interface: CNI_IFNAME.
      args: CNI_ARGS, unparsed.
      netns_override: whether the namespace may be the plugin's own.
    """

    command: str
    container_id: str = ""
    netns: str = ""
    interface: str = ""
    args: str = ""
    netns_override: bool = False


def read_environment(environ: Mapping[str, str]) -> Environment:
    """Check the variables of a call.

    A malformed value fails at once, missing ones are reported together; only
    variables that the command requires are looked at.

    Raises:
      CNIError: code 4, naming the variables.
    """
    command = environ.get("CNI_COMMAND", "")
    required = REQUIRED.get(command, ())
    missing = [] if command else ["CNI_COMMAND"]
    for variable in _ATTACHMENT:
        if variable not in required:
            continue
        value = environ.get(variable, "")
        if not value:
            missing.append(variable)
        else:
            _check(variable, value)
    if missing:
        raise CNIError(
            INVALID_ENVIRONMENT, f"required env variables [{','.join(missing)}] missing"
        )
    return Environment(
        command=command,
        container_id=environ.get("CNI_CONTAINERID", ""),
        netns=environ.get("CNI_NETNS", ""),
        interface=environ.get("CNI_IFNAME", ""),
        args=environ.get("CNI_ARGS", ""),
        netns_override=environ.get("CNI_NETNS_OVERRIDE", "").upper() in ("1", "TRUE"),
    )


@dataclass(frozen=True, slots=True)
class Args:
    """What CNI_ARGS says.

    Attributes:
      pod: the pod's Kubernetes names.
      requested: the address of IP=, in canonical form; empty for none
        (CONVENTIONS.md of the specification, "CNI_ARGS").
    """

    pod: Pod = field(default_factory=Pod)
    requested: tuple[str, ...] = ()


def parse_args(text: str) -> Args:
    """Read CNI_ARGS, "KEY=VALUE;KEY=VALUE" (section 2, CNI_ARGS).

    Keys are case-sensitive; those not in KNOWN_ARGS need IgnoreUnknown=1 or
    true, wherever it stands. A repeated key counts as its last value.

    Raises:
      CNIError: code 4, naming the pair or the keys.
    """
    values: dict[str, str] = {}
    unknown: list[str] = []
    for pair in text.split(";") if text else ():
        parts = pair.split("=")
        if len(parts) != 2:
            raise _bad_args(
                f"invalid pair {shown(pair)}", "every pair is KEY=VALUE, with one '='"
            )
        key, value = parts
        if key not in KNOWN_ARGS:
            unknown.append(key)
        elif key == "IgnoreUnknown" and value.lower() not in _BOOLEANS:
            raise _bad_args(
                f"invalid value in {shown(pair)}", "write 1, true, 0 or false"
            )
        values[key] = value
    if unknown and not _BOOLEANS[values.get("IgnoreUnknown", "0").lower()]:
        raise _bad_args(
            f"unknown keys {', '.join(map(shown, unknown))}",
            "add IgnoreUnknown=1 to have them ignored",
        )
    for key, what in POD_ARGS.items():
        _check_name(what, values.get(key, ""), "CNI_ARGS", required=False)
    return Args(
        Pod(values.get("K8S_POD_NAME", ""), values.get("K8S_POD_NAMESPACE", "")),
        _requested(values.get("IP", "")),
    )


def _requested(text: str) -> tuple[str, ...]:
    """The address of IP=, which may carry a prefix length."""
    if not text:
        return ()
    try:
        address = ipaddress.ip_interface(text).ip
    except ValueError:
        address = None
    if address is None or "%" in text:
        raise _bad_args(
            f"invalid address in {shown(f'IP={text}')}",
            "write one address, 10.88.0.5 or 10.88.0.5/16",
        )
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (str(mapped or address),)


def _bad_args(message: str, details: str) -> CNIError:
    return CNIError(INVALID_ENVIRONMENT, f"CNI_ARGS: {message}", details)


def _check(variable: str, value: str) -> None:
    """Refuse a malformed value of a required variable."""
    if variable == "CNI_CONTAINERID":
        if not NAME.fullmatch(value):
            raise CNIError(
                INVALID_ENVIRONMENT,
                f"invalid characters in CNI_CONTAINERID {shown(value)}",
                "it must begin with a letter or digit and hold only those, _, . and -",
            )
        _check_name("container id", value, variable)
    elif variable == "CNI_IFNAME":
        _check_interface(value)
    elif variable == "CNI_NETNS" and not _is_text(value):
        # It stands in the result as `sandbox`, and JSON holds no other bytes.
        raise CNIError(
            INVALID_ENVIRONMENT, f"{variable} {shown(value)} is not valid UTF-8"
        )


def _check_interface(name: str) -> None:
    """Hold an interface name to Linux's rules (section 2, CNI_IFNAME)."""
    if not _is_text(name):
        problem = "is not valid UTF-8"
    elif len(name.encode()) > MAX_INTERFACE_BYTES:
        problem = f"is longer than {MAX_INTERFACE_BYTES} bytes"
    elif name in (".", ".."):
        problem = "is . or .."
    elif any(c in "/:" or c.isspace() for c in name):
        problem = "holds /, : or white space"
    else:
        _check_name("interface name", name, "CNI_IFNAME")
        return
    raise CNIError(
        INVALID_ENVIRONMENT,
        f"CNI_IFNAME {shown(name)} {problem}",
        f"an interface name has 1 to {MAX_INTERFACE_BYTES} bytes without / and :",
    )


def _check_name(what: str, value: str, variable: str, *, required: bool = True) -> None:
    """Refuse early what the daemon would refuse, with the variable's name."""
    if not _is_text(value):
        raise CNIError(
            INVALID_ENVIRONMENT, f"{variable}: {what} {shown(value)} is not valid UTF-8"
        )
    try:
        checked_name(what, value, required=required)
    except InvalidRequest as error:
        raise CNIError(INVALID_ENVIRONMENT, f"{variable}: {error}") from None


def _is_text(value: str) -> bool:
    """Whether the value came as UTF-8: other bytes are surrogates (PEP 383)."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
