"""`metis.cni.invocation`: what is remembered of one call for the next."""

from __future__ import annotations

import json

import pytest

from metis.cni import spec
from metis.cni.environment import read_environment
from metis.cni.invocation import (
    REMEMBERED_BYTES,
    REMEMBERED_CONFIGURATIONS,
    Invocation,
    _configure,
    _decode,
)
from metis.cni.protocol import CNIError
from metis.cni.spec import Request
from tests.cni.calls import Config, config, environ

VARIABLES = (
    environ(CNI_ARGS="IgnoreUnknown=1;K8S_POD_NAME=a;IP=10.240.0.9"),
    environ(CNI_CONTAINERID="c2", CNI_ARGS="K8S_POD_NAME=b"),
    environ("DEL", CNI_CONTAINERID="c3"),
    environ("STATUS"),
)
FIELDS = config("1.1.0", args={"cni": {"ips": ["10.240.0.7"]}})


@pytest.fixture(autouse=True)
def forgetful() -> None:
    _decode.cache_clear()
    _configure.cache_clear()


def prepared(
    fields: Config, variables: dict[str, str], program: str = "metis"
) -> Request:
    stdin = json.dumps(fields).encode()
    return Invocation(variables, program).prepare(lambda: stdin)


def test_what_is_remembered_makes_the_same_requests() -> None:
    for _ in range(2):
        for variables in VARIABLES:
            for program in ("metis", "ptp"):
                assert prepared(FIELDS, variables, program) == spec.read_request(
                    read_environment(variables), FIELDS, program=program
                )
    # of the second time, all
    assert _decode.cache_info().misses == 1
    assert _configure.cache_info().misses == 6  # of three commands and two names
    assert _configure.cache_info().hits == 10


def test_an_error_is_told_again_each_time() -> None:
    wrong = config(ipam={"type": "metis", "ranges": [[{"subnet": "10.0.0.0/99"}]]})
    for _ in range(2):
        with pytest.raises(CNIError, match=r"10\.0\.0\.0/99"):
            prepared(wrong, environ())
        with pytest.raises(CNIError, match="unknown keys 'x'"):
            prepared(FIELDS, environ(CNI_ARGS="x=y"))
    assert prepared(wrong, environ("DEL")).wanted == ()


@pytest.mark.parametrize(
    "fields", [{"prevResult": {"ips": []}}, {"comment": "x" * REMEMBERED_BYTES}]
)
def test_what_is_long_or_never_comes_again_is_not_remembered(fields: Config) -> None:
    for _ in range(2):
        assert prepared(config(**fields), environ("DEL")).network == "default"
    assert _decode.cache_info().currsize == 0
    assert _configure.cache_info().currsize == 0


def test_a_bounded_number_is_remembered() -> None:
    for number in range(REMEMBERED_CONFIGURATIONS + 1):
        prepared(config(name=f"net{number}"), environ())
    assert _decode.cache_info().currsize == REMEMBERED_CONFIGURATIONS
    assert _configure.cache_info().currsize == REMEMBERED_CONFIGURATIONS
