"""The picture of a sweep: throughput against p99, one panel per load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.errors import BenchmarkError
from benchmarks.sweep import STEADY_MB_S, Point

_COLOURS: Final = {16: "#d95f02", 128: "#7570b3", 1024: "#1b9e77"}
_MARKS: Final = {1: "o", 6: "s", 24: "^"}
_SIZES: Final = {0: 30, 5: 70, 50: 140}
_TITLES: Final = {
    "full": "as fast as it goes, 16 MiB unacknowledged",
    "steady": f"steady {STEADY_MB_S:.0f} MB/s",
}


def draw(points: Sequence[Point], paths: Sequence[Path]) -> None:
    """Write the picture to each path; its ending says in which format.

    Raises:
        BenchmarkError: no points, or matplotlib is not installed.
    """
    if not points:
        raise BenchmarkError("no points to draw")
    try:
        import matplotlib as mpl
    except ImportError:
        raise BenchmarkError("pictures need matplotlib: uv sync --group bench") from None
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "raftmq"  # the same points give the same file
    from matplotlib import pyplot

    loads = [load for load in _TITLES if any(point.load == load for point in points)]
    figure, axes = pyplot.subplots(1, len(loads), figsize=(6.2 * len(loads), 5.2), squeeze=False)
    for axis, load in zip(axes[0], loads, strict=True):
        _panel(axis, [point for point in points if point.load == load], load)
    _legend(figure)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=130, metadata=kind)
    pyplot.close(figure)


def _panel(axis: Any, points: Sequence[Point], load: str) -> None:
    from matplotlib.ticker import LogFormatter

    for point in points:
        is_ours = point.engine == "raftmq"
        colour = _COLOURS.get(point.batch_kib, "#444444")
        axis.scatter(
            point.mb_s if load == "full" else point.cpu_s_per_gb,
            point.p99_ms,
            s=_SIZES.get(point.linger_ms, 60),
            marker=_MARKS.get(point.partitions, "D"),
            facecolors=colour if is_ours else "none",
            edgecolors=colour,
            alpha=0.85,
        )
    axis.set_xscale("log")
    axis.set_yscale("log")
    for side in (axis.xaxis, axis.yaxis):
        for set_formatter in (side.set_major_formatter, side.set_minor_formatter):
            set_formatter(LogFormatter(minor_thresholds=(1.5, 0.4)))
    axis.set_xlabel("MB/s acknowledged" if load == "full" else "server CPU seconds per GB")
    axis.set_ylabel("p99 from produce to acknowledgement, ms")
    axis.set_title(_TITLES[load], fontsize=11)
    axis.grid(visible=True, which="both", alpha=0.2)


def _legend(figure: Any) -> None:
    from matplotlib.lines import Line2D

    def mark(label: str, **style: Any) -> Any:
        plain = {"color": "none", "markeredgecolor": "#444444", "markerfacecolor": "#444444"}
        return Line2D([], [], label=label, **{**plain, "marker": "o", **style})

    entries = [
        *(
            mark(f"batch.size {size} KiB", markerfacecolor=colour, markeredgecolor=colour)
            for size, colour in _COLOURS.items()
        ),
        *(mark(f"{count} partitions", marker=shape) for count, shape in _MARKS.items()),
        *(mark(f"linger {ms} ms", markersize=size**0.5) for ms, size in _SIZES.items()),
        mark("raftmq"),
        mark("Kafka", markerfacecolor="none"),
    ]
    figure.legend(handles=entries, loc="lower center", ncol=6, fontsize=8, frameon=False)
