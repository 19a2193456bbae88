"""How a database that is damaged, cut or gone becomes one that can be served.

Everything here is for whoever is alone at the database (`metis.store.opening`). A
new database is always made whole under another name, so that a file in its place
which is empty or half made is never our work. Healing moves in steps, each of which
finds the one before it done if the process is killed in between:

  read       what the damaged files tell (`metis.store.salvage`); they keep every byte
  make       "<db>.new": the schema, what was found, closed and on the disk
  set aside  "<db>.damaged-<time>", a second name for the file and its log
  decide     "<db>.new" becomes "<db>.healed": from here on it only goes forward
  replace    the old log goes, "<db>.healed" takes the place of the file

What cannot be read is asked of the node (`evidence`), and addresses without an owner
wait for one cooldown: within it, whoever has one without our knowing is found, or has
stopped sending.

May touch: the database, files beside it, the clock. Logs what it does.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import re
import stat
from collections.abc import Iterator, Sequence

import apsw

from metis.errors import StoreUnavailable
from metis.store import (
    caution,
    connecting,
    rebuilding,
    salvage,
    schema,
    seeding,
    telling,
    traces,
)
from metis.store.arrival import Patient
from metis.store.opening import is_unattended
from metis.store.rebuilding import Claim, Report
from metis.store.salvage import Found

log = logging.getLogger("metis.store")

MOST_DAMAGED = 5
"""Damaged databases that are kept, the latest; a machine that breaks one at every
start shall not fill its disk with them."""

_FILE_MODE = 0o600
_PARTS = ("", "-wal", "-shm", "-journal")
"""Suffixes of the files of a database. The last is of programs that keep no log; left
beside another database, SQLite would undo that one's pages by it."""

_ASIDE = r"\.damaged-(\d{8}T\d{6}Z)(?:-(\d+))?"
"""What the name of a damaged database has more: when it was set aside, in UTC, and
which one it was in that second."""

_REPORT = ".report"
"""Suffix of what is written down about a database that was set aside."""


def look_closely(patient: Patient) -> tuple[bool, str]:
    """See to it that there is a database which SQLite may open.

    Args:
      patient: the database; we are alone at it.

    Returns:
      Whether it was healed, and why commits are missing in it; empty for none.

    Raises:
      StoreUnavailable: there is none and none can be made, or it is damaged and
        cannot be healed now.
    """
    path = patient.path
    with _reported(path):
        if not is_unattended(path):
            if not os.path.exists(path):
                raise StoreUnavailable(
                    f"database {path!r} is gone, and others still have it open: "
                    "a new one is made when they have closed it"
                )
            return False, ""
        traces.forget_second_name(path)
        go_forward(path)
        if not os.path.exists(path):
            return _replace_missing(patient), ""
        found = traces.look(path, patient.clock.boot_id())
        if found.damage:
            heal(patient, found.damage, log_is_foreign=found.log_is_foreign)
            return True, ""
        marker = f"{path}.lost"
        if found.lost:
            _mark(marker)
        elif os.path.exists(marker):
            return False, "commits were lost, and it was not seen to yet"
    return False, found.lost


def heal(patient: Patient, wrong: str, *, log_is_foreign: bool = False) -> Report:
    """Set a damaged database aside, and put one in its place with what it told.

    Args:
      patient: the database; nobody has it open.
      wrong: what is wrong with it, in words.
      log_is_foreign: whether its log is not its own and tells nothing.

    Raises:
      StoreUnavailable: a full disk, or files that cannot be moved.
    """
    path = patient.path
    with _reported(path):
        founds = _gather(path, log_is_foreign=log_is_foreign)
        report = _make(patient, founds, is_missing_something=True)
        if not is_unattended(path):  # a program that knows none of our locks
            raise StoreUnavailable(
                f"database {path!r} is damaged, and others have opened it meanwhile: "
                "it is moved aside when they have closed it"
            )
        aside = _set_aside(path)
        os.rename(f"{path}.new", f"{path}.healed")
        go_forward(path)
    _tell(patient, wrong, founds, report, aside)
    return report


def see_to_lost_commits(
    patient: Patient, writer: apsw.Connection, now_ms: int, lost: str
) -> None:
    """Make up for commits that are gone, though the database is sound.

    Args:
      patient: the database.
      writer: open on it, not in a transaction.
      now_ms: the stored time.
      lost: what is missing, in words.
    """
    claims = patient.claims()
    writer.execute("BEGIN IMMEDIATE")
    adopted, disputed = rebuilding.adopt(writer, now_ms, claims)
    caution.begin(writer, now_ms, now_ms + patient.cooldown_ms)
    writer.execute("COMMIT")
    _say(
        [
            f"database {patient.path} has lost commits: {lost}",
            *telling.of_owners(adopted, disputed),
            telling.of_caution(patient.cooldown_ms, patient.clock.walltime_ms()),
        ]
    )
    with contextlib.suppress(OSError):
        os.unlink(f"{patient.path}.lost")


def damaged_copies(path: str) -> list[str]:
    """The damaged databases that were set aside, oldest first."""
    directory, name = os.path.split(os.path.abspath(path))
    found = [
        (match[1], int(match[2] or 1), one)
        for one in os.listdir(directory)
        if (match := re.fullmatch(re.escape(name) + _ASIDE, one))
    ]
    return [os.path.join(directory, one) for _, _, one in sorted(found)]


def _replace_missing(patient: Patient) -> bool:
    """Make a database where there is none; whether one was lost before it."""
    path = patient.path
    orphan = traces.read_bytes(f"{path}-wal")
    claims = patient.claims()
    had_log = os.path.exists(f"{path}-shm")  # which goes with its database
    if not claims and not orphan and not had_log:
        _make(patient, (), is_missing_something=False)
        _take_place(path)
        return False
    founds = [salvage.scan(b"", orphan, "the log that is left")] if orphan else []
    report = _make(patient, founds, is_missing_something=True, claims=claims)
    aside = _set_aside(path)
    os.rename(f"{path}.new", f"{path}.healed")
    go_forward(path)
    _tell(patient, "it is gone, and was in use", founds, report, aside)
    return True


def _gather(path: str, *, log_is_foreign: bool) -> list[Found]:
    """What the damaged files tell, the best source first."""
    image = traces.read_bytes(path)
    log_of_it = b"" if log_is_foreign else traces.read_bytes(f"{path}-wal")
    founds: list[Found] = []
    if log_of_it:
        with traces.second_name(path) as name:
            founds += _read(name, "the file with its log")
        if not founds or founds[0].problems:
            founds.append(salvage.scan(image, log_of_it, "what its pages are by both"))
    alone = _read(f"file:{_quoted(path)}?immutable=1", "the file alone")
    founds += alone
    if not alone or alone[0].problems:
        founds.append(salvage.scan(image, b"", "what its pages are"))
    return founds


def _read(name: str, source: str) -> list[Found]:
    """What SQLite can read; nothing where it cannot even begin."""
    flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    try:
        connection = apsw.Connection(name, flags=flags)
    except apsw.Error:
        return []
    try:
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        found = salvage.read(connection, source)
    except apsw.Error:
        return []
    finally:
        connecting.close(connection)
    return [found] if found.blocks or found.rows or not found.problems else []


def _make(
    patient: Patient,
    founds: Sequence[Found],
    *,
    is_missing_something: bool,
    claims: Sequence[Claim] | None = None,
) -> Report:
    """Make "<db>.new", whole, closed and on the disk."""
    clock, new = patient.clock, f"{patient.path}.new"
    begin_file(new)
    boot_id, boottime_ms = clock.boot_id(), clock.boottime_ms()
    boots = [found.boot for found in founds if found.boot is not None]
    offsets = [offset for boot, offset in boots if boot == boot_id]
    is_of_former_boot = bool(boots) and not offsets
    what = f"database {new!r} cannot be made"
    try:
        writer = connecting.connect(new, apsw.SQLITE_OPEN_READWRITE)
    except apsw.Error as error:
        raise connecting.translated(error, what) from None
    try:
        seeding.register(writer)
        writer.pragma("journal_mode", "memory")
        # Names this file and no other, by which a foreign log is told from its own.
        writer.pragma("application_id", int.from_bytes(os.urandom(4), "big") >> 1)
        writer.pragma("synchronous", "FULL")
        writer.execute("BEGIN IMMEDIATE")
        offset_ms = schema.prepare(
            writer,
            boot_id=boot_id,
            boottime_ms=boottime_ms,
            walltime_ms=clock.walltime_ms(),
            cooldown_ms=patient.cooldown_ms,
        )
        if offsets:
            offset_ms = offsets[0]
            writer.execute("UPDATE metis_boot SET offset_ms = ?", (offset_ms,))
        now_ms = boottime_ms + offset_ms
        is_cautious = is_missing_something and not is_of_former_boot
        if claims is None:
            claims = patient.claims() if is_cautious else ()
        report = rebuilding.rebuild(
            writer,
            founds,
            now_ms=now_ms,
            cautious_until=now_ms + patient.cooldown_ms if is_cautious else None,
            claims=claims,
        )
        writer.execute("COMMIT")
        connecting.enter_wal_mode(writer)
    except apsw.Error as error:
        raise connecting.translated(error, what) from None
    finally:
        connecting.close(writer)
    return report


def _take_place(path: str) -> None:
    """Let "<db>.new" be the database, unless another has come to be meanwhile."""
    with contextlib.suppress(FileExistsError):
        try:
            os.link(f"{path}.new", path)
        except FileExistsError:
            raise
        except OSError:  # no hard links here; of metis, we are alone
            os.rename(f"{path}.new", path)
    for name in (f"{path}.new", f"{path}.lost"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _set_aside(path: str) -> str:
    """Give the damaged files a second name; tell which.

    Raises:
      OSError: not all of them can have one; none was given.
    """
    copies = damaged_copies(path)
    aside = _name_aside(path, copies)
    given: list[str] = []
    try:
        for suffix in _PARTS:
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                traces.link(path + suffix, aside + suffix)
                given.append(aside + suffix)
                os.chmod(aside + suffix, _FILE_MODE)
    except OSError:
        for name in given:
            os.unlink(name)
        raise
    others = [one for one in copies if one != aside]
    for old in others[: max(len(others) - MOST_DAMAGED + 1, 0)]:
        log.warning("removing %s: %d later ones are kept", old, MOST_DAMAGED)
        for suffix in (*_PARTS, _REPORT):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(old + suffix)
    return aside


def _name_aside(path: str, copies: Sequence[str]) -> str:
    """A new name for damaged files, or the one that they were given already.

    Whoever is killed over it again and again would drive out all others.
    """
    with contextlib.suppress(OSError):
        if copies and os.path.samefile(copies[-1], path):
            return copies[-1]
    first = f"{path}.damaged-{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%SZ}"
    same = [one for one in copies if one == first or one.startswith(f"{first}-")]
    number = int(same[-1][len(first) + 1 :] or 1) + 1 if same else 1
    while True:  # a log that came without a file has a name as well
        aside = first if number == 1 else f"{first}-{number}"
        if not any(os.path.lexists(aside + suffix) for suffix in _PARTS):
            return aside
        number += 1


def begin_file(new: str) -> None:
    """Make an empty file for a new database, in place of whatever was left there.

    Raises:
      OSError: it cannot be made.
    """
    for suffix in _PARTS:  # of somebody who was killed at it
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new + suffix)
    os.mknod(new, stat.S_IFREG | _FILE_MODE)


def go_forward(path: str) -> None:
    """Put a database that is made and decided upon into its place."""
    healed = f"{path}.healed"
    if not os.path.exists(healed):
        return
    for suffix in _PARTS[1:]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + suffix)
    os.rename(healed, path)
    with contextlib.suppress(FileNotFoundError):  # it is of the one before
        os.unlink(f"{path}.lost")
    connecting.flush(os.path.dirname(os.path.abspath(path)))


def _mark(marker: str) -> None:
    """Note that commits are lost, until that has been seen to."""
    os.close(os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE))


def _tell(
    patient: Patient, wrong: str, founds: Sequence[Found], report: Report, aside: str
) -> None:
    """Say it loudly, and write it down beside what was set aside.

    A plugin's log messages reach nobody, as a rule.
    """
    lines = telling.of_healing(patient.path, wrong, founds, report, aside)
    if report.cautious_until is not None:
        lines.append(
            telling.of_caution(patient.cooldown_ms, patient.clock.walltime_ms())
        )
    _say(lines)
    with contextlib.suppress(OSError):  # a full disk, as it may have begun
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(aside + _REPORT, flags, _FILE_MODE)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)


def _say(lines: Sequence[str]) -> None:
    for line in lines:
        log.error("%s", line)


@contextlib.contextmanager
def _reported(path: str) -> Iterator[None]:
    """Turn an error of the operating system into one of ours."""
    try:
        yield
    except OSError as error:
        name = error.filename or path
        raise StoreUnavailable(
            f"database {path!r} cannot be opened: {name}: {error.strerror}"
        ) from error


def _quoted(path: str) -> str:
    """A path in a URI of SQLite."""
    return path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
