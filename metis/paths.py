"""Paths that root was told to use, and links that lead out of root's hands.

A file whose path goes through a symbolic link is where the link says. If others may
write to a directory on that way, they decide what root opens, binds or appends to.
Such a path is refused before it is used. A plain path is taken as it is, also below
/tmp: whoever wrote it said where it leads.

A path is looked at, and used a moment later. That is enough here: the paths are
root's own words, and what is found out is a mistake in them, not a race.

Touches: asks the file system what stands there (lstat, readlink), and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass

from metis.errors import InvalidRequest

MAX_LINKS = 40
"""Links that Linux follows in one path at most (path_resolution(7))."""


def refuse_exposed_links(name: str, path: str) -> None:
    """Refuse a path with a link that others may move, or that leads to their place.

    Refused is every path that comes by a symbolic link which lies in or below a
    directory that others may write to (mode o+w, with or without the sticky bit), or
    which leads into or through one. A path that cannot be followed to its end is
    judged as far as it goes: whoever opens it has more to say about that.

    Args:
      name: what the path is called where it was configured, for the message.
      path: the path, relative or absolute; it need not exist.

    Raises:
      InvalidRequest: says which link it is, where it leads, and what would be right.
    """
    walk = _Walk()
    with contextlib.suppress(OSError, ValueError):
        if _has_link(path):
            walk.follow(path)
    if walk.exposed:
        raise InvalidRequest(
            f"{name} is {path!r}: the link {walk.link!r} leads to {walk.target!r}, "
            f"and others may write to {walk.exposed!r}: write the path of a place "
            "that root alone may write to, or one without a link"
        )


def exposed_directory_of(path: str) -> str | None:
    """The directory of a file, if anybody may put another in the file's place.

    Others may write to it, and no sticky bit keeps them off what is not theirs.
    """
    directory = os.path.dirname(os.path.abspath(path))
    try:
        mode = os.stat(directory).st_mode
    except OSError:
        return None
    is_exposed = mode & stat.S_IWOTH and not mode & stat.S_ISVTX
    return directory if is_exposed else None


def _has_link(path: str) -> bool:
    """Whether there is a symbolic link on the way; as a rule, none.

    Raises:
      OSError: the way ends before the path does.
      ValueError: it is no path.
    """
    end = 0
    while end >= 0:
        end = path.find("/", end + 1)
        here = os.lstat(path if end < 0 else path[:end])
        if stat.S_ISLNK(here.st_mode):
            return True
    return False


@dataclass(slots=True)
class _Walk:
    """The way along a path, as the kernel takes it.

    Attributes:
      link: the first symbolic link on the way; empty as long as there is none.
      target: what stands in that link.
      exposed: the first directory that others may write to, of those that the link
        lies in or that were passed through since; empty for none.
    """

    link: str = ""
    target: str = ""
    exposed: str = ""

    def follow(self, path: str) -> None:
        """Go to the end of the path, or of MAX_LINKS.

        Raises:
          OSError: the way ends before the path does.
          ValueError: it is no path.
        """
        ahead = _parts(path)
        at = "/" if path.startswith("/") else os.getcwd()
        links = 0
        while ahead and links <= MAX_LINKS:
            if self.link:
                self._look_at(at)
            part = ahead.pop()
            here = os.path.dirname(at) if part == ".." else os.path.join(at, part)
            if not stat.S_ISLNK(os.lstat(here).st_mode):
                at = here
                continue
            links += 1
            target = os.readlink(here)
            if not self.link:
                self.link, self.target = here, target
                self._look_at(at)
            ahead += _parts(target)
            at = "/" if target.startswith("/") else at
        if self.link:
            self._look_at(at)

    def _look_at(self, directory: str) -> None:
        """Take note of a directory, if it or one above it is exposed."""
        while not self.exposed:
            mode = os.lstat(directory).st_mode
            if stat.S_ISDIR(mode) and mode & stat.S_IWOTH:
                self.exposed = directory
            if directory == "/":
                break
            directory = os.path.dirname(directory)


def _parts(path: str) -> list[str]:
    """The components of a path, the last one first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]
