"""Variables and CNI_ARGS, in the order of checks that a runtime can see."""

from __future__ import annotations

import pytest

from metis.cni.environment import REQUIRED, Environment, parse_args, read_environment
from metis.cni.protocol import CNIError
from metis.model import Pod
from tests.cni.calls import NETNS, environ

ATTACHMENT = ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"]


def refused(variables: dict[str, str]) -> CNIError:
    with pytest.raises(CNIError) as caught:
        read_environment(variables)
    assert caught.value.code == 4
    return caught.value


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("ADD", ATTACHMENT),
        ("CHECK", ATTACHMENT),
        ("DEL", ["CNI_CONTAINERID", "CNI_IFNAME", "CNI_PATH"]),
        ("GC", ["CNI_PATH"]),
        ("STATUS", ["CNI_PATH"]),
    ],
)
def test_missing_variables_are_reported_together(
    command: str, missing: list[str]
) -> None:
    error = refused({"CNI_COMMAND": command})
    assert error.message == f"required env variables [{','.join(missing)}] missing"
    assert list(REQUIRED[command]) == missing


def test_a_missing_command_is_a_missing_variable() -> None:
    assert refused({}).message == "required env variables [CNI_COMMAND] missing"


def test_an_empty_variable_is_a_missing_one() -> None:
    error = refused(environ("ADD", CNI_CONTAINERID="", CNI_IFNAME=""))
    assert error.message == (
        "required env variables [CNI_CONTAINERID,CNI_IFNAME] missing"
    )


def test_a_malformed_value_wins_over_missing_ones_before_and_after_it() -> None:
    error = refused({"CNI_COMMAND": "ADD", "CNI_IFNAME": "a/b"})
    assert "CNI_IFNAME 'a/b'" in error.message


def test_the_first_malformed_value_is_named() -> None:
    error = refused(environ("ADD", CNI_CONTAINERID="-x", CNI_IFNAME="a/b"))
    assert "CNI_CONTAINERID '-x'" in error.message


@pytest.mark.parametrize(
    "value",
    ["-c1", ".c1", "_c1", "c 1", "c1\n", "c/1", "cé", "c:1", "c\udcff", "a" * 1025],
)
@pytest.mark.parametrize("command", ["ADD", "CHECK", "DEL"])
def test_a_malformed_container_id_is_refused(command: str, value: str) -> None:
    assert "CNI_CONTAINERID" in refused(environ(command, CNI_CONTAINERID=value)).message


@pytest.mark.parametrize("value", ["c", "9", "a.b_c-D", "a" * 64, "a" * 1024])
def test_a_container_id_may_be(value: str) -> None:
    assert read_environment(environ(CNI_CONTAINERID=value)).container_id == value


@pytest.mark.parametrize(
    "value",
    [
        "sixteen-bytes-xx",
        "ééééééé\u00e9",  # eight characters, sixteen bytes
        ".",
        "..",
        "eth/0",
        "eth:0",
        "eth 0",
        "eth\t0",
        "eth\n",
        "eth\u00a00",
        "eth\u30000",
        "eth\x010",
        "eth\udcff",
        "\ud800eth",
    ],
)
@pytest.mark.parametrize("command", ["ADD", "CHECK", "DEL"])
def test_a_malformed_interface_name_is_refused(command: str, value: str) -> None:
    assert "CNI_IFNAME" in refused(environ(command, CNI_IFNAME=value)).message


@pytest.mark.parametrize(
    "value", ["e", "eth0.100", "fifteen-bytes-x", "ééééééé", "..."]
)
def test_an_interface_name_may_be(value: str) -> None:
    assert read_environment(environ(CNI_IFNAME=value)).interface == value


@pytest.mark.parametrize("command", ["GC", "STATUS", "FROBNICATE"])
def test_junk_in_variables_that_a_command_does_not_need_is_ignored(
    command: str,
) -> None:
    variables = environ(
        command, CNI_CONTAINERID="/", CNI_IFNAME="/", CNI_NETNS="\udcff"
    )
    assert read_environment(variables).command == command


def test_a_namespace_path_that_json_cannot_hold_is_refused_where_it_is_needed() -> None:
    assert "CNI_NETNS" in refused(environ("ADD", CNI_NETNS="/x\udcff")).message
    assert read_environment(environ("DEL", CNI_NETNS="/x\udcff")).netns == "/x\udcff"


def test_an_unknown_command_needs_nothing_else() -> None:
    assert read_environment({"CNI_COMMAND": "add"}) == Environment(command="add")


def test_del_needs_no_namespace() -> None:
    assert read_environment(environ("DEL", CNI_NETNS=None)).netns == ""
    assert read_environment(environ("DEL", CNI_NETNS="")).netns == ""


@pytest.mark.parametrize(
    ("value", "override"),
    [("1", True), ("TRUE", True), ("true", True), ("0", False), ("yes", False)],
)
def test_the_namespace_check_is_lifted_by_true_or_1(value: str, override: bool) -> None:
    env = read_environment(environ(CNI_NETNS_OVERRIDE=value))
    assert env.netns_override is override
    assert env.netns == NETNS


def test_a_value_is_shown_short_and_printable() -> None:
    error = refused(environ(CNI_CONTAINERID="\x1b[2J" * 1000))
    assert len(error.message) < 200
    assert error.message.isprintable()


KUBERNETES = [
    "K8S_POD_NAME=web-0",
    "K8S_POD_NAMESPACE=shop",
    "K8S_POD_INFRA_CONTAINER_ID=abc",
    "K8S_POD_UID=1-2",
]


def test_what_kubernetes_passes_is_accepted_with_and_without_ignore_unknown() -> None:
    assert parse_args(";".join(KUBERNETES)).pod == Pod("web-0", "shop")
    assert parse_args(";".join(["IgnoreUnknown=1", *KUBERNETES])).pod == Pod(
        "web-0", "shop"
    )
    assert parse_args(";".join([*KUBERNETES, "IgnoreUnknown=0"])).pod == Pod(
        "web-0", "shop"
    )


@pytest.mark.parametrize(
    ("text", "pod"),
    [
        ("", Pod()),
        ("IgnoreUnknown=1;FOO=1", Pod()),
        ("FOO=1;IgnoreUnknown=1", Pod()),
        ("FOO=1;IgnoreUnknown=true;K8S_POD_NAME=a", Pod("a")),
        ("FOO=;IgnoreUnknown=TRUE", Pod()),
        ("=x;IgnoreUnknown=1", Pod()),
        ("IgnoreUnknown=0", Pod()),
        ("IgnoreUnknown=0;IgnoreUnknown=1;FOO=1", Pod()),
        ("K8S_POD_NAME=a;K8S_POD_NAME=b", Pod("b")),
        ("K8S_POD_NAME=" + "n" * 253, Pod("n" * 253)),
        ("K8S_POD_NAME=pödchen", Pod("pödchen")),
        ("K8S_POD_NAME=;K8S_POD_NAMESPACE=", Pod()),
        ("IgnoreUnknown=1;K8S_POD_NAME=a;MAC=02:00:00:00:00:01;IP=10.0.0.9", Pod("a")),
        ("IgnoreUnknown=1;FOO=\udcff", Pod()),
    ],
)
def test_args_may_be(text: str, pod: Pod) -> None:
    assert parse_args(text).pod == pod


@pytest.mark.parametrize(
    ("text", "requested"),
    [
        ("IP=", ()),
        ("IP=10.0.0.9", ("10.0.0.9",)),
        ("IP=10.0.0.9/16", ("10.0.0.9",)),
        ("IgnoreUnknown=1;IP=FD00::0009;MAC=02:00:00:00:00:01", ("fd00::9",)),
    ],
)
def test_args_may_ask_for_an_address(text: str, requested: tuple[str, ...]) -> None:
    assert parse_args(text).requested == requested


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("IgnoreUnknown=1;", "''"),
        (";IgnoreUnknown=1", "''"),
        ("IgnoreUnknown=1;FOO", "'FOO'"),
        ("IgnoreUnknown=1;FOO=a=b", "'FOO=a=b'"),
        ("K8S_POD_NAME=a=b", "'K8S_POD_NAME=a=b'"),
        ("FOO=1;BAR=2", "'FOO', 'BAR'"),
        ("FOO=1;IgnoreUnknown=0", "'FOO'"),
        ("FOO=1;IgnoreUnknown=1;IgnoreUnknown=false", "'FOO'"),
        ("k8s_pod_name=a", "'k8s_pod_name'"),
        ("ignoreunknown=1", "'ignoreunknown'"),
        ("IgnoreUnknown=yes", "'IgnoreUnknown=yes'"),
        ("IgnoreUnknown=", "'IgnoreUnknown='"),
        ("IgnoreUnknown=1 ", "'IgnoreUnknown=1 '"),
        ("IP=10.0.0.256", "'IP=10.0.0.256'"),
        ("IP=10.0.0.1,10.0.0.2", "'IP=10.0.0.1,10.0.0.2'"),
        ("K8S_POD_NAME=a\nb", "pod name"),
        ("K8S_POD_NAME=a\udcff", "pod name"),
        ("K8S_POD_NAMESPACE=" + "n" * 1025, "pod namespace"),
    ],
)
def test_args_must_not_be(text: str, named: str) -> None:
    with pytest.raises(CNIError) as caught:
        parse_args(text)
    assert caught.value.code == 4
    assert caught.value.message.startswith("CNI_ARGS: ")
    assert named in caught.value.message


@pytest.mark.parametrize(
    "name",
    [
        "n" * 253,  # as long as a Kubernetes name can be
        "ö" * 253,
        "名" * 253,
        "🐙" * 253,
        "a.b-c_d e",
        "no\u0308rm",  # not composed: names are not normalised
    ],
)
@pytest.mark.parametrize("key", ["K8S_POD_NAME", "K8S_POD_NAMESPACE"])
def test_a_pod_may_be_called_whatever_can_be_printed(key: str, name: str) -> None:
    pod = parse_args(f"IgnoreUnknown=1;{key}={name}").pod
    assert name in (pod.name, pod.namespace)


@pytest.mark.parametrize(
    "key",
    [
        "K8S_POD_NAME",
        "K8S_POD_NAMESPACE",
        "K8S_POD_INFRA_CONTAINER_ID",
        "K8S_POD_UID",
        "IgnoreUnknown",
    ],
)
def test_each_key_of_kubernetes_is_known_without_ignore_unknown(key: str) -> None:
    assert parse_args(f"{key}=1").requested == ()


def test_a_requested_address_is_told_in_the_spelling_that_is_compared() -> None:
    assert parse_args("IP=::ffff:10.0.0.9").requested == ("10.0.0.9",)
    assert parse_args("IP=::ffff:10.0.0.9/112").requested == ("10.0.0.9",)
    with pytest.raises(CNIError, match="invalid address in 'IP=fe80::1%eth0'"):
        parse_args("IP=fe80::1%eth0")
