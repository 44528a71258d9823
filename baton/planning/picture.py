"""Pictures as SVG files that stand alone: goodput over rate of planned stacks, and workers over a day."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from baton.loadgen import plot

_LINE_H = 14
_STYLE = "text{font:10px system-ui,sans-serif;fill:#334155}.title{font-size:12px;font-weight:600}"


def goodput_picture(title: str, curves: Mapping[str, Sequence[tuple[float, float]]], rate: float) -> str:
    """Return an SVG of goodput over offered rate, one line a stack; `rate`: the one that was asked for, marked."""
    marks = {f"asked: {rate:g}/s": rate}
    return _alone(title, plot.curves(curves, "offered, requests/s", "within the SLO, requests/s", marks), curves)


def _alone(title: str, drawn: str, names: Iterable[str]) -> str:
    """Return a plot as a file of its own, its legend below."""
    inside = drawn[drawn.index(">") + 1 : drawn.index("</svg>")]
    legend, y = [], plot.HEIGHT
    for number, name in enumerate(names):
        y = plot.HEIGHT + (number + 1) * _LINE_H
        legend.append(f'<rect x="{plot.LEFT}" y="{y}" width="10" height="3" fill="{plot.COLORS[number]}"/>')
        legend.append(f'<text x="{plot.LEFT + 16}" y="{y + 5}">{escape(name)}</text>')
    height = y + 2 * _LINE_H
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 -22 {plot.WIDTH} {height + 22}" width="{2 * plot.WIDTH}">'
        f'<style>{_STYLE}</style><rect x="0" y="-22" width="100%" height="{height + 22}" fill="#fff"/>'
        f'<text class="title" x="{plot.LEFT}" y="-6">{escape(title)}</text>{inside}{"".join(legend)}</svg>\n'
    )


def day_picture(title: str, workers: Mapping[str, Sequence[int]], needed: Mapping[str, Sequence[int]]) -> str:
    """Return an SVG of workers over a day, by role: those that ran, and the least that would have done."""
    curves = {
        f"{role}{words}": [(minute / 60, float(number)) for minute, number in enumerate(numbers)]
        for role in workers
        for words, numbers in (("", workers[role]), (", least", needed[role]))
    }
    return _alone(title, plot.curves(curves, "hour", "workers"), curves)
