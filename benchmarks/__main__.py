"""All benchmarks of the installed program, against yardsticks of the same run.

Single times mean little from one machine to the next, so every figure stands
beside one of a bare interpreter, of host-local, or of a bare grpclib server
that was taken in turn with it. Without arguments everything is measured and told;
with names of sections, only those.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from benchmarks import (
    cni_calls,
    daemon_load,
    embedded,
    footprint,
    guard,
    markers,
    pools,
    record,
    sampling,
    tables,
    turns,
)
from benchmarks.goals import GOALS
from benchmarks.machine import in_words, machine
from benchmarks.measures import markdown_table, median
from benchmarks.one_cpu import one_cpu
from benchmarks.series import Rounds, Series, spread
from benchmarks.servers import (
    Start,
    StartFailedError,
    bare_server,
    metis_daemon,
    metis_program,
    running_server,
)
from benchmarks.settings import FULL, QUICK, Settings

SERVERS: Mapping[str, Start] = {"metis": metis_daemon, "bare": bare_server}

SECTIONS: Mapping[str, Callable[[Settings], Rounds]] = {
    "load": partial(daemon_load.measure, servers=SERVERS),
    "cpu": partial(turns.measure, servers=SERVERS),
    "flat": pools.measure,
    "footprint": footprint.measure,
    "embedded": embedded.measure,
    "cni": cni_calls.measure,
    "profile": sampling.measure,
}

ONLY_WHOLE = {"profile"}
"""Sections that a quick run leaves out unless they are named."""

RECORDED_QUICK_RUNS = 3
"""Quick runs whose median the guard compares with later."""

PAGE = Path("docs/performance.md")
PLOTS = Path("docs/performance")


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, or the end of the program with a message."""
    parser = argparse.ArgumentParser(prog="nox -s bench --", description=__doc__)
    add = parser.add_argument
    add("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    add("--quick", action="store_true", help="fewer calls, and not what takes long")
    add("--rounds", type=int, metavar="N", help="turns, whose median counts")
    add("--json", type=Path, metavar="FILE", help="write the figures to this file")
    add(
        "--guard",
        action="store_true",
        help="with --quick: fail when a ratio is much worse than recorded",
    )
    add(
        "--record",
        action="store_true",
        help=f"measure everything and write benchmarks/{record.RECORDED.name}",
    )
    add(
        "--write-docs",
        action="store_true",
        help=f"write what is recorded into {PAGE}, and draw its plots",
    )
    add("--compare", type=Path, metavar="SOCKET", help="another daemon, that runs")
    add("--other-pid", type=int, metavar="PID", help="its process, for its CPU time")
    args = parser.parse_args(argv)
    for section in args.sections:
        if section not in SECTIONS:
            parser.error(
                f"{section!r} is not a section: it must be one of {', '.join(SECTIONS)}"
            )
    complaint = _complaint(args)
    if complaint:
        parser.error(complaint)
    return args


def _complaint(args: argparse.Namespace) -> str:
    """What does not go together, or nothing."""
    chosen = [
        flag
        for flag, given in (
            ("--guard", args.guard),
            ("--record", args.record),
            ("--compare", args.compare is not None),
        )
        if given
    ]
    if len(chosen) > 1:
        return f"{' and '.join(chosen)} are different runs: give one of them"
    if chosen and args.sections:
        return f"{chosen[0]} measures what it needs: give no sections"
    if args.guard and not args.quick:
        return "--guard compares quick runs with quick runs: give --quick, too"
    if args.record and args.quick:
        return "--record measures everything: leave out --quick"
    if args.write_docs and not args.record and (chosen or args.sections or args.quick):
        return "--write-docs tells what is recorded: give it alone, or with --record"
    if args.rounds is not None and args.rounds < 1:
        return f"--rounds is {args.rounds}: it must be 1 or more"
    if args.json is not None and not args.json.parent.is_dir():
        return f"--json {args.json}: {args.json.parent} is not a directory"
    if args.other_pid is not None and args.compare is None:
        return "--other-pid belongs to --compare SOCKET"
    if args.other_pid is not None and not Path(f"/proc/{args.other_pid}").exists():
        return f"--other-pid {args.other_pid}: there is no such process"
    if args.compare is not None and not _is_socket(args.compare):
        return f"--compare {args.compare}: it must be the Unix socket of a daemon"
    return ""


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False


def missing_yardstick(sections: Set[str], *, strict: bool) -> str:
    """What has to be installed first, or nothing.

    Args:
      sections: to be measured.
      strict: whether nothing may be left out.
    """
    if not Path(metis_program()).exists():
        return f"{metis_program()} is missing: install the package first"
    if "profile" in sections:
        try:
            sampling.program()
        except sampling.SamplerError as error:
            return str(error)
    if "cni" in sections and not cni_calls.HOST_LOCAL.exists():
        missing = (
            f"the yardstick {cni_calls.HOST_LOCAL} is missing: install Debian's "
            f"{cni_calls.PACKAGE}"
        )
        if strict:
            return missing
        print(f"{missing}; its rows stay empty", file=sys.stderr)
    return ""


def run_sections(names: Sequence[str], settings: Settings) -> Rounds:
    """Measure sections one after the other, and say where it is."""
    series = Rounds()
    for name in names:
        start = time.monotonic()
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        series.extend(SECTIONS[name](settings))
        seconds = time.monotonic() - start
        print(f"measured {name} in {seconds:.0f} s", file=sys.stderr, flush=True)
    return series


def tell(series: Series, sections: Sequence[str]) -> None:
    """Print the tables of what was measured."""
    parts = tables.page_parts(series, in_words(machine()))
    parts["goals"] = tables.goals_table(series, only_measured=True)
    wanted = {"machine", "goals", *sections}
    if "load" in sections:
        wanted |= {"load-ratios", "connections"}
    if not any(goal.quantity.value(series) is not None for goal in GOALS):
        wanted.discard("goals")
    for name, text in parts.items():
        if name in wanted:
            print(f"\n## {name}\n\n{text}")


def compare(socket: Path, pid: int, settings: Settings) -> Rounds:
    """Set another daemon, which runs, beside ours."""
    other = partial(running_server, str(socket.absolute()), pid)
    servers: dict[str, Start] = {"metis": metis_daemon, "other": other}
    series = daemon_load.measure(settings, servers, unused_networks=True)
    print(f"{in_words(machine())}\n")
    print(tables.load_table(series, {name: name for name in servers}))
    print("\nmetis to the other, round by round:\n")
    print(tables.load_ratios(series, "metis", "other", "the other"))
    if settings.whole:
        print(f"\n{tables.connections_table(series, list(servers))}")
    return series


def guard_run(settings: Settings, sections: Set[str]) -> Rounds:
    """Measure sections as the guard wants them."""
    with one_cpu():
        return run_sections(sorted(sections), settings)


def hold(recorded: record.Record, series: Series, settings: Settings) -> bool:
    """Compare with what was recorded, and tell; whether everything holds."""
    print(f"recorded on {in_words(recorded.machine)}")
    print(f"measured on {in_words(machine())}\n")
    verdicts = guard.judge(recorded.guard, series, partial(guard_run, settings))
    rows = [verdict.row() for verdict in verdicts]
    print(markdown_table(guard.HEADERS, rows))
    worse = [verdict.name for verdict in verdicts if not verdict.holds]
    for name in worse:
        print(
            f"{name}: more than {guard.TOLERANCE:.0%} worse than recorded, or unknown. "
            "If it has to be, record anew: nox -s bench -- --record --write-docs",
            file=sys.stderr,
        )
    return not worse


def guard_values(quick: Settings) -> dict[str, float]:
    """What the guard will compare with: medians of several quick runs.

    Prints how far they lie apart, so that nobody guards what is mostly noise.
    """
    found: dict[str, list[float]] = {}
    for _ in range(RECORDED_QUICK_RUNS):
        for name, value in guard.values(guard_run(quick, set(guard.SECTIONS))).items():
            found.setdefault(name, []).append(value)
    rows = [
        (name, f"{median(values):.3g}", f"{spread(values):.1%}")
        for name, values in found.items()
    ]
    print(f"\n## guard, {RECORDED_QUICK_RUNS} quick runs\n")
    print(markdown_table(("quantity", "median", "spread"), rows))
    return {name: median(values) for name, values in found.items()}


def page_of(series: Series, told: Mapping[str, object]) -> str:
    """The page with the tables of a series.

    Raises:
      ValueError: the page has lost a marker.
    """
    return markers.replaced(PAGE.read_text(), tables.page_parts(series, in_words(told)))


def write_page() -> None:
    """Write the tables of what is recorded into the page, and draw its plots.

    Raises:
      ValueError: nothing is recorded, or the page has lost a marker.
    """
    from benchmarks import plots  # needs matplotlib, which nothing else does

    recorded = record.read(record.RECORDED)
    if not recorded.series:
        raise ValueError(
            f"{record.RECORDED.name} holds no figures but the guard's: record them "
            "with `nox -s bench -- --record --write-docs`"
        )
    PAGE.write_text(page_of(recorded.series, recorded.machine))
    PLOTS.mkdir(exist_ok=True)
    plots.draw(recorded.series, PLOTS)


def main() -> None:
    """Do what the command line asks for."""
    args = parsed(sys.argv[1:])
    if args.write_docs and importlib.util.find_spec("matplotlib") is None:
        raise SystemExit(
            "bench: --write-docs needs matplotlib: install the dependency group `bench`"
        )
    if args.write_docs and not args.record:
        write_page()
        return
    settings = QUICK if args.quick else FULL
    if args.rounds is not None:
        settings = replace(settings, rounds=args.rounds)
    sections = args.sections or [
        name
        for name in (guard.SECTIONS if args.guard else SECTIONS)
        if not args.quick or name not in ONLY_WHOLE
    ]
    # Whatever is missing is told before anything is measured, not a quarter later.
    strict = args.record or args.guard or os.environ.get("CI") == "true"
    needed = set[str]() if args.compare else set(sections)
    missing = missing_yardstick(needed, strict=strict)
    if missing:
        raise SystemExit(f"bench: {missing}")
    if args.write_docs:
        page_of({}, machine())
    recorded = record.read(record.RECORDED) if args.guard else None

    if args.compare:
        series = compare(args.compare, args.other_pid or 0, settings)
    elif args.guard:
        series = guard_run(settings, set(sections))
    else:
        series = run_sections(sections, settings)
        tell(series, sections)
    values = guard_values(QUICK) if args.record else {}
    done = record.of_run(machine(), settings, series, values)
    if args.record:
        record.RECORDED.write_text(done.as_text())
    if args.json:
        args.json.write_text(done.as_text())
    if args.write_docs:
        write_page()
    if recorded is not None and not hold(recorded, series, settings):
        raise SystemExit(1)


def _end(number: int, frame: object) -> NoReturn:
    """End by an exception, so that whatever was started is stopped."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)  # `timeout` sends it
    try:
        main()
    except (
        ValueError,
        cni_calls.CallFailedError,
        daemon_load.CallsFailedError,
        sampling.SamplerError,
        StartFailedError,
    ) as error:
        raise SystemExit(f"bench: {error}") from error
