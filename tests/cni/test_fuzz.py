"""Whatever a runtime sends, it gets a result or an error object back."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from metis.cni.protocol import SUPPORTED_VERSIONS, version_text
from tests.cni.calls import config, environ
from tests.cni.fakes import FakeIpam, reach
from tests.cni.process import Process

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
            st.sampled_from(["IgnoreUnknown=1", "K8S_POD_NAME=a", "FOO=1", "=", ""])
        ).map(";".join),
        st.text(max_size=30),
    ),
}
_cidrs = st.sampled_from(
    ["10.240.0.0/22", "fd00:10::/64", "10.0.0.1/31", "::/0", "0.0.0.0/0", "x", "1/2/3"]
)
_members = {
    ("name",): _junk,
    ("cniVersion",): st.one_of(st.sampled_from(SUPPORTED_VERSIONS), _junk),
    ("type",): st.sampled_from(["ptp", "metis"]),
    ("ipam",): _junk,
    ("ipam", "ranges"): st.one_of(
        st.lists(st.lists(st.fixed_dictionaries({"subnet": _cidrs})), max_size=3), _junk
    ),
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


@st.composite
def _environs(draw: st.DrawFn) -> dict[str, str]:
    keys = draw(st.sets(st.sampled_from(sorted(_variables)), max_size=2))
    return environ() | {key: draw(_variables[key]) for key in sorted(keys)}


@st.composite
def _stdins(draw: st.DrawFn) -> bytes:
    version = draw(st.sampled_from(SUPPORTED_VERSIONS))
    fields = config(version, prevResult={"ips": [{"address": "10.240.0.2/22"}]})
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
    cut = draw(st.one_of(st.just(0), st.just(0), st.integers(1, len(data))))
    return data[: len(data) - cut]


@settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(variables=_environs(), stdin=st.one_of(_stdins(), _stdins(), st.binary()))
def test_whatever_comes_in_a_result_or_an_error_object_goes_out(
    variables: dict[str, str],
    stdin: bytes,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    log = tmp_path_factory.getbasetemp() / "fuzz.log"
    monkeypatch.setattr("metis.cni.spec.DEFAULT_CNI_LOG_PATH", str(log))
    process = Process(reach(FakeIpam()))
    answer = process.call(variables, stdin)
    if process.status == 0:
        event(f"{variables['CNI_COMMAND']} succeeded")
        command = variables["CNI_COMMAND"]
        if command == "VERSION":
            assert process.stdout == [version_text()]
        elif command == "ADD":
            assert answer["cniVersion"] in SUPPORTED_VERSIONS
            assert answer.get("ips") or answer.get("ip4") or answer.get("ip6")
        else:
            assert answer is None
    else:
        event(f"code {answer['code']}")
        assert process.status == 1
        assert set(answer) <= {"cniVersion", "code", "msg", "details"}
        assert answer["code"] in {1, 4, 6, 7, 8, 11, 100, 101}  # never 999
        assert answer["msg"]
        assert "Traceback" not in process.stdout[0]
