"""Pictures as self-contained SVG files: goodput over rate of planned stacks, and workers over a day."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from baton.loadgen import plot

_LINE_H = 14
_TITLE_PX, _CHARACTER = 12, 0.64  # the title's size, and the relative width of a bold character
_STYLE = "text{font:10px system-ui,sans-serif;fill:#334155}.title{font-weight:600}"


def goodput_picture(title: str, curves: Mapping[str, Sequence[tuple[float, float]]], rate: float) -> str:
    """Return an SVG of goodput over offered rate, one line per stack, with the requested `rate` marked."""
    marks = {f"asked: {rate:g}/s": rate}
    return _alone(title, [plot.curves(curves, "offered, requests/s", "within the SLO, requests/s", marks)], curves)


def day_picture(title: str, workers: Mapping[str, Sequence[int]], needed: Mapping[str, Sequence[int]]) -> str:
    """Return an SVG of workers over a day, one plot per role: those that ran, and the fewest that would have
    sufficed."""
    names = ("workers that run", "the least that hold the load")
    drawn = []
    for role in workers:
        curves = {name: _steps(numbers) for name, numbers in zip(names, (workers[role], needed[role]))}
        drawn.append(plot.curves(curves, "hour", f"{role} workers"))
    return _alone(title, drawn, names)


def _steps(numbers: Sequence[int]) -> list[tuple[float, float]]:
    """Return (hour, number) for each minute at which a level begins or ends: most of a day's 1,440 minutes lie within
    one."""
    last = len(numbers) - 1
    return [
        (minute / 60, float(number))
        for minute, number in enumerate(numbers)
        if minute in (0, last) or not numbers[minute - 1] == number == numbers[minute + 1]
    ]


def _alone(title: str, drawn: Sequence[str], names: Iterable[str]) -> str:
    """Return plots below one another as a self-contained SVG with a title and one legend."""
    plots = [each[each.index(">") + 1 : each.index("</svg>")] for each in drawn]
    inside = [f'<g transform="translate(0,{number * plot.HEIGHT})">{each}</g>' for number, each in enumerate(plots)]
    legend, y = [], len(plots) * plot.HEIGHT
    for number, name in enumerate(names):
        y += _LINE_H
        legend.append(f'<rect x="{plot.LEFT}" y="{y}" width="10" height="3" fill="{plot.COLORS[number]}"/>')
        legend.append(f'<text x="{plot.LEFT + 16}" y="{y + 5}">{escape(name)}</text>')
    height = y + 2 * _LINE_H
    size = min(_TITLE_PX, (plot.WIDTH - plot.LEFT) / (_CHARACTER * len(title)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 -22 {plot.WIDTH} {height + 22}" width="{2 * plot.WIDTH}">'
        f'<style>{_STYLE}</style><rect x="0" y="-22" width="100%" height="{height + 22}" fill="#fff"/>'
        f'<text class="title" x="{plot.LEFT}" y="-6" style="font-size:{size:.1f}px">{escape(title)}</text>'
        f"{''.join(inside)}{''.join(legend)}</svg>\n"
    )
