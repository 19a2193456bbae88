"""What libcni's cache tells of who has which address, and what it does not."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metis.cni import cache
from metis.model import CIDRBlock, Owner, Pod
from metis.store.rebuilding import Claim

DB = "/var/lib/cni/metis/metis.sqlite"
"""Where the database is unless the configuration says otherwise."""


@pytest.fixture
def results(tmp_path: Path) -> Path:
    directory = tmp_path / "results"
    directory.mkdir()
    return directory


@pytest.fixture
def netns(tmp_path: Path) -> str:
    """The namespace of a container that lives."""
    path = tmp_path / "netns" / "cni-1"
    path.parent.mkdir()
    path.touch()
    return str(path)


def ipam(**fields: Any) -> dict[str, Any]:
    return {"type": "metis", **fields}


def configuration(section: dict[str, Any]) -> dict[str, Any]:
    main = {"type": "ptp", "ipam": section}
    return {"name": "podnet", "plugins": [main, {"type": "portmap"}]}


def result(address: str, sandbox: str) -> dict[str, Any]:
    """As ptp makes it: the host's interface first."""
    return {
        "cniVersion": "1.0.0",
        "interfaces": [{"name": "veth1"}, {"name": "eth0", "sandbox": sandbox}],
        "ips": [{"address": address, "interface": 1}],
    }


def write(
    results: Path,
    answer: dict[str, Any],
    config: dict[str, Any],
    container: str = "c1",
    **fields: Any,
) -> Path:
    """A file as libcni 1.1.2 writes it."""
    entry = {
        "kind": "cniCacheV1",
        "containerId": container,
        "config": base64.b64encode(json.dumps(config).encode()).decode(),
        "ifName": "eth0",
        "networkName": "podnet",
        "cniArgs": [
            ["IgnoreUnknown", "1"],
            ["K8S_POD_NAMESPACE", "shop"],
            ["K8S_POD_NAME", "web-0"],
        ],
        "result": answer,
        **fields,
    }
    path = results / f"podnet-{container}-eth0"
    path.write_text(json.dumps(entry))
    return path


def test_an_attachment_claims_its_address(results: Path, netns: str) -> None:
    ranges = [[{"subnet": "10.1.0.0/20"}]]
    write(results, result("10.1.0.7/20", netns), configuration(ipam(ranges=ranges)))
    assert cache.claims(str(results), DB) == [
        Claim(
            Owner("default", "c1", "eth0"),
            Pod("web-0", "shop"),
            CIDRBlock.parse("10.1.0.0/20"),
            "10.1.0.7",
            netns,
        )
    ]


def test_without_ranges_the_prefix_tells_the_block(results: Path, netns: str) -> None:
    write(results, result("10.1.3.7/22", netns), configuration(ipam()))
    (claim,) = cache.claims(str(results), DB)
    assert claim.block.cidr == "10.1.0.0/22"


def test_both_families_of_any_version_are_claimed(results: Path, netns: str) -> None:
    config = configuration(ipam(network="blue"))
    old = {
        "cniVersion": "0.2.0",
        "ip4": {"ip": "10.1.0.7/24"},
        "ip6": {"ip": "FD00::7/64"},
    }
    write(results, old, config, netns=netns)
    claims = cache.claims(str(results), DB)
    assert [(one.address, one.block.cidr) for one in claims] == [
        ("10.1.0.7", "10.1.0.0/24"),
        ("fd00::7", "fd00::/64"),
    ]
    assert {one.owner.network for one in claims} == {"blue"}


def test_a_single_plugin_is_a_configuration_too(results: Path, netns: str) -> None:
    config = {
        "name": "podnet",
        "type": "/opt/cni/bin/metis",
        "ipam": {"subnet": "10.1.0.0/24"},
    }
    write(results, result("10.1.0.7/24", netns), config)
    assert len(cache.claims(str(results), DB)) == 1


def test_only_what_came_from_this_database_counts(results: Path, netns: str) -> None:
    for number, section in enumerate(
        [
            {"type": "host-local", "subnet": "10.1.0.0/24"},
            ipam(dbPath="/elsewhere/metis.sqlite"),
            ipam(ranges=[[{"subnet": "10.2.0.0/24"}]]),  # not from its ranges
        ]
    ):
        config = configuration(section)
        write(results, result("10.1.0.7/24", netns), config, f"c{number}")
    write(results, result("10.1.0.8/24", netns), {"name": "x", "type": "bridge"}, "c8")
    write(results, result("10.1.0.9/24", netns), configuration(ipam()), "c9", kind="?")
    assert cache.claims(str(results), DB) == []
    (claim,) = cache.claims(str(results), "/elsewhere/metis.sqlite")
    assert claim.owner.container_id == "c1"


def test_what_came_over_the_daemon_s_socket_counts(results: Path, netns: str) -> None:
    """The daemon's database may be where no configuration says."""
    config = configuration(ipam(daemonSocket="/run/metis.sock"))
    write(results, result("10.1.0.7/24", netns), config)
    assert cache.claims(str(results), "/data/db", "/run/other.sock") == []
    assert len(cache.claims(str(results), "/data/db", "/run/metis.sock")) == 1


def test_an_attachment_whose_namespace_is_gone_claims_nothing(
    results: Path, netns: str
) -> None:
    gone = os.path.join(os.path.dirname(netns), "cni-2")
    write(results, result("10.1.0.7/24", gone), configuration(ipam()))
    assert cache.claims(str(results), DB) == []


@pytest.mark.parametrize("sandbox", ["/proc/999999999/ns/net", "", "relative"])
def test_a_namespace_that_proves_nothing_keeps_its_claim(
    results: Path, sandbox: str
) -> None:
    answer = {"ips": [{"address": "10.1.0.7/24"}]}
    write(results, answer, configuration(ipam()), netns=sandbox)
    assert len(cache.claims(str(results), DB)) == 1


def test_a_directory_of_namespaces_that_cannot_be_seen_proves_nothing(
    results: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for number, name in enumerate(["empty", "missing"]):
        answer = result(f"10.1.0.{number}/24", str(tmp_path / name / "cni-1"))
        write(results, answer, configuration(ipam()), f"c{number}")
    assert len(cache.claims(str(results), DB)) == 2
    for path in results.iterdir():  # from before this boot, which nobody outlived
        os.utime(path, (1_000_000_000, 1_000_000_000))
    assert cache.claims(str(results), DB) == []


def test_addresses_of_other_interfaces_are_not_claimed(
    results: Path, netns: str
) -> None:
    answer = result("10.1.0.7/24", netns)
    answer["ips"] += [
        {"address": "10.1.0.1/24", "interface": 0},
        {"address": "10.1.0.2/24", "interface": 7},
    ]
    write(results, answer, configuration(ipam()))
    assert [one.address for one in cache.claims(str(results), DB)] == ["10.1.0.7"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 4096,
        b"[" * 100_000,
        b"[]",
        b"null",
        b'{"kind": "cniCacheV1"}',
        b'{"kind": "cniCacheV1", "config": 7}',
        b'{"kind": "cniCacheV1", "config": "%%%"}',
        b'{"kind": "cniCacheV1", "config": "e30"}',
        b"\xff\xfe",
    ],
)
def test_nonsense_tells_nothing_and_hides_nothing(
    results: Path, netns: str, content: bytes
) -> None:
    (results / "a-nonsense").write_bytes(content)
    write(results, result("10.1.0.7/24", netns), configuration(ipam()))
    assert len(cache.claims(str(results), DB)) == 1


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {"ips": 7},
        {"ips": [7]},
        {"ips": [{"address": "10.1.0.7"}, {"address": "nonsense/24"}]},
        {"ips": [{"address": 7}]},
        {"interfaces": 7},
        {"interfaces": [7], "ips": [{"address": "10.1.0.7/24", "interface": 0}]},
        {"ip4": "10.1.0.7/24"},
    ],
)
def test_a_result_that_makes_no_sense_claims_nothing(
    results: Path, netns: str, answer: Any
) -> None:
    write(results, answer, configuration(ipam()), "a")
    write(results, result("10.1.0.9/24", netns), configuration(ipam()), "b")
    claims = [one for one in cache.claims(str(results), DB) if "." in one.address]
    assert [one.owner.container_id for one in claims][-1] == "b"
    assert len([one for one in claims if one.owner.container_id == "a"]) <= 1


@pytest.mark.parametrize("container", ["", "x" * 2000, "a\nb"])
def test_an_owner_that_cannot_be_one_claims_nothing(
    results: Path, netns: str, container: str
) -> None:
    path = write(results, result("10.1.0.7/24", netns), configuration(ipam()))
    entry = json.loads(path.read_text())
    path.write_text(json.dumps(entry | {"containerId": container}))
    assert cache.claims(str(results), DB) == []


def test_what_is_no_file_of_reasonable_size_is_not_read(
    results: Path, netns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(results, result("10.1.0.7/24", netns), configuration(ipam()))
    (results / "directory").mkdir()
    os.mkfifo(results / "pipe")
    (results / "link").symlink_to(path)
    assert len(cache.claims(str(results), DB)) == 1
    monkeypatch.setattr(cache, "MOST_BYTES", 100)
    assert cache.claims(str(results), DB) == []


def test_so_many_files_are_read_and_no_more(
    results: Path, netns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        answer = result(f"10.1.0.{number}/24", netns)
        write(results, answer, configuration(ipam()), f"c{number}")
    monkeypatch.setattr(cache, "MOST_FILES", 3)
    assert len(cache.claims(str(results), DB)) == 3


@pytest.mark.parametrize("directory", ["", "/nowhere"])
def test_where_no_runtime_has_been_nothing_is_told(directory: str) -> None:
    assert cache.claims(directory, DB) == []


def test_a_pod_of_a_strange_name_has_its_address_all_the_same(
    results: Path, netns: str
) -> None:
    arguments = [["K8S_POD_NAME", "a\nb"], ["K8S_POD_NAME"], 7]
    config = configuration(ipam())
    write(results, result("10.1.0.7/24", netns), config, cniArgs=arguments)
    (claim,) = cache.claims(str(results), DB)
    assert claim.pod == Pod()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)

KEYS = [
    "kind", "containerId", "config", "ifName", "cniArgs", "capabilityArgs", "result",
    "netns",
]  # fmt: skip
RESULT_KEYS = ["interfaces", "ips", "ip4", "ip6"]
IPAM_KEYS = ["type", "dbPath", "daemonSocket", "network", "subnet", "ranges"]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_stands_in_a_file_it_does_no_harm(
    results: Path, netns: str, data: st.DataObject
) -> None:
    section = ipam() | data.draw(st.dictionaries(st.sampled_from(IPAM_KEYS), JSON))
    answer = result("10.1.0.7/24", netns) | data.draw(
        st.dictionaries(st.sampled_from(RESULT_KEYS), JSON)
    )
    path = write(results, answer, configuration(section))
    entry = json.loads(path.read_text())
    drawn = data.draw(st.dictionaries(st.sampled_from(KEYS), JSON))
    path.write_text(json.dumps(entry | drawn))
    for claim in cache.claims(str(results), DB):
        assert claim.block.offset_of(claim.address) is not None
