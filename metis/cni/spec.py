"""Environment and stdin of a plugin call -> a frozen `Request`.

Pure, and in three steps, because a runtime can see the order in which a plugin
checks things, and because the log's place is known before the rest is right:

    read_environment       variables         code 4, before stdin is read
    decode_configuration   JSON, name        codes 6 and 7
    read_request           command, version  codes 4, 6 and 1
                           contents          code 7, and 4 for CNI_ARGS

DEL and GC ask for less than the others: whatever became wrong in a configuration
since an ADD, what that ADD took must come back.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import NoReturn

from metis.cni import configuration, fields
from metis.cni.attachments import Attachment, valid_attachments
from metis.cni.configuration import Route
from metis.cni.dns import DNS, configured_dns
from metis.cni.environment import NAME, REQUIRED, Args, Environment, parse_args
from metis.cni.fields import Configuration, json_type
from metis.cni.protocol import (
    DECODING_FAILURE,
    IMPLIED_VERSION,
    INCOMPATIBLE_VERSION,
    INVALID_CONFIGURATION,
    INVALID_ENVIRONMENT,
    SUPPORTED_VERSIONS,
    CNIError,
    parse_version,
    shown,
)
from metis.cni.ranges import RangeSet, range_sets
from metis.cni.requested import configured_requests, with_requests
from metis.config import (
    DEFAULT_CNI_LOG_PATH,
    DEFAULT_DB_PATH,
    DEFAULT_SOCKET_PATH,
    DaemonConfig,
)
from metis.model import Pod

SINCE = {"CHECK": (0, 4, 0), "GC": (1, 1, 0), "STATUS": (1, 1, 0)}
"""The protocol version that brought a command, where it is not the first."""

FREEING = ("DEL", "GC")
"""Commands that need to know whose addresses, and not which ones to give."""

ARGS_MATTER = ("ADD", "CHECK")
"""Commands that wrong CNI_ARGS stop. For DEL they only name the pod to people,
and the others have none (section 2)."""

DEFAULT_RELEASE_COOLDOWN = DaemonConfig().release_cooldown


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of the plugin, with everything checked that can be beforehand.

    Attributes:
      env: the variables of the call.
      version: the protocol version to answer in.
      main: whether metis is the main plugin of the network and not a delegate.
      network: the network whose addresses are used.
      wanted: one entry an address; any IPv4 address when no range is configured.
        Empty on the commands of FREEING, as are `routes` and `dns`.
      sticky: whether a pod that comes back is to get the address it last had.
      routes: to be handed on with the addresses.
      dns: likewise; empty when `resolv_conf` is to be read for it.
      resolv_conf: path of a resolv.conf that has the pod's dns; "" for none.
      pod: the pod's Kubernetes names, as far as the runtime told them.
      previous: the addresses of prevResult in canonical form, on CHECK.
      attachments: those that are to stay, on GC; None when the runtime did not
        say.
      status_on_exhaustion: whether STATUS fails when no address is free.
      socket_path: the daemon's Unix socket.
      db_path: the database, for a plugin that must do without the daemon.
      release_cooldown: seconds that a released address rests in that case.
    """

    env: Environment
    version: str
    main: bool
    network: str
    wanted: tuple[RangeSet, ...] = ()
    sticky: bool = False
    routes: tuple[Route, ...] = ()
    dns: DNS = field(default_factory=DNS)
    resolv_conf: str = ""
    pod: Pod = field(default_factory=Pod)
    previous: tuple[str, ...] = ()
    attachments: frozenset[Attachment] | None = None
    status_on_exhaustion: bool = False
    socket_path: str = DEFAULT_SOCKET_PATH
    db_path: str = DEFAULT_DB_PATH
    release_cooldown: float = DEFAULT_RELEASE_COOLDOWN

    @property
    def note(self) -> str:
        """What the log is to say about a call that does nothing; "" otherwise."""
        if self.env.command == "GC" and self.attachments is None:
            return "the runtime sent no list of valid attachments: nothing is freed"
        return ""


@dataclass(frozen=True, slots=True)
class Configured:
    """What a configuration alone says about the calls of one command.

    Attributes:
      request: that, without what the variables say.
      asked: the addresses that it asks for, each with its place.
    """

    request: Request
    asked: tuple[tuple[str, str], ...] = ()


def decode_configuration(stdin: bytes) -> Configuration:
    """Decode the network configuration and check its name (section 1).

    Raises:
      CNIError: code 6 when it is not a JSON object, 7 for its name.
    """
    try:
        # Explicitly UTF-8 (RFC 8259): json would guess other encodings.
        config = json.loads(stdin.decode(), parse_constant=_refuse_constant)
    except RecursionError:
        raise _undecodable("it is nested too deeply") from None
    except ValueError as error:
        raise _undecodable(str(error)) from None
    if not isinstance(config, dict):
        raise _undecodable(f"it is {json_type(config)}, not an object")
    name = config.get("name")
    if name is not None and not isinstance(name, str):
        raise _undecodable(f"name is {json_type(name)}, not a text")
    if not name:
        raise CNIError(INVALID_CONFIGURATION, "missing network name")
    if not NAME.fullmatch(name):
        raise CNIError(
            INVALID_CONFIGURATION,
            f"invalid characters in network name {shown(name)}",
            "it must begin with a letter or digit and hold only those, _, . and -",
        )
    return config


def log_path(config: Configuration) -> str:
    """Where the call is logged; the default for whatever is not a path.

    Never fails: a log must not be the reason why a call does.
    """
    value = configuration.setting(config, "logFile")
    return value if isinstance(value, str) and value else DEFAULT_CNI_LOG_PATH


def log_level(config: Configuration) -> object:
    """What the configuration says of the log's level; None for nothing.

    Any value at all, for the same reason.
    """
    return configuration.setting(config, "logLevel")


def answer_version(config: Configuration) -> str | None:
    """The version in which even an error is answered; None if it is not ours."""
    version = config.get("cniVersion") or IMPLIED_VERSION
    return version if version in SUPPORTED_VERSIONS else None


def read_request(
    env: Environment, config: Configuration, *, program: str = "metis"
) -> Request:
    """Check everything else about a call: `read_configured`, then `complete`.

    Args:
      env: the variables of the call.
      config: from `decode_configuration`.
      program: the name under which the plugin was started. A configuration of
        this `type` makes metis the main plugin (section 1, `type`).

    Raises:
      CNIError: code 4 for an unknown command or CNI_ARGS, 6 and 1 for the
        version, 7 for anything else in the configuration.
    """
    return complete(read_configured(env.command, config, program), env)


def read_configured(command: str, config: Configuration, program: str) -> Configured:
    """Check what does not depend on the container; see `read_request`.

    Raises:
      CNIError: as `read_request`, but for CNI_ARGS.
    """
    if command not in REQUIRED:
        raise CNIError(
            INVALID_ENVIRONMENT,
            f"unknown CNI_COMMAND: {command}",
            f"it must be VERSION or one of {', '.join(REQUIRED)}",
        )
    version = _checked_version(command, config)
    request = Request(
        env=Environment(command=command),
        version=version,
        main=config.get("type") == program,
        network=configuration.network(configuration.ipam_section(config)),
        previous=(
            configuration.previous_addresses(config) if command == "CHECK" else ()
        ),
        attachments=valid_attachments(config) if command == "GC" else None,
        socket_path=configuration.socket_setting(
            config, "daemonSocket", DEFAULT_SOCKET_PATH
        ),
        db_path=configuration.path_setting(config, "dbPath", DEFAULT_DB_PATH),
        release_cooldown=_release_cooldown(command, config),
    )
    return Configured(request) if command in FREEING else _giving(request, config)


def complete(configured: Configured, env: Environment) -> Request:
    """The request of a call, from its configuration and its variables.

    Raises:
      CNIError: code 4 for CNI_ARGS, 7 for an address that no set can give.
    """
    request, args = configured.request, _args(env)
    wanted = request.wanted
    if env.command == "ADD":
        wanted = with_requests(wanted, configured.asked, args.requested)
    return replace(request, env=env, wanted=wanted, pod=args.pod)


def _giving(request: Request, config: Configuration) -> Configured:
    """The request, with what a command needs that gives or checks addresses."""
    ipam = configuration.ipam_section(config)
    runtime = fields.section(config, "runtimeConfig", "runtimeConfig")
    wanted = range_sets(ipam, runtime, request.version)
    dns = configured_dns(config)
    request = replace(
        request,
        wanted=wanted,
        sticky=configuration.boolean_setting(config, "sticky"),
        routes=configuration.routes(ipam),
        # The caller of a delegate puts its own `dns` over the delegate's.
        dns=dns if request.main else DNS(),
        resolv_conf=(
            ""
            if request.main and dns.members()
            else configuration.path_setting(ipam, "resolvConf", "")
        ),
        status_on_exhaustion=configuration.boolean_setting(
            config, "statusOnExhaustion"
        ),
    )
    if request.env.command != "ADD":
        return Configured(request)
    return Configured(request, tuple(configured_requests(config, runtime)))


def _release_cooldown(command: str, config: Configuration) -> float:
    """How long a released address rests; nothing wrong in it stops a release."""
    try:
        return configuration.duration_setting(
            config, "releaseCooldown", DEFAULT_RELEASE_COOLDOWN
        )
    except CNIError:
        if command in FREEING:
            return DEFAULT_RELEASE_COOLDOWN
        raise


def _args(env: Environment) -> Args:
    """CNI_ARGS, as far as it is right and matters."""
    try:
        return parse_args(env.args)
    except CNIError:
        if env.command in ARGS_MATTER:
            raise
        return Args()


def _checked_version(command: str, config: Configuration) -> str:
    """The version of a configuration, if its command may use it.

    Section 5, "Version": a plugin answers in the version of the configuration
    or not at all. Versions are equal as texts: "1.0" is not "1.0.0".
    """
    version = config.get("cniVersion")
    if version is None or version == "":
        version = IMPLIED_VERSION
    if not isinstance(version, str):
        raise _undecodable(f"cniVersion is {json_type(version)}, not a text")
    since = SINCE.get(command)
    if since is not None:
        try:
            too_old = parse_version(version) < since
        except ValueError as error:
            raise CNIError(DECODING_FAILURE, f"cniVersion: {error}") from None
        if too_old:
            raise CNIError(
                INCOMPATIBLE_VERSION,
                f"config version does not allow {command}",
                f"cniVersion is {shown(version)}, {command} needs "
                f"{'.'.join(map(str, since))} or later",
            )
    if version not in SUPPORTED_VERSIONS:
        raise CNIError(
            INCOMPATIBLE_VERSION,
            "incompatible CNI versions",
            f"config is {shown(version)}, plugin supports "
            f"{', '.join(SUPPORTED_VERSIONS)}",
        )
    return version


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _undecodable(why: str) -> CNIError:
    return CNIError(
        DECODING_FAILURE, f"the network configuration on stdin cannot be read: {why}"
    )
