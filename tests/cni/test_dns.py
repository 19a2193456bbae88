"""resolv.conf as host-local reads it, and the file that it stands in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from metis.cni.dns import DNS, parse_resolv_conf
from metis.cni.protocol import CNIError
from metis.cni.resolver import MAX_BYTES, read_resolv_conf


@pytest.mark.parametrize(
    ("text", "dns"),
    [
        ("", DNS()),
        ("nameserver 10.0.0.53", DNS(("10.0.0.53",))),
        ("nameserver 10.0.0.53\nnameserver ::1\n", DNS(("10.0.0.53", "::1"))),
        ("domain a.example\ndomain b.example\n", DNS(domain="b.example")),
        ("search a b\n search c\r\n", DNS(search=("a", "b", "c"))),
        ("options a b\noptions c", DNS(options=("a", "b", "c"))),
        ("# nameserver 1\n; nameserver 2\n#\n", DNS()),
        ("nameserver\nsearch\nsortlist 10.0.0.0\n\n  \n", DNS()),
        ("\tnameserver\t10.0.0.53  10.0.0.54\n", DNS(("10.0.0.53",))),
    ],
)
def test_a_resolv_conf_is_read_line_by_line(text: str, dns: DNS) -> None:
    assert parse_resolv_conf(text) == dns


def refused(path: Path | str) -> CNIError:
    with pytest.raises(CNIError, match=r"^ipam\.resolvConf '") as caught:
        read_resolv_conf(str(path))
    return caught.value


def test_the_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "resolv.conf"
    path.write_text("nameserver 10.0.0.53\n")
    assert read_resolv_conf(str(path)) == DNS(("10.0.0.53",))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = refused(tmp_path / "absent")
    assert missing.code == 5
    assert "No such file" in missing.message
    assert refused(tmp_path).code == 7
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "is not a file" in refused(pipe).message  # and nobody waits for a writer


def test_a_file_is_bounded_and_must_be_a_text(tmp_path: Path) -> None:
    path = tmp_path / "resolv.conf"
    path.write_bytes(b"#" * MAX_BYTES)
    assert read_resolv_conf(str(path)) == DNS()
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    assert refused(path).code == 7
    assert "bytes" in refused(path).message
    path.write_bytes(b"nameserver \xff\n")
    assert "UTF-8" in refused(path).message
    assert refused("/dev/zero").code == 7
