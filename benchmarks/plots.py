"""The plots of docs/performance.md, as SVG: the same file for the same figures.

Small and plain: text stays text in the reader's own font, no date, no version, and
the ids inside come from a fixed salt.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks import goals
from benchmarks.layers import NAMES
from benchmarks.series import Series, median_of

mpl.rcParams.update(
    {
        "svg.fonttype": "none",  # no outlines of glyphs: smaller, and searchable
        "svg.hashsalt": "metis",  # ids would be random
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],  # which measures the text; comes along
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.3,
        "legend.frameon": False,
    }
)

NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))

COLOURS = {"metis": "#1f5fa8", "bare": "#b0641e"}

HEADROOM = 1.2
"""Room above the highest point, as a part of it."""

WIDTH_INCHES = 7.0
HEIGHT_INCHES = 3.0


def draw(series: Series, directory: Path) -> list[Path]:
    """Write latency.svg, pools.svg and layers.svg into a directory that exists."""
    plots = {
        "latency.svg": latency(series),
        "pools.svg": pools(series),
        "layers.svg": layers(series),
    }
    for name, figure in plots.items():
        figure.savefig(directory / name, metadata=NO_METADATA, bbox_inches="tight")
        # matplotlib leaves blanks at the ends of lines.
        text = (directory / name).read_text()
        lines = (line.rstrip() for line in text.splitlines())
        (directory / name).write_text("\n".join(lines) + "\n")
    return [directory / name for name in plots]


def _figure(
    columns: int, height: float = HEIGHT_INCHES
) -> tuple[Figure, Sequence[Any]]:
    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _known(
    series: Series, names: Sequence[str], places: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Where something was measured, and what."""
    found = [
        (x, median_of(series, name)) for x, name in zip(places, names, strict=True)
    ]
    known = [(x, y) for x, y in found if y is not None]
    return [x for x, _ in known], [y for _, y in known]


def latency(series: Series) -> Figure:
    """Median and 99th percentile against calls under way, one panel an operation."""
    figure, axes = _figure(2)
    for axis, operation in zip(axes, ("AllocatePodIP", "DeallocatePodIP"), strict=True):
        for server, colour in COLOURS.items():
            for name, style in (("p50_ms", "-o"), ("p99_ms", "--s")):
                names = [
                    f"load/{server}/{operation}/{level}/{name}"
                    for level in goals.LEVELS
                ]
                axis.plot(
                    *_known(series, names, goals.LEVELS),
                    style,
                    color=colour,
                    markersize=3,
                    label=f"{server} {name[:3]}",
                )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(goals.LEVELS, [str(level) for level in goals.LEVELS])
        axis.set_title(operation)
        axis.set_xlabel("calls under way")
    axes[0].set_ylabel("milliseconds")
    axes[0].legend()
    return figure


def pools(series: Series) -> Figure:
    """What an allocation costs by the size of the block, and by what cools in it."""
    figure, (sizes, fills) = _figure(2)
    places = range(len(goals.FIRST_BLOCKS))
    for words, style, names in (
        ("first", "--s", [f"flat/first/{size}/ms" for size in goals.FIRST_BLOCKS]),
        (
            "every later, p50",
            "-o",
            [f"flat/block/{s}/p50_ms" for s in goals.FIRST_BLOCKS],
        ),
    ):
        sizes.plot(
            *_known(series, names, places),
            style,
            color=COLOURS["metis"],
            markersize=3,
            label=words,
        )
    sizes.set_xticks(places, goals.FIRST_BLOCKS)
    sizes.set_xlabel("block")
    sizes.set_ylabel("milliseconds")
    sizes.legend()
    names = [f"flat/cooling/{count}/p50_ms" for count in goals.COOLING]
    fills.plot(
        *_known(series, names, goals.COOLING),
        "-o",
        color=COLOURS["metis"],
        markersize=3,
        label="allocate, p50",
    )
    fills.legend()
    fills.set_xticks(goals.COOLING, [f"{count:,}" for count in goals.COOLING])
    fills.set_xlabel("addresses in cooldown")
    for axis in (sizes, fills):
        # From zero, or a hair's breadth would look like a slope.
        axis.set_ylim(0, axis.dataLim.ymax * HEADROOM or None)
    return figure


def layers(series: Series) -> Figure:
    """The CPU of a call by layer, the innermost at the top."""
    figure, (axis,) = _figure(1, height=2.2)
    cpu = median_of(series, "profile/server_cpu_us") or 0.0
    shares = [(median_of(series, f"profile/{name}/share") or 0.0) for name in NAMES]
    values = [share * cpu for share in shares]
    bars = axis.barh(NAMES, values, color=COLOURS["metis"])
    axis.bar_label(bars, [f" {share:.0%}" for share in shares])
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.set_xlabel("microseconds of CPU per call")
    return figure
