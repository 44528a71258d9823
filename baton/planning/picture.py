"""One picture of a plan: goodput over rate of the best stacks, as an SVG file that stands alone."""

from collections.abc import Mapping, Sequence
from html import escape

from baton.loadgen import plot

_LINE_H = 14
_STYLE = "text{font:10px system-ui,sans-serif;fill:#334155}.title{font-size:12px;font-weight:600}"


def goodput_picture(title: str, curves: Mapping[str, Sequence[tuple[float, float]]], rate: float) -> str:
    """Return an SVG of goodput over offered rate, one line a stack; `rate`: the one that was asked for, marked."""
    inside = plot.curves(curves, "offered, requests/s", "within the SLO, requests/s", {f"asked: {rate:g}/s": rate})
    inside = inside[inside.index(">") + 1 : inside.index("</svg>")]
    legend, top = [], plot.HEIGHT + _LINE_H
    for number, name in enumerate(curves):
        y = top + number * _LINE_H
        legend.append(f'<rect x="{plot.LEFT}" y="{y}" width="10" height="3" fill="{plot.COLORS[number]}"/>')
        legend.append(f'<text x="{plot.LEFT + 16}" y="{y + 5}">{escape(name)}</text>')
    height = top + len(curves) * _LINE_H + 6
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 -22 {plot.WIDTH} {height + 22}" width="{2 * plot.WIDTH}">'
        f'<style>{_STYLE}</style><rect x="0" y="-22" width="100%" height="{height + 22}" fill="#fff"/>'
        f'<text class="title" x="{plot.LEFT}" y="-6">{escape(title)}</text>{inside}{"".join(legend)}</svg>\n'
    )
