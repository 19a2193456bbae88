"""The generated parts of a page, between markers that people leave alone. Pure.

<!-- bench: load -->
a table
<!-- end: load -->
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_PART = re.compile(
    r"(<!-- bench: (?P<name>[\w-]+) -->\n).*?(<!-- end: (?P=name) -->)", re.DOTALL
)
_BEGIN = re.compile(r"<!-- bench: ([\w-]+) -->")


def parts(page: str) -> list[str]:
    """The names of the generated parts, in their order."""
    return _BEGIN.findall(page)


def replaced(page: str, texts: Mapping[str, str]) -> str:
    """The page with each of its generated parts written anew.

    Args:
      page: the whole page.
      texts: the parts by name; every one of them and no other must be in the page.

    Raises:
      ValueError: a part is missing, stands twice, has no end, or is not known.
    """
    names = parts(page)
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the part {name!r} begins {names.count(name)} times")
        if name not in texts:
            raise ValueError(
                f"the part {name!r} is not known: it must be one of {', '.join(texts)}"
            )
    for name in texts:
        if name not in names:
            raise ValueError(f"the page lacks the marker <!-- bench: {name} -->")
    written: list[str] = []

    def write(match: re.Match[str]) -> str:
        written.append(match["name"])
        return f"{match[1]}{texts[match['name']].strip()}\n{match[3]}"

    page = _PART.sub(write, page)
    for name in names:
        if name not in written:
            raise ValueError(f"the part {name!r} does not end: <!-- end: {name} -->")
    return page
