"""The tables of a run, each built once and shown twice: in the terminal and in the report.

The stage table reads like the paper's Table 2 (Rufus-Air, arXiv:2609.29421): one row a checkpoint, one column a
benchmark, each score beside its change against the row above. Everything here takes the `summary.json`
of a run, which may be incomplete: a score that is missing is a blank, never an error.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import rich.box
import rich.table
import rich.text

TITLES = {"sft": "SFT", "rlhf": "RLHF", "if_rl": "Instruction-Following RL"}
BLANK = "–"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """One number of a table, with what is needed to judge it."""

    value: float
    interval: tuple[float, float] | None = None
    """95 %."""
    change: float | None = None
    """Against the row above; None where there is none."""
    is_certain: bool = False
    """The intervals of this score and the one above do not overlap."""
    is_rate: bool = True
    """Shown in percent, changes in points; else as it is."""
    notes: tuple[str, ...] = ()
    """Further scores of the same samples, such as pass@4."""

    def number(self, value: float, sign: str = "") -> str:
        """Returns `value` in this score's unit."""
        digits = 1 if self.is_rate else 2
        shown = round(100 * value if self.is_rate else value, digits)
        return f"{shown + 0.0:{sign}.{digits}f}".replace("-", "−")

    @property
    def text(self) -> str:
        return self.number(self.value)

    @property
    def interval_text(self) -> str:
        return "[{}, {}]".format(*map(self.number, self.interval)) if self.interval else ""

    @property
    def change_text(self) -> str:
        return self.number(self.change, "+") if self.change is not None else ""

    @property
    def direction(self) -> str:
        """ "rise", "fall" or "level", as far as the shown digits go."""
        if self.change is None or not self.change_text.strip("+−0."):
            return "level"
        return "rise" if self.change > 0 else "fall"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A line of a table: what it is about, in one or two lines, and its cells."""

    title: str
    subtitle: str = ""
    cells: tuple[Score | str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table that rich can print (`rich.print(table)`) and the report's template can lay out."""

    title: str
    head: tuple[str, ...]
    """Column titles; the first is that of the row titles."""
    subheads: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    caption: str = ""

    def __rich__(self) -> rich.table.Table:
        table = rich.table.Table(
            title=self.title, caption=self.caption, box=rich.box.SIMPLE_HEAD, title_justify="left",
            caption_justify="left", title_style="bold", show_lines=False,
        )  # fmt: skip
        subheads = self.subheads or ("",) * len(self.head)
        for i, (head, subhead) in enumerate(zip(self.head, subheads, strict=True)):
            header = rich.text.Text(head).append(_below(subhead), "dim")
            table.add_column(header, justify="right" if i else "left", overflow="fold")
        for row in self.rows:
            title = rich.text.Text(row.title).append(_below(row.subtitle), "dim")
            table.add_row(title, *map(_rich_cell, row.cells))
        return table


def _below(subtitle: str) -> str:
    """Returns each part of a subtitle on its own line: a terminal is narrow."""
    return "".join(f"\n{part}" for part in subtitle.split(" · ") if part)


def _rich_cell(cell: Score | str) -> rich.text.Text:
    if isinstance(cell, str):
        return rich.text.Text(cell, style="dim" if cell == BLANK else "")
    text = rich.text.Text(cell.text, style="bold")
    if cell.change_text:
        style = {"rise": "green", "fall": "red", "level": "dim"}[cell.direction]
        text.append(f" {cell.change_text}", style if cell.is_certain else f"not bold dim {style}")
    if cell.interval:
        text.append(f"\n{cell.interval_text}", "not bold dim")
    for note in cell.notes:
        text.append(f"\n{note}", "not bold dim")
    return text


def title_of(name: str) -> str:
    """Returns a name of the summary as a reader sees it: "reasoning_rl" -> "Reasoning RL"."""
    words = name.replace("_", " ").split()
    words = [word.upper() if word in ("rl", "sft", "rlhf", "if") else word for word in words]
    return TITLES.get(name) or " ".join(words)[:1].upper() + " ".join(words)[1:]


def stages_of(summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the stages that a summary lists: those that are trained and evaluated."""
    return [stage for stage in summary.get("stages") or () if isinstance(stage, Mapping)]


def evaluations_of(stage: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns the entries of a stage's evaluation that have a score, by benchmark."""
    entries = stage.get("eval") or {}
    return {name: entry for name, entry in entries.items() if score_of(entry) is not None}


def stage_title(stage: Mapping[str, Any]) -> str:
    """Returns the title of a stage of the summary."""
    return stage.get("title") or title_of(str(stage.get("stage", "?")))


def number_of(value: Any) -> float | None:
    """Returns `value` where it is a finite number, else None."""
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    return float(value) if is_number else None


def compact(value: float, digits: int = 3) -> str:
    """Returns a number in a few significant digits: 0.0173, 1.5, 12,346, −2e+09."""
    if 1e3 <= abs(value) < 1e7:
        return f"{value:,.0f}".replace("-", "−")
    return f"{value + 0.0:.{digits}g}".replace("-", "−")


def duration(seconds: Any) -> str:
    """Returns seconds as "48 s", "3 min 05 s" or "2 h 10 min"."""
    if (seconds := number_of(seconds)) is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def score_of(entry: Any, above: Score | None = None) -> Score | None:
    """Returns the leading score of an evaluation entry, `reward_score` or `pass@1`; None if it has none.

    Args:
      entry: as in `summary.json`: {"pass@1": …, "pass@4": …, "ci95": […, …], "n": …}.
      above: the same score of the row above, for the change.
    """
    if not isinstance(entry, Mapping):
        return None
    for leading in ("reward_score", "pass@1", "accuracy"):
        if (value := number_of(entry.get(leading))) is not None:
            break
    else:
        return None
    ends = [end for end in map(number_of, entry.get("ci95") or ()) if end is not None]
    interval = (ends[0], ends[1]) if len(ends) == 2 else None
    notes = [
        f"{name} {100 * other:.1f}"
        for name, rate in entry.items()
        if name.startswith("pass@") and name != leading and (other := number_of(rate)) is not None
    ]
    certain = False
    if above and above.interval and interval:
        certain = interval[0] > above.interval[1] or interval[1] < above.interval[0]
    return Score(
        value=value,
        interval=interval,
        change=value - above.value if above else None,
        is_certain=certain,
        is_rate=leading != "reward_score",
        notes=tuple(notes),
    )


def stage_table(summary: Mapping[str, Any]) -> Table:
    """Returns the run in one table: rows checkpoints, columns benchmarks, changes against the row above."""
    stages = stages_of(summary)
    evaluations = [evaluations_of(stage) for stage in stages]
    benchmarks = list(dict.fromkeys(name for entries in evaluations for name in entries))
    rows, above = [], {}
    for i, (stage, entries) in enumerate(zip(stages, evaluations, strict=True)):
        scores = {name: score_of(entries.get(name), above.get(name)) for name in benchmarks}
        details = (stage.get("algorithm"), duration(stage.get("wall_seconds")))
        rows.append(
            Row(
                title=("+ " if i else "") + stage_title(stage),
                subtitle=" · ".join(filter(None, details)),
                cells=tuple(scores[name] or BLANK for name in benchmarks),
            )
        )
        above = scores
    first = {name: next(e[name] for e in evaluations if name in e) for name in benchmarks}
    return Table(
        title="Held-out scores after every stage",
        head=("Checkpoint", *map(title_of, benchmarks)),
        subheads=("", *map(_unit, first.values())),
        rows=tuple(rows),
        caption="Below each score its 95 % interval; beside it the change against the row above, "
        "pale where the two intervals overlap.",
    )


def family_table(summary: Mapping[str, Any]) -> Table:
    """Returns the scores of every task family: rows families, columns checkpoints.

    Changes are against the column before.
    """
    stages = stages_of(summary)
    families: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for i, stage in enumerate(stages):
        for benchmark, entry in evaluations_of(stage).items():
            for family, result in (entry.get("families") or {}).items():
                families.setdefault((benchmark, family), {})[i] = result
    rows = []
    for (benchmark, family), results in families.items():
        scores: list[Score | None] = []
        for i in range(len(stages)):
            scores.append(score_of(results.get(i), scores[-1] if scores else None))
        n = next(iter(results.values())).get("n")
        rows.append(
            Row(
                title=family,
                subtitle=title_of(benchmark) + (f" · {n} prompts" if n else ""),
                cells=tuple(score or BLANK for score in scores),
            )
        )
    return Table(
        title="By task family",
        head=("Family", *(("+ " if i else "") + stage_title(s) for i, s in enumerate(stages))),
        rows=tuple(rows),
        caption="Changes against the column to the left.",
    )


def mismatch_table(summary: Mapping[str, Any]) -> Table:
    """Returns how far trainer and sampler disagree on the same rollouts, with and without routing replay (R3)."""
    mismatch = summary.get("mismatch") or {}
    columns = {
        "mean_abs_logprob_diff": ("Mean |Δ log-prob|", "nats a token"),
        "k3": ("k3 divergence", "nats a token"),
        "expert_disagreement": ("Expert disagreement", "share of routed experts"),
    }
    present = [name for name in columns if any(name in (row or {}) for row in mismatch.values())]
    rows = [
        Row(
            title=title,
            cells=tuple(_significant(mismatch[key].get(name)) for name in present),
        )
        for key, title in (("without_replay", "Own routing"), ("with_replay", "Replayed routing"))
        if mismatch.get(key)
    ]
    if len(rows) == 2:
        with_replay, without = mismatch["with_replay"], mismatch["without_replay"]
        cells = tuple(_ratio(without.get(name), with_replay.get(name)) for name in present)
        rows.append(Row(title="Smaller by", cells=cells))
    return Table(
        title="Trainer against sampler",
        head=("Trainer's forward pass", *(columns[name][0] for name in present)),
        subheads=("", *(columns[name][1] for name in present)),
        rows=tuple(rows),
        caption="The same rollouts and weights, sampled in the rollout's precision and scored in the "
        "trainer's.",
    )


def _unit(entry: Mapping[str, Any]) -> str:
    """Returns what the numbers of a benchmark's column are, from one of its entries."""
    unit = "reward" if "reward_score" in entry else "pass@1, %"
    return f"{unit} · {entry['n']} prompts" if entry.get("n") else unit


def _significant(value: Any) -> str:
    return BLANK if (number := number_of(value)) is None else compact(number)


def _ratio(larger: Any, smaller: Any) -> str:
    a, b = number_of(larger), number_of(smaller)
    if a is None or b is None:
        return BLANK
    return f"{compact(a / b)}×" if b > 0 else "to zero" if a > 0 else BLANK
