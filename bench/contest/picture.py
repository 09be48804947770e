"""Attainment against GPU-hours as a picture that a forge shows: SVG with nothing to load."""

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 860, 520
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 56, 60
BEST_MISSED, WORST_MISSED = 1e-4, 1.0
GRID = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999)
LINE_HEIGHT, LETTER = 13, 6.1
FONT = 'font-family="system-ui, sans-serif" font-size="11"'
HALO = 'paint-order="stroke" stroke="#ffffff" stroke-width="3"'
COLORS = {"ours": "#c2410c", "hindsight": "#1d4ed8", "rival": "#475569"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A policy: what it used and what it attained, and whether it is `ours`, a `rival`, or knows in `hindsight`."""

    name: str
    gpu_hours: float
    attainment: float
    kind: str


@dataclass(frozen=True, slots=True)
class _Box:
    x: float
    y: float
    width: float

    def meets(self, other: "_Box") -> bool:
        """Tell whether two labels overlap."""
        apart = self.x + self.width < other.x or other.x + other.width < self.x
        return not apart and abs(self.y - other.y) < LINE_HEIGHT


def front(points: Sequence[Point]) -> list[Point]:
    """Return those that no other beats in one without being beaten in the other, the cheapest first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda one: (one.gpu_hours, -one.attainment)):
        if not best or point.attainment > best[-1].attainment:
            best.append(point)
    return best


def pareto(
    title: str, points: Sequence[Point], *, fluid_gpu_hours: float, goal: float, swept: Sequence[Point] = ()
) -> str:
    """Return the picture: up is better, left is cheaper.

    Args:
        points: at least one.
        swept: one policy with other values; joined, and not labelled.
        fluid_gpu_hours: the bound that nothing is left of.
        goal: the attainment that the hindsight's sizes are for.
    """
    hours = [point.gpu_hours for point in (*points, *swept)] + [fluid_gpu_hours]
    low, high = 0.9 * min(hours), 1.35 * max(hours)
    name = html.escape(title)
    hint = "up: more requests within the objectives; left: fewer GPU-hours; both axes logarithmic"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" {FONT}>',
        f"<title>{name}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="600" fill="#0f172a">{name}</text>',
        f'<text x="{LEFT}" y="42" fill="#475569">{hint}</text>',
        *_grid(low, high),
        *_bounds(low, high, fluid_gpu_hours, goal),
        *_front(points, low, high),
        *_swept(swept, low, high),
        *_points(points, low, high),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _x(hours: float, low: float, high: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * math.log(hours / low) / math.log(high / low)


def _y(attainment: float) -> float:
    missed = min(max(1.0 - attainment, BEST_MISSED), WORST_MISSED)
    share = math.log(missed / BEST_MISSED) / math.log(WORST_MISSED / BEST_MISSED)
    return TOP + (HEIGHT - TOP - BOTTOM) * share


def _grid(low: float, high: float) -> Iterator[str]:
    for attainment in GRID:
        y, label = _y(attainment), f"{100.0 * attainment:g} %"
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e2e8f0"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#475569">{label}</text>'
    for hours in _ticks(low, high):
        x = _x(hours, low, high)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#e2e8f0"/>'
        yield f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#475569">{hours:g}</text>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text x="{middle}" y="{HEIGHT - 14}" text-anchor="middle" fill="#0f172a">GPU-hours</text>'


def _ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = [digit * 10.0**decade for decade in decades for digit in (1, 1.5, 2, 3, 5, 7)]
    return [value for value in every if low <= value <= high]


def _bounds(low: float, high: float, fluid_gpu_hours: float, goal: float) -> Iterator[str]:
    x, y = _x(fluid_gpu_hours, low, high), _y(goal)
    dashed = 'stroke="#1d4ed8" stroke-dasharray="5 4"'
    yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" {dashed}/>'
    yield f'<text x="{x + 4:.1f}" y="{HEIGHT - BOTTOM - 6}" fill="#1d4ed8">fluid bound</text>'
    yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" {dashed}/>'


def _front(points: Sequence[Point], low: float, high: float) -> Iterator[str]:
    """Draw the steps that join the best of those that do not know in hindsight."""
    best = front([point for point in points if point.kind != "hindsight"])
    if not best:
        return
    start = f"M {_x(best[0].gpu_hours, low, high):.1f} {_y(best[0].attainment):.1f}"
    steps = (f"H {_x(point.gpu_hours, low, high):.1f} V {_y(point.attainment):.1f}" for point in best[1:])
    yield f'<path d="{" ".join((start, *steps))}" fill="none" stroke="#94a3b8"/>'


def _swept(points: Sequence[Point], low: float, high: float) -> Iterator[str]:
    """Draw the line that a policy can be moved along."""
    if len(points) < 2:
        return
    ordered = sorted(points, key=lambda one: one.gpu_hours)
    places = [(_x(point.gpu_hours, low, high), _y(point.attainment)) for point in ordered]
    path = " L ".join(f"{x:.1f} {y:.1f}" for x, y in places)
    yield f'<path d="M {path}" fill="none" stroke="{COLORS["ours"]}" stroke-width="1.5" stroke-dasharray="2 3"/>'
    for x, y in places:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{COLORS["ours"]}"/>'


def _points(points: Sequence[Point], low: float, high: float) -> Iterator[str]:
    """Draw the points, ours above the others, and their labels, ours in the best place."""
    placed: list[_Box] = []
    labels = []
    ordered = sorted(points, key=lambda one: (one.kind != "ours", -one.attainment))
    for point in ordered:
        box = _place(point.name, _x(point.gpu_hours, low, high), _y(point.attainment), placed)
        placed.append(box)
        weight = 'font-weight="700" ' if point.kind == "ours" else ""
        style = f'fill="{COLORS[point.kind]}" {weight}{HALO}'
        labels.append(f'<text x="{box.x:.1f}" y="{box.y + 4:.1f}" {style}>{html.escape(point.name)}</text>')
    yield from labels
    for point in reversed(ordered):
        x, y, radius = _x(point.gpu_hours, low, high), _y(point.attainment), 6 if point.kind == "ours" else 4
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{COLORS[point.kind]}"/>'


def _place(name: str, x: float, y: float, placed: Sequence[_Box]) -> _Box:
    """Return where a label stands: beside its point, as near as the others let it."""
    width = LETTER * len(name)
    shifts = sorted(range(-12, 13), key=abs)
    sides = (x + 9.0, x - 9.0 - width)
    boxes = [
        _Box(side, y + LINE_HEIGHT * shift, width)
        for shift in shifts
        for side in sides
        if side >= LEFT and side + width <= WIDTH and TOP <= y + LINE_HEIGHT * shift <= HEIGHT - BOTTOM
    ]
    free = (box for box in boxes if not any(box.meets(other) for other in placed))
    return next(free, _Box(sides[0], y, width))
