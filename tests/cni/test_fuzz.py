"""Whatever a runtime sends, it gets a result or an error object back.

In the ordinary run some thousand inputs in process; `--fuzz-examples=100000` is
the thorough run, which sends 500 through the installed program as well.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from grpclib import GRPCError, Status
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from metis.api.adaptiveipam.v1 import (
    AllocatePodIpRequest,
    AllocatePodIpResponse,
    DeallocatePodIpRequest,
    PodIp,
)
from metis.cni.plugin import run
from metis.cni.protocol import SUPPORTED_VERSIONS, version_text
from tests.cni.calls import config, environ
from tests.cni.conformance import (
    Answer,
    Node,
    Program,
    check_form,
    installed,
    node,
)
from tests.cni.fakes import FakeIpam, FakeNode, reach

ORDINARY_EXAMPLES = 2000
PROGRAM_EXAMPLES = 500
THOROUGH = 1000
"""Examples asked for from which on the program has its share."""

# A right call with a few changes gets far before it fails, if it fails at all.
_junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=10),
    st.lists(st.one_of(st.integers(), st.text(max_size=5)), max_size=2),
    st.dictionaries(st.sampled_from(["subnet", "dst", "ips", "ip4"]), st.text()),
)
_variables = {
    "CNI_COMMAND": st.sampled_from(["DEL", "CHECK", "GC", "STATUS", "VERSION", "X"]),
    "CNI_CONTAINERID": st.one_of(st.just("x" * 2000), st.text(max_size=20)),
    "CNI_NETNS": st.one_of(st.just("/proc/self/ns/net"), st.text(max_size=9)),
    "CNI_IFNAME": st.one_of(st.sampled_from([".", "é" * 8]), st.text(max_size=17)),
    "CNI_PATH": st.just(""),
    "CNI_NETNS_OVERRIDE": st.sampled_from(["1", "0", "true"]),
    "CNI_ARGS": st.one_of(
        st.lists(
            st.one_of(
                st.sampled_from(["IgnoreUnknown=1", "FOO=1", "=", "", "K8S_POD_UID=1"]),
                st.sampled_from(["10.240.0.9/22", "10.240.0.1", "fd00:10::9", "x"]).map(
                    "IP={}".format
                ),
                st.text(max_size=9).map("K8S_POD_NAME={}".format),
            )
        ).map(";".join),
        st.text(max_size=30),
    ),
}
_cidrs = st.sampled_from(
    ["10.240.0.0/22", "fd00:10::/64", "10.0.0.1/31", "::/0", "0.0.0.0/0", "x", "1/2/3"]
)
_addresses = st.sampled_from(
    ["10.240.0.9", "10.240.3.254", "10.240.0.1/22", "fd00:10::9", "::", "x", ""]
)
_ranges = st.fixed_dictionaries(
    {"subnet": _cidrs},
    optional={
        "rangeStart": st.one_of(_addresses, _junk),
        "rangeEnd": st.one_of(_addresses, _junk),
        "gateway": st.one_of(_addresses, _junk),
        "exclude": st.one_of(
            st.lists(st.one_of(_addresses, _cidrs), max_size=2), _junk
        ),
    },
)
_sets = st.one_of(st.lists(st.lists(_ranges, max_size=3), max_size=3), _junk)
_attachments = st.one_of(
    st.lists(
        st.one_of(
            st.fixed_dictionaries(
                {"containerID": st.just("c1")}, optional={"ifname": st.just("eth0")}
            ),
            _junk,
        ),
        max_size=3,
    ),
    _junk,
)
_members = {
    ("name",): _junk,
    ("cniVersion",): st.one_of(st.sampled_from(SUPPORTED_VERSIONS), _junk),
    ("type",): st.sampled_from(["ptp", "metis"]),
    ("ipam",): _junk,
    ("ipam", "ranges"): _sets,
    ("ipam", "rangeStart"): st.one_of(_addresses, _junk),
    ("ipam", "sticky"): _junk,
    ("ipam", "statusOnExhaustion"): _junk,
    ("ipam", "resolvConf"): st.one_of(
        st.sampled_from(["/etc/hosts", "/absent", "/", "/dev/zero"]), _junk
    ),
    ("ipam", "logLevel"): st.one_of(st.sampled_from(["debug", "ERROR"]), _junk),
    ("args",): st.one_of(
        st.fixed_dictionaries(
            {
                "cni": st.fixed_dictionaries(
                    {"ips": st.one_of(st.lists(_addresses, max_size=3), _junk)}
                )
            }
        ),
        _junk,
    ),
    ("runtimeConfig",): st.one_of(
        st.fixed_dictionaries(
            {},
            optional={
                "ips": st.one_of(st.lists(_addresses, max_size=3), _junk),
                "ipRanges": _sets,
            },
        ),
        _junk,
    ),
    ("dns",): st.one_of(
        st.fixed_dictionaries({}, optional={"nameservers": _junk, "domain": _junk}),
        _junk,
    ),
    ("cni.dev/valid-attachments",): _attachments,
    ("cni.dev/attachments",): _attachments,
    ("ipam", "subnet"): st.one_of(_cidrs, _junk),
    ("ipam", "routes"): st.lists(
        st.fixed_dictionaries({"dst": _cidrs}, optional={"gw": _junk, "mtu": _junk}),
        max_size=3,
    ),
    ("ipam", "network"): _junk,
    ("ipam", "daemonSocket"): _junk,
    ("dbPath",): _junk,
    ("ipam", "releaseCooldown"): st.one_of(st.just("1m"), _junk),
    ("prevResult",): st.one_of(
        st.fixed_dictionaries(
            {"ips": st.lists(st.fixed_dictionaries({"address": _cidrs}))}
        ),
        st.fixed_dictionaries({"ip4": st.fixed_dictionaries({"ip": _cidrs})}),
        _junk,
    ),
}


# Most inputs are right but for a little: those get far. Some are wrong all over.
_commands = st.sampled_from(["ADD"] * 5 + ["DEL", "CHECK", "GC", "STATUS"])
_versions = st.sampled_from([*SUPPORTED_VERSIONS, *["1.1.0"] * 7])


@st.composite
def _environs(draw: st.DrawFn) -> dict[str, str]:
    few = st.sampled_from([0, 0, 0, 0, 1, 1, 2])
    keys = draw(st.lists(st.sampled_from(sorted(_variables)), max_size=draw(few)))
    changes = {key: draw(_variables[key]) for key in sorted(set(keys))}
    return environ(draw(_commands)) | changes


@st.composite
def _stdins(draw: st.DrawFn) -> bytes:
    fields = config(draw(_versions), prevResult={"ips": [{"address": "10.240.0.2/22"}]})
    for path in sorted(draw(st.sets(st.sampled_from(sorted(_members)), max_size=3))):
        *parents, key = path
        place = fields
        for parent in parents:
            place = place[parent]
            if not isinstance(place, dict):
                break
        else:
            place[key] = draw(_members[path])
    data = json.dumps(fields).encode()
    match draw(st.integers(0, 15)):  # numbers from the middle are the rare ones
        case 7:
            return data[: draw(st.integers(0, len(data) - 1))]
        case 9:
            return draw(st.binary(max_size=40))
        case _:
            return data


@dataclass(frozen=True)
class World:
    """What is around the plugin in a call.

    Attributes:
      answer: of the daemon to an allocation; None for one that makes sense.
      failure: of the daemon to everything.
      original: whether the daemon knows nothing beyond the original's contract.
      deaf: whether nobody reads standard output.
    """

    answer: AllocatePodIpResponse | None = None
    failure: Status | None = None
    original: bool = False
    deaf: bool = False


_pod_ips = st.builds(
    PodIp,
    ip_address=st.sampled_from(["10.240.0.9", "fd00:10::9", "x", ""]),
    cidr=_cidrs,
    gateway=st.sampled_from(["", "10.240.0.1", "x"]),
)
_worlds = st.one_of(
    st.just(World()),
    st.just(World()),
    st.builds(
        World,
        answer=st.one_of(
            st.none(),
            st.builds(
                AllocatePodIpResponse,
                ipv4=st.one_of(st.none(), _pod_ips),
                ips=st.lists(_pod_ips, max_size=3),
            ),
        ),
        failure=st.one_of(st.none(), st.none(), st.sampled_from(Status)),
        original=st.booleans(),
        deaf=st.booleans(),
    ),
)
CODES = {1, 2, 4, 5, 6, 7, 8, 11, 50, 100, 101}
"""What may go wrong; 999, a fault of ours, is not among them."""


def call(
    world: World, daemon: FakeIpam, variables: dict[str, str], stdin: bytes
) -> Answer | None:
    """One call in process; None when nobody could read the answer."""
    daemon.answer, daemon.original = world.answer, world.original
    there = FakeNode()
    if world.failure not in (None, Status.OK):
        daemon.failure = there.failure = GRPCError(world.failure, "as it was told")
    stdout, stderr = list[str](), list[str]()

    def write(text: str) -> None:
        if world.deaf:
            raise BrokenPipeError
        stdout.append(text)

    status = run(
        variables,
        read=lambda: stdin,
        write=write,
        complain=stderr.append,
        open_channel=reach(daemon, node=None if world.original else there),
    )
    if world.deaf:
        assert status == 1 or variables["CNI_COMMAND"] != "ADD"
        return None
    return Answer(status, "".join(stdout), "".join(stderr))


def check_answer(command: str, answer: Answer) -> None:
    """A result, or an error object, and nothing else."""
    check_form(answer)
    if answer.status == 1:
        event(f"code {answer.code}")
        return
    event(f"{command} succeeded")
    if command == "VERSION":
        assert answer.stdout == version_text()
    elif command == "ADD":
        assert answer.object["cniVersion"] in SUPPORTED_VERSIONS
        assert any(answer.object.get(key) for key in ("ips", "ip4", "ip6"))
    else:
        assert answer.stdout == ""


def check_nothing_taken(daemon: FakeIpam, command: str, failed: bool) -> None:
    """What a failed ADD was given, it gave back."""
    asked = [type(message) for message in daemon.asked]
    if command == "ADD" and failed and asked and daemon.failure is None:
        assert asked == [AllocatePodIpRequest, DeallocatePodIpRequest]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "cni.log"


def test_whatever_comes_in_a_result_or_an_error_object_goes_out(
    request: pytest.FixtureRequest, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metis.cni.spec.DEFAULT_CNI_LOG_PATH", str(log))
    monkeypatch.setattr("metis.cni.log.DEFAULT_CNI_LOG_PATH", str(log))

    def one(variables: dict[str, str], stdin: bytes, world: World) -> None:
        daemon = FakeIpam()
        answer = call(world, daemon, variables, stdin)
        command = variables["CNI_COMMAND"]
        failed = answer is None or answer.status == 1
        check_nothing_taken(daemon, command, failed)
        if answer is None:
            return
        check_answer(command, answer)
        if failed and world == replace(World(), original=world.original):
            assert answer.code in CODES

    examples = request.config.getoption("--fuzz-examples") or ORDINARY_EXAMPLES
    fuzz(one, examples, world=_worlds)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("n")) as place:
        yield place


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, served: Node) -> Program:
    return installed(tmp_path_factory.mktemp("cni"), served.socket_path)


def test_whatever_comes_into_the_installed_program_a_failed_add_takes_nothing(
    request: pytest.FixtureRequest, served: Node, program: Program
) -> None:
    asked = request.config.getoption("--fuzz-examples")
    examples = PROGRAM_EXAMPLES if asked >= THOROUGH else 5

    def one(variables: dict[str, str], stdin: bytes) -> None:
        try:
            encoded = [os.fsencode(value) for value in variables.values()]
        except UnicodeEncodeError:
            assume(False)
        assume(not any(b"\0" in value for value in encoded))
        try:
            fields: Any = json.loads(stdin)
        except ValueError:
            fields = None
        if isinstance(fields, dict):
            # Where a call may go is not for the fuzz to say: the node has a place.
            fields |= {"logFile": served.log_path, "dbPath": served.db_path}
            if isinstance(fields.get("ipam"), dict):
                fields["ipam"].pop("daemonSocket", None)
            stdin = json.dumps({**fields, "daemonSocket": served.socket_path}).encode()
        before = served.all_owned()
        answer = program(variables, stdin)
        check_answer(variables["CNI_COMMAND"], answer)
        if answer.status == 1 and variables["CNI_COMMAND"] == "ADD":
            assert served.all_owned() == before

    fuzz(one, examples)


def fuzz(one: Any, examples: int, **more: st.SearchStrategy[Any]) -> None:
    """Try a test on many inputs."""
    tested = given(
        variables=_environs(),
        stdin=_stdins(),
        **more,
    )(one)
    settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )(tested)()
