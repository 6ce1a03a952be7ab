"""Curves of a run as small SVG drawings that take their colours from the page around them.

matplotlib knows nothing of a page's light and dark, so drawings are made in a few stand-in colours that
are then replaced by CSS variables (`--ink`, `--faint`, `--line`, `--series-1`, ...). The page's stylesheet defines them.
"""

import dataclasses
import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from axion_jax.evaluation.tables import Score, compact

INK, FAINT, LINE = "#010201", "#010202", "#010203"
SERIES = ("#010211", "#010212", "#010213", "#010214", "#010215", "#010216")
_VARIABLES = {INK: "--ink", FAINT: "--faint", LINE: "--line"} | {
    colour: f"--series-{i}" for i, colour in enumerate(SERIES, start=1)
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, in the page's own font
    "svg.hashsalt": "axion_jax",  # the same run gives the same bytes
    "font.size": 9,
    "axes.edgecolor": LINE,
    "axes.labelcolor": FAINT,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "text.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
}
# What a drawing says of itself that the page says better: comments, its own style, names that repeat
# from drawing to drawing, fonts, and a size, which the page takes from the view box.
_UNWANTED = (
    re.compile(
        r"<!--.*?-->|<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", re.DOTALL
    ),
    re.compile(r' id="[a-z]\w*?(?:\.\w+)?_\d+"'),
    re.compile(r" font-family: [^;\"]*;"),
    re.compile(r' (?:width|height)="[\d.]*pt"'),
)
MOST_POINTS = 300  # of one curve; more cannot be told apart at this size and make the page heavy


@dataclasses.dataclass(frozen=True)
class Panel:
    """One drawing: a title, the metrics it shows, and how their values read."""

    title: str
    metrics: tuple[str, ...]
    unit: str = ""
    is_share: bool = False
    """Values in [0, 1], shown in percent."""


# The figures 3 to 8 of the paper, in the order in which one reads a run.
PANELS = (
    Panel("Loss", ("loss",)),
    Panel("Training reward", ("reward", "raw_reward")),
    Panel("Held-out score", ("held_out",)),
    Panel("Response length", ("response_length",), "tokens"),
    Panel("Truncated share", ("truncated_share",), "%", is_share=True),
    Panel("Entropy", ("entropy",), "nats"),
    Panel("Train–rollout log-prob difference", ("logprob_abs_diff",), "nats a token"),
)

Curve = tuple[np.ndarray, np.ndarray]
"""Steps and values, each [N]."""


def curves_of(records: Sequence[Mapping[str, object]]) -> dict[str, Curve]:
    """Returns the curve of every numeric metric in a stage's records, in order of appearance.

    A metric that is itself a mapping gives one curve an entry: {"held_out": {"chain_sum": …}} becomes
    "held_out/chain_sum". A step without the metric, or where it is not finite, is left out of its curve.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for i, record in enumerate(records):
        step = record.get("step", i)
        for name, value in _flat(record):
            if name not in ("step", "stage") and isinstance(value, (int, float)):
                points.setdefault(name, [])
                if np.isfinite(value):
                    points[name].append((float(step), float(value)))  # pyright: ignore[reportArgumentType]
    curves = {}
    for name, pairs in points.items():
        if pairs:
            steps, values = np.array(sorted(pairs, key=lambda pair: pair[0])).T
            curves[name] = (steps, values)
    return curves


def _flat(record: Mapping[str, object], prefix: str = ""):
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value


def panel_curves(panel: Panel, curves: Mapping[str, Curve]) -> dict[str, Curve]:
    """Returns those curves that belong to a panel, `metric` and `metric/anything`, the metric itself first."""
    return {
        name: curves[name]
        for metric in panel.metrics
        for name in curves
        if name == metric or name.startswith(metric + "/")
    }


def draw_curves(curves: Mapping[str, Curve], *, is_share: bool = False) -> str:
    """Returns an SVG of a few curves over steps, noisy ones under their running mean."""
    with matplotlib.rc_context(_STYLE):
        axes = _axes(3.4, 1.9)
        for colour, (steps, values) in zip(SERIES, curves.values(), strict=False):
            steps, values = _thin(steps), _thin(values)
            if len(steps) > 16:
                axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
                axes.plot(
                    steps, running_mean(values, len(values) // 8), color=colour, linewidth=1.7
                )
            else:
                axes.plot(steps, values, color=colour, linewidth=1.7, marker="o", markersize=3)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.margins(x=0.02, y=0.12)
        _number_y(axes, is_share)
        return _svg(axes)


def draw_scores(titles: Sequence[str], scores: Sequence[Score | None], colour_index: int) -> str:
    """Returns an SVG of one benchmark's score and interval after each stage."""
    colour = SERIES[colour_index % len(SERIES)]
    with matplotlib.rc_context(_STYLE):
        axes = _axes(3.4, 2.1)
        xs = [i for i, score in enumerate(scores) if score]
        points = [score for score in scores if score]
        ys = [score.value for score in points]
        ends = [score.interval or (score.value, score.value) for score in points]
        for x, (low, high) in zip(xs, ends, strict=True):
            axes.plot(
                [x, x], [low, high], color=colour, linewidth=5, alpha=0.25, solid_capstyle="butt"
            )
        axes.plot(xs, ys, color=colour, linewidth=1.7, marker="o", markersize=5)
        lines = ["\n".join(textwrap.wrap(title, 13)) for title in titles]
        axes.set_xticks(range(len(titles)), lines, parse_math=False, fontsize=8)
        axes.set_xlim(-0.4, len(titles) - 0.6)
        axes.margins(y=0.15)
        _number_y(axes, bool(points) and points[0].is_rate)
        return _svg(axes)


def running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Returns the mean over a window of about `width` values around each; the window shrinks at both ends."""
    half = max(width // 2, 1)
    total = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    reach = np.minimum(half, np.minimum(at, len(values) - 1 - at))
    return (total[at + reach + 1] - total[at - reach]) / (2 * reach + 1)


def _thin(values: np.ndarray) -> np.ndarray:
    """Returns means of equal stretches, the fewest that leave at most MOST_POINTS of them."""
    stretch = -(-len(values) // MOST_POINTS)
    return np.array([values[i : i + stretch].mean() for i in range(0, len(values), stretch)])


def _axes(width: float, height: float) -> Axes:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(axis="y")
    return axes


def _number_y(axes: Axes, is_share: bool) -> None:
    axes.yaxis.set_major_locator(MaxNLocator(4))
    low, high = axes.get_ylim()
    if is_share:
        axes.set_ylim(max(low, -0.02), min(high, 1.02))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.4g}%"))
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: compact(y, digits=4)))


def _svg(axes: Axes) -> str:
    buffer = io.StringIO()
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    FigureCanvasSVG(figure)
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    for unwanted in _UNWANTED:
        svg = unwanted.sub("", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return re.sub(r"\n\s*", "\n", svg).strip()
