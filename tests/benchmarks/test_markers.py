from __future__ import annotations

import pytest

from benchmarks.markers import parts, replaced

PAGE = """# Title

Prose before.

<!-- bench: load -->
old

table
<!-- end: load -->

Prose between.

<!-- bench: cni -->
<!-- end: cni -->

Prose after.
"""


def test_only_what_is_between_markers_changes() -> None:
    page = replaced(PAGE, {"load": "| a |\n", "cni": "| b |"})
    assert page == (
        PAGE.replace("old\n\ntable\n", "| a |\n").replace(
            "<!-- bench: cni -->\n", "<!-- bench: cni -->\n| b |\n"
        )
    )


def test_writing_twice_changes_nothing_more() -> None:
    texts = {"load": "a \\1 table", "cni": "b"}
    once = replaced(PAGE, texts)
    assert replaced(once, texts) == once
    assert parts(once) == ["load", "cni"]


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        (PAGE.replace("bench: cni", "bench: cnj"), "'cnj' is not known"),
        (PAGE.replace("<!-- bench: cni -->\n", ""), "lacks the marker <!-- bench: cni"),
        (PAGE.replace("<!-- end: load -->\n", ""), "'load' does not end"),
        (PAGE + PAGE, "'load' begins 2 times"),
    ],
)
def test_a_page_with_a_broken_marker_is_refused(page: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        replaced(page, {"load": "", "cni": ""})
