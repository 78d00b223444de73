"""Operations against faults over time, as an SVG written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from jepsen_like.live.run import Fault

WIDTH: Final = 1200
PLOT_HEIGHT: Final = 180
LANE_HEIGHT: Final = 14
LEFT: Final = 150
RIGHT: Final = 20
TOP: Final = 20
_COLOURS: Final = ("#c0392b", "#d35400", "#8e44ad", "#2471a3", "#117a65", "#7d6608", "#616a6b")


def picture(
    acked: Sequence[int], polled: Sequence[int], faults: Sequence[Fault], seconds: float
) -> str:
    """One round: records a second above, a lane for each kind of fault below."""
    seconds = max(seconds, 1.0)
    lanes = sorted({fault.nemesis for fault in faults})
    height = TOP + PLOT_HEIGHT + 30 + LANE_HEIGHT * len(lanes) + 10
    scale = (WIDTH - LEFT - RIGHT) / seconds
    highest = max([*acked, *polled, 1])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">',
        *_bands(faults, lanes, scale, height),
        *_axes(seconds, scale, highest),
        _line(polled, scale, highest, "#85929e", 1),
        _line(acked, scale, highest, "#1e8449", 1.5),
        f'<text x="{LEFT + 8}" y="{TOP + 12}" fill="#1e8449">acknowledged records/s</text>',
        f'<text x="{LEFT + 170}" y="{TOP + 12}" fill="#85929e">polled records/s</text>',
        "</svg>",
    ]
    return "\n".join(parts)


def _line(rows: Sequence[int], scale: float, highest: int, colour: str, width: float) -> str:
    points = " ".join(
        f"{LEFT + (second + 0.5) * scale:.1f},{TOP + PLOT_HEIGHT * (1 - count / highest):.1f}"
        for second, count in enumerate(rows)
    )
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _axes(seconds: float, scale: float, highest: int) -> list[str]:
    bottom = TOP + PLOT_HEIGHT
    parts = [
        f'<line x1="{LEFT}" y1="{bottom}" x2="{WIDTH - RIGHT}" y2="{bottom}" stroke="#333"/>',
        f'<text x="{LEFT - 6}" y="{TOP + 8}" text-anchor="end">{highest}</text>',
        f'<text x="{LEFT - 6}" y="{bottom}" text-anchor="end">0</text>',
    ]
    step = next(s for s in (5, 10, 30, 60, 300, 600, 3600) if seconds / s <= 20 or s == 3600)
    for second in range(0, int(seconds) + 1, step):
        x = LEFT + second * scale
        parts.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{second} s</text>')
    return parts


def _bands(faults: Sequence[Fault], lanes: Sequence[str], scale: float, height: int) -> list[str]:
    parts = []
    first = TOP + PLOT_HEIGHT + 30
    for number, name in enumerate(lanes):
        y = first + number * LANE_HEIGHT
        parts.append(f'<text x="{LEFT - 6}" y="{y + 10}" text-anchor="end">{escape(name)}</text>')
    for fault in faults:
        lane = lanes.index(fault.nemesis)
        colour = _COLOURS[lane % len(_COLOURS)]
        x, y = LEFT + fault.began * scale, first + lane * LANE_HEIGHT
        healed = max(1.0, (max(fault.healed, fault.began) - fault.began) * scale)
        whole = max(healed, (max(fault.whole, fault.began) - fault.began) * scale)
        told = escape(
            f"{fault.began:.1f} s {fault.nemesis}: {fault.detail}; healed {fault.healed:.1f} s, "
            f"whole {fault.whole:.1f} s"
        )
        parts.append(
            f"<g><title>{told}</title>"
            f'<rect x="{x:.1f}" y="{TOP}" width="{healed:.1f}" height="{height - TOP}" '
            f'fill="{colour}" opacity="0.10"/>'
            f'<rect x="{x:.1f}" y="{y}" width="{whole:.1f}" height="{LANE_HEIGHT - 3}" '
            f'fill="{colour}" opacity="0.35"/>'
            f'<rect x="{x:.1f}" y="{y}" width="{healed:.1f}" height="{LANE_HEIGHT - 3}" '
            f'fill="{colour}"/></g>'
        )
    return parts
