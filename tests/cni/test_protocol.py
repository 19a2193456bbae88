"""Versions, the answer to VERSION, the error object."""

from __future__ import annotations

import json

import pytest

from metis.cni.protocol import (
    NEWEST_VERSION,
    SUPPORTED_VERSIONS,
    CNIError,
    about_text,
    error_text,
    parse_version,
    shown,
    version_text,
)


def test_the_answer_to_version_is_one_compact_line() -> None:
    assert version_text() == (
        '{"cniVersion":"1.1.0","supportedVersions":["0.1.0","0.2.0","0.3.0",'
        '"0.3.1","0.4.0","1.0.0","1.1.0"]}\n'
    )
    assert json.loads(version_text())["supportedVersions"] == list(SUPPORTED_VERSIONS)
    assert NEWEST_VERSION == "1.1.0"


def test_about_names_program_and_versions() -> None:
    lines = about_text("1.2.3").splitlines()
    assert lines[0] == "CNI plugin metis v1.2.3"
    assert lines[1] == (
        "CNI protocol versions supported: "
        "0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0"
    )
    assert "metis --help" in lines[2]


def test_an_error_object_has_four_blanks_and_no_final_newline() -> None:
    error = CNIError(7, "it is wrong", "this is right")
    assert error_text(error, "0.4.0") == (
        '{\n    "cniVersion": "0.4.0",\n    "code": 7,\n'
        '    "msg": "it is wrong",\n    "details": "this is right"\n}'
    )


def test_an_error_object_leaves_out_what_is_not_known() -> None:
    assert json.loads(error_text(CNIError(4, "no"), None)) == {"code": 4, "msg": "no"}


def test_an_error_object_is_strict_json_whatever_was_said() -> None:
    text = error_text(CNIError(4, "a\udcff\n\0é", "\ud800"), None)
    assert text.isascii()
    assert json.loads(text) == {"code": 4, "msg": "a\\udcff\n\0é", "details": "\\ud800"}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("1", (1, 0, 0)),
        ("0.4", (0, 4, 0)),
        ("1.10.2", (1, 10, 2)),
        ("01.0.0", (1, 0, 0)),
    ],
)
def test_versions_compare_as_numbers(text: str, version: tuple[int, int, int]) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(
    "text",
    ["", ".", "1.", "1..0", "1.0.0.0", "v1", "1.0.0-rc1", "-1", "\u0661", "1" * 99],
)
def test_what_is_no_version_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not a version"):
        parse_version(text)


def test_values_are_shown_short_and_printable() -> None:
    assert shown("a\tb") == "'a\\tb'"
    assert shown("\x1b\udcffé").isascii()
    assert len(shown("x" * 10_000)) == 80
    assert shown(["x"] * 100).endswith("...")
