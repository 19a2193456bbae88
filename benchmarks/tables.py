"""The tables of docs/performance.md, out of a series. Pure.

Every figure is the median of its rounds; a ratio is the median of the ratios. What
was not measured is a dash.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks import goals
from benchmarks.goals import BURST, GOALS, figure
from benchmarks.layers import NAMES
from benchmarks.measures import markdown_table
from benchmarks.series import Quantity, Series, median_of

OPERATIONS = ("AllocatePodIP", "DeallocatePodIP")

NOT_MEASURED = "-"

LOAD_FIGURES = ("per_second", "p50_ms", "p99_ms", "server_cpu_us")

WORDS = {
    "per_second": "calls/s",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
    "server_cpu_us": "CPU us/call",
}


def cell(value: float | None) -> str:
    """A figure of a table."""
    return NOT_MEASURED if value is None else figure(value)


def _cells(series: Series, names: Iterable[str]) -> list[str]:
    return [cell(median_of(series, name)) for name in names]


def goals_table(series: Series, *, only_measured: bool = False) -> str:
    """Every goal, what was measured, and whether it is met."""
    return markdown_table(
        ("goal", "limit", "measured", "verdict"),
        [
            goal.row(series)
            for goal in GOALS
            if not only_measured or goal.quantity.value(series) is not None
        ],
    )


def load_table(series: Series, servers: Mapping[str, str]) -> str:
    """Calls/s, latencies and CPU by operation and concurrency.

    Args:
      series: the figures.
      servers: names in the series, and what they are called here.
    """
    headers = ["operation", "concurrency"]
    for words in servers.values():
        headers += [f"{words} {WORDS[name]}" for name in LOAD_FIGURES]
    return markdown_table(
        headers,
        [
            [
                operation,
                level,
                *_cells(
                    series,
                    (
                        f"load/{server}/{operation}/{level}/{name}"
                        for server in servers
                        for name in LOAD_FIGURES
                    ),
                ),
            ]
            for operation in OPERATIONS
            for level in _levels(series)
        ],
    )


def load_ratios(series: Series, ours: str, other: str, words: str) -> str:
    """One server against another, round by round."""
    rows = []
    for operation in OPERATIONS:
        for level in _levels(series):
            mine = f"load/{ours}/{operation}/{level}"
            theirs = f"load/{other}/{operation}/{level}"
            rows.append(
                [
                    operation,
                    level,
                    *(
                        cell(quantity.value(series))
                        for quantity in (
                            Quantity(f"{mine}/per_second", f"{theirs}/per_second"),
                            Quantity(f"{mine}/p99_ms", f"{theirs}/p99_ms"),
                            Quantity(
                                f"{mine}/server_cpu_us", f"{theirs}/server_cpu_us"
                            ),
                            Quantity(f"{mine}/p99_ms", f"{mine}/p50_ms"),
                            Quantity(f"{theirs}/p99_ms", f"{theirs}/p50_ms"),
                        )
                    ),
                ]
            )
    return markdown_table(
        (
            "operation",
            "concurrency",
            "calls/s",
            "p99",
            "CPU a call",
            f"p99/p50 of {ours}",
            f"p99/p50 of {words}",
        ),
        rows,
    )


def cpu_table(series: Series) -> str:
    """CPU of a call in turns on one CPU, and its ratio to the bare server's."""
    names = [name for name in series if name.startswith("cpu/metis/")]
    rows = []
    for name in names:
        _, _, operation, level, _ = name.split("/")
        bare = name.replace("/metis/", "/bare/")
        ratio = cell(Quantity(name, bare).value(series))
        rows.append([operation, level, *_cells(series, (name, bare)), ratio])
    rows.sort(key=lambda row: (row[0], int(row[1])))
    return markdown_table(
        ("operation", "concurrency", "metis CPU us/call", "bare CPU us/call", "ratio"),
        rows,
    )


def connections_table(series: Series, servers: Sequence[str]) -> str:
    """A new connection per call against a kept one."""
    rows = []
    for server in servers:
        kept, anew = (
            f"connections/{server}/{how}/32/per_second" for how in ("kept", "anew")
        )
        rows.append(
            [
                server,
                *_cells(series, (kept, anew)),
                cell(Quantity(anew, kept).value(series)),
                *_cells(
                    series,
                    (
                        f"connections/{server}/anew/32/{figure}"
                        for figure in ("p99_ms", "server_cpu_us", "client_cpu_us")
                    ),
                ),
            ]
        )
    head = ("server", "kept calls/s", "anew calls/s", "ratio", "anew p99 ms")
    return markdown_table(
        (*head, "CPU us/call, server", "CPU us/call, client"),
        rows,
    )


def flat_tables(series: Series) -> str:
    """What an allocation costs by the size of the pool and by what cools in it."""
    blocks = markdown_table(
        ("block", *goals.FIRST_BLOCKS),
        [
            [
                "first allocate, ms",
                *_cells(series, (f"flat/first/{b}/ms" for b in goals.FIRST_BLOCKS)),
            ],
            [
                "allocate p50, ms",
                *_cells(series, (f"flat/block/{b}/p50_ms" for b in goals.FIRST_BLOCKS)),
            ],
            [
                "allocate, CPU us",
                *_cells(series, (f"flat/block/{b}/cpu_us" for b in goals.FIRST_BLOCKS)),
            ],
        ],
    )
    cooling = markdown_table(
        ("addresses in cooldown", *(f"{count:,}" for count in goals.COOLING)),
        [
            [
                "allocate p50, ms",
                *_cells(series, (f"flat/cooling/{n}/p50_ms" for n in goals.COOLING)),
            ],
            [
                "allocate, CPU us",
                *_cells(series, (f"flat/cooling/{n}/cpu_us" for n in goals.COOLING)),
            ],
        ],
    )
    return f"{blocks}\n\n{cooling}"


def footprint_table(series: Series) -> str:
    """CPU and memory of a daemon that does nothing, and how long it takes to start."""
    rows = (
        (f"CPU in {goals.IDLE_SECONDS:.0f} s, idle", "footprint/idle/cpu_ms", "ms"),
        ("resident memory, idle", "footprint/idle/rss_mib", "MiB"),
        ("the same of the bare server", "footprint/bare/rss_mib", "MiB"),
        (
            f"resident memory after {goals.FULL_POOL:,} allocations",
            "footprint/full/rss_mib",
            "MiB",
        ),
        (
            "start to serving, an empty database",
            "footprint/start/empty/wall_ms",
            "ms",
        ),
        (
            f"start to serving, {goals.LARGE_DATABASE:,} rows",
            "footprint/start/large/wall_ms",
            "ms",
        ),
    )
    return markdown_table(
        ("", "measured"),
        [
            [
                words,
                NOT_MEASURED
                if (value := median_of(series, name)) is None
                else figure(value, unit),
            ]
            for words, name, unit in rows
        ],
    )


def embedded_table(series: Series) -> str:
    """Allocations without a socket."""
    return markdown_table(
        ("embedded, concurrency 64", "allocations/s", "CPU us each"),
        [
            [
                words,
                *_cells(
                    series,
                    (f"embedded/{name}/per_second", f"embedded/{name}/cpu_us"),
                ),
            ]
            for name, words in (
                ("memory", "over the memory transport"),
                ("engine", "the engine called directly"),
            )
        ],
    )


def cni_table(series: Series) -> str:
    """Whole CNI processes, and 64 of them at once."""
    rows = []
    for plugin in ("metis", "self-contained", "host-local"):
        interpreter = f"cni/{plugin} interpreter"
        if plugin == "host-local":
            interpreter = "cni/metis interpreter"
        elif f"{interpreter}/wall_ms" in series:
            rows.append(
                _process(
                    series, f"{plugin}: bare interpreter", interpreter, interpreter
                )
            )
        rows += [
            _process(series, f"{plugin} {verb}", f"cni/{plugin}/{verb}", interpreter)
            for verb in ("VERSION", "ADD", "CHECK", "DEL")
            if f"cni/{plugin}/{verb}/wall_ms" in series
        ]
    at_once = [
        [
            plugin,
            cell(median_of(series, f"cni/{plugin}/burst/seconds")),
            cell(
                Quantity(
                    f"cni/{plugin}/burst/seconds", "cni/host-local/burst/seconds"
                ).value(series)
            ),
        ]
        for plugin in ("metis", "self-contained", "host-local")
        if f"cni/{plugin}/burst/seconds" in series
    ]
    processes = markdown_table(
        (
            "process",
            "wall ms",
            "CPU ms",
            "to its bare interpreter",
            "to host-local ADD",
            "CPU ms in the daemon",
        ),
        rows,
    )
    bursts = markdown_table(
        (f"{BURST} ADDs at once", "seconds", "to host-local"), at_once
    )
    return f"{processes}\n\n{bursts}"


def _process(series: Series, words: str, name: str, interpreter: str) -> list[str]:
    wall = f"{name}/wall_ms"
    return [
        words,
        *_cells(series, (wall, f"{name}/cpu_ms")),
        cell(Quantity(wall, f"{interpreter}/wall_ms").value(series)),
        cell(Quantity(wall, "cni/host-local/ADD/wall_ms").value(series)),
        *_cells(series, [f"{name}/daemon_cpu_ms"]),
    ]


def profile_table(series: Series) -> str:
    """Where the CPU of the daemon goes, by layer."""
    cpu = median_of(series, "profile/server_cpu_us")
    rows = []
    for name in NAMES:
        share = median_of(series, f"profile/{name}/share")
        rows.append(
            [
                name,
                NOT_MEASURED if share is None else f"{share:.0%}",
                cell(None if share is None or cpu is None else share * cpu),
            ]
        )
    return markdown_table(("layer", "share", "CPU us/call"), rows)


def _levels(series: Series) -> list[int]:
    found = {int(name.split("/")[3]) for name in series if name.startswith("load/")}
    return sorted(found)


SERVERS = {"metis": "metis", "bare": "bare"}


PLOTS = {
    "latency": "p50 and p99 against calls under way",
    "layers": "CPU of a call by layer",
    "pools": "an allocation by size and by fill of the pool",
}
"""The plots beside the page (`benchmarks.plots`), and what they show."""


def page_parts(series: Series, machine: str) -> dict[str, str]:
    """The generated parts of the page, by the names of their markers."""
    return {
        "machine": f"{machine}.",
        "goals": goals_table(series),
        "load": load_table(series, SERVERS),
        "load-ratios": load_ratios(series, "metis", "bare", "the bare server"),
        "cpu": cpu_table(series),
        "connections": connections_table(series, list(SERVERS)),
        "flat": flat_tables(series),
        "footprint": footprint_table(series),
        "embedded": embedded_table(series),
        "cni": cni_table(series),
        "profile": profile_table(series),
        **{
            f"plot-{name}": f"![{shown}](performance/{name}.svg)"
            for name, shown in PLOTS.items()
        },
    }
