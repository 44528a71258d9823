"""Small plots as inline SVG, without scripts, fonts or files beside the page."""

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 460, 220, 52, 34, 12
COLORS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#65a30d", "#475569", "#a16207",
          "#6ee7b7")  # fmt: skip
RIGHT = 18  # half the width of the last tick's number
_PLOT_W, _PLOT_H = WIDTH - LEFT - RIGHT, HEIGHT - BOTTOM - TOP
NO_MARKS: Mapping[str, float] = {}
_HEADROOM = 1.04  # above the largest value, so that a mark there can be read


def distribution(series: Mapping[str, Sequence[float]], unit: str, marks: Mapping[str, float]) -> str:
    """Return a plot of cumulative shares over values, one line per series. `marks` are vertical lines, for instance an
    SLO."""
    values = [value for each in series.values() for value in each] + list(marks.values())
    if not values:
        return _nothing()
    low, high = 0.0, (max(values) or 1.0) * _HEADROOM
    lines = []
    for number, (name, each) in enumerate(series.items()):
        ordered = sorted(each)
        points = [(value, (rank + 1) / len(ordered)) for rank, value in enumerate(ordered)]
        lines.append(_line(points, (low, high), (0, 1), COLORS[number], name))
    return _frame(
        lines + [_mark(name, value, (low, high)) for name, value in marks.items()],
        (low, high),
        (0, 1),
        unit,
        "share",
        list(series) if len(series) > 1 else (),
    )


def points(series: Mapping[str, Sequence[tuple[float, float]]], x_unit: str, y_unit: str) -> str:
    """Return a plot with a dot for each pair (x, y)."""
    pairs = [pair for each in series.values() for pair in each]
    if not pairs:
        return _nothing()
    xs, ys = (0.0, max(x for x, _ in pairs) or 1.0), (0.0, max(y for _, y in pairs) or 1.0)
    dots = [
        f'<circle cx="{_x(x, xs):.1f}" cy="{_y(y, ys):.1f}" r="2" fill="{COLORS[number]}" fill-opacity=".6"/>'
        for number, each in enumerate(series.values())
        for x, y in each
    ]
    return _frame(dots, xs, ys, x_unit, y_unit, list(series))


def curves(
    series: Mapping[str, Sequence[tuple[float, float]]], x_unit: str, y_unit: str, marks: Mapping[str, float] = NO_MARKS
) -> str:
    """Return a plot with a dotted line for each series. `marks` are vertical lines."""
    pairs = [pair for each in series.values() for pair in each]
    if not pairs:
        return _nothing()
    xs, ys = (0.0, max(x for x, _ in pairs) or 1.0), (0.0, max(y for _, y in pairs) or 1.0)
    lines = [_line(sorted(each), xs, ys, COLORS[number], name) for number, (name, each) in enumerate(series.items())]
    lines += [_mark(name, value, xs) for name, value in marks.items()]
    return _frame(lines, xs, ys, x_unit, y_unit, list(series))


def stack(parts: Mapping[str, float], unit: str, colors: Mapping[str, str]) -> str:
    """Return one horizontal bar of parts, with a legend."""
    total = sum(parts.values())
    if not total:
        return _nothing()
    bars, legend, x = [], [], 0.0
    for name, value in parts.items():
        width, color = WIDTH * value / total, colors[name]
        title = f"{name} {value:.3g} {unit}, {value / total:.0%}"
        bars.append(
            f'<rect x="{x:.1f}" y="0" width="{width:.1f}" height="34" fill="{color}"><title>{title}</title></rect>'
        )
        legend.append(f'<span><i style="background:{color}"></i>{escape(title)}</span>')
        x += width
    return f'<svg viewBox="0 0 {WIDTH} 34" role="img">{"".join(bars)}</svg><div class="legend">{"".join(legend)}</div>'


def _line(pairs, xs, ys, color: str, name: str) -> str:
    path = " ".join(f"{_x(x, xs):.1f},{_y(y, ys):.1f}" for x, y in pairs)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"><title>{escape(name)}</title></polyline>'


def _mark(name: str, value: float, xs) -> str:
    x = _x(value, xs)
    line = f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{TOP + _PLOT_H}" stroke="#dc2626" stroke-dasharray="4 3"/>'
    anchor, at = ("end", x - 3) if x > WIDTH / 2 else ("start", x + 3)
    return f'{line}<text x="{at:.1f}" y="{TOP + _PLOT_H - 5}" class="mark" text-anchor="{anchor}">{escape(name)}</text>'


def _frame(inside: Sequence[str], xs, ys, x_unit: str, y_unit: str, names: Sequence[str] = ()) -> str:
    ticks = []
    for value in _ticks(*xs):
        x = _x(value, xs)
        ticks.append(f'<text x="{x:.1f}" y="{HEIGHT - 18}" text-anchor="middle">{value:g}</text>')
    for value in _ticks(*ys):
        y = _y(value, ys)
        ticks.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#e5e7eb"/>')
        ticks.append(f'<text x="{LEFT - 5}" y="{y + 3:.1f}" text-anchor="end">{value:g}</text>')
    labels = (
        f'<text x="{LEFT + _PLOT_W / 2}" y="{HEIGHT - 3}" text-anchor="middle">{escape(x_unit)}</text>'
        f'<text x="12" y="{TOP + _PLOT_H / 2}" text-anchor="middle" transform="rotate(-90 12 {TOP + _PLOT_H / 2})">'
        f"{escape(y_unit)}</text>"
    )
    legend = "".join(
        f'<span><i style="background:{COLORS[number]}"></i>{escape(name)}</span>' for number, name in enumerate(names)
    )
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(ticks)}{"".join(inside)}{labels}</svg>'
    return f'{svg}<div class="legend">{legend}</div>' if legend else svg


def _ticks(low: float, high: float) -> list[float]:
    """Return four to eight round values."""
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 8)
    first = math.ceil(low / step)
    return [round(number * step, 10) for number in range(first, math.floor(high / step) + 1)]


def _x(value: float, xs) -> float:
    return LEFT + _PLOT_W * (value - xs[0]) / (xs[1] - xs[0])


def _y(value: float, ys) -> float:
    return TOP + _PLOT_H * (1 - (value - ys[0]) / (ys[1] - ys[0]))


def _nothing() -> str:
    return '<p class="nothing">nothing to show</p>'
