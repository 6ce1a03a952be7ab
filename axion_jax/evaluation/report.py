"""The report of a run: one HTML file that needs nothing else, and the same tables for the terminal.

A report is written from what the run directory holds at that moment, so it also serves a run that is under way or
was killed: `summary.json` (evaluations of finished stages), `metrics.jsonl` (one object a step), and, where they
exist, `samples.jsonl` (transcripts) and `config.json`. A resumed run logs some steps twice: the last word counts.
"""

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jinja2
import markupsafe
import rich.console

from axion_jax.evaluation import curves, tables
from axion_jax.evaluation.tables import family_table, mismatch_table, stage_table

SAMPLES_PER_STAGE = 6
LONGEST_TRANSCRIPT = 4000  # characters shown of a prompt or response


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a run directory holds. Parts that are not there yet are empty."""

    workdir: pathlib.Path
    summary: dict[str, Any]
    metrics: dict[str, list[dict[str, Any]]]
    """Of each stage, in order of appearance: one record a step."""
    samples: dict[str, list[dict[str, Any]]]
    """Of each stage, as they were logged."""
    config: dict[str, Any]
    num_unreadable: int
    """Lines of the .jsonl files that are not JSON: a killed run leaves one."""

    @property
    def done(self) -> list[str]:
        """Titles of the stages that are trained and evaluated."""
        return [tables.stage_title(stage) for stage in tables.stages_of(self.summary)]

    @property
    def under_way(self) -> str:
        """The stage that logged last and its step, if it has no evaluation yet; else empty.

        Stages run one after the other, so an earlier one without an evaluation is not under way: it has
        none, like the training of a reward model.
        """
        finished = {stage.get("stage") for stage in tables.stages_of(self.summary)}
        name = next(reversed(self.metrics), None)
        if name is None or name in finished:
            return ""
        return f"{self.title_of(name)}, step {self.metrics[name][-1].get('step', '?')}"

    def title_of(self, name: str) -> str:
        """Returns the title of a stage by its name."""
        stages = {stage.get("stage"): stage for stage in tables.stages_of(self.summary)}
        return tables.stage_title(stages.get(name) or {"stage": name})


def load_run(workdir: str | os.PathLike[str]) -> Run:
    """Reads a run directory.

    Raises:
      FileNotFoundError: the directory does not exist or holds nothing to report.
      ValueError: `summary.json` or `config.json` is not a JSON object.
    """
    workdir = pathlib.Path(workdir)
    if not workdir.is_dir():
        raise FileNotFoundError(
            f"There is no run directory {workdir}. Name the --workdir that the recipe was started with."
        )
    if not any((workdir / name).exists() for name in ("summary.json", "metrics.jsonl")):
        raise FileNotFoundError(
            f"{workdir} has neither summary.json nor metrics.jsonl: no stage of a run has logged there yet."
        )
    metrics, bad_metrics = _read_lines(workdir / "metrics.jsonl")
    samples, bad_samples = _read_lines(workdir / "samples.jsonl")
    by_step: dict[str, dict[Any, dict[str, Any]]] = {}
    for record in metrics:
        steps = by_step.setdefault(str(record.get("stage", "run")), {})
        steps.setdefault(record.get("step", len(steps)), {}).update(record)
    by_stage: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        by_stage.setdefault(str(sample.get("stage", "run")), []).append(sample)
    return Run(
        workdir=workdir,
        summary=_read_object(workdir / "summary.json"),
        metrics={stage: list(steps.values()) for stage, steps in by_step.items()},
        samples=by_stage,
        config=_read_object(workdir / "config.json"),
        num_unreadable=bad_metrics + bad_samples,
    )


def write_report(workdir: str | os.PathLike[str]) -> pathlib.Path:
    """Writes `report.html` into a run directory and returns its path.

    Raises:
      FileNotFoundError, ValueError: as `load_run`.
    """
    run = load_run(workdir)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,  # transcripts hold <think>, <|user|> and whatever a policy comes up with
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    html = environment.get_template("report.html").render(
        run=run,
        facts=_facts(run.summary),
        times=_times(run.summary),
        stage_table=stage_table(run.summary),
        family_table=family_table(run.summary),
        mismatch_table=mismatch_table(run.summary),
        benchmarks=_benchmark_drawings(run.summary),
        stages=[_stage_drawings(run, name) for name in run.metrics],
        transcripts={run.title_of(name): _shown(samples) for name, samples in run.samples.items()},
        config=json.dumps(run.config, indent=2, ensure_ascii=False) if run.config else "",
    )
    path = run.workdir / "report.html"
    unfinished = path.with_suffix(".html.tmp")
    unfinished.write_text(html, encoding="utf-8")
    unfinished.replace(path)
    return path


def print_tables(
    workdir: str | os.PathLike[str], console: rich.console.Console | None = None
) -> None:
    """Prints the tables of a run. Raises as `load_run`."""
    run = load_run(workdir)
    console = console or rich.console.Console()
    for table in (stage_table(run.summary), family_table(run.summary), mismatch_table(run.summary)):
        if table.rows:
            console.print(table)
    facts = " · ".join(f"{label.lower()} {value}" for label, value, _ in _facts(run.summary))
    console.print(facts, style="dim", highlight=False, markup=False)
    if run.under_way or not run.done:
        console.print(status_of(run), style="yellow", highlight=False, markup=False)


def status_of(run: Run) -> str:
    """Returns one sentence on how far the run is."""
    done = f"Evaluated: {', '.join(run.done)}." if run.done else "No stage is evaluated yet."
    return f"{done} Under way: {run.under_way}." if run.under_way else done


def segments(text: str) -> Iterator[tuple[str, str]]:
    """Yields (kind, text) pieces of a transcript: "token" for template tokens, "thought" inside <think>, "text"."""
    is_thought = False
    for piece in re.split(r"(<\|[^|<>\s]+\|>|\[gMASK\]|<sop>|</?think>)", text):
        if piece in ("<think>", "</think>"):
            is_thought = piece == "<think>"
        if re.fullmatch(r"<\|.*\|>|\[gMASK\]|<sop>|</?think>", piece):
            yield "token", piece
        elif piece:
            yield ("thought" if is_thought else "text"), piece


def _facts(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Returns (label, value, remark) of the run as a whole."""
    facts = [("Wall time", tables.duration(summary.get("wall_seconds")), "")]
    if (memory := tables.number_of(summary.get("peak_memory_gb"))) is not None:
        facts.append(("Peak memory", f"{memory:.1f} GB", ""))
    if (score := tables.score_of(summary.get("reward_model"))) is not None:
        facts.append(("Reward model accuracy", f"{score.text} %", score.interval_text))
    if summary.get("seed") is not None:
        facts.append(("Seed", str(summary["seed"]), ""))
    return [fact for fact in facts if fact[1]]


def _times(summary: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """Returns (stage, duration, percent of all stages' time)."""
    seconds = {
        tables.stage_title(stage): tables.number_of(stage.get("wall_seconds")) or 0.0
        for stage in tables.stages_of(summary)
    }
    total = sum(seconds.values())
    return [(name, tables.duration(s), 100 * s / total) for name, s in seconds.items() if s]


def _benchmark_drawings(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns for every benchmark its title and the drawing of its scores over the stages."""
    table = stage_table(summary)
    drawings = []
    if len(table.rows) < 2:
        return drawings
    titles = [row.title.removeprefix("+ ") for row in table.rows]
    for i, (title, unit) in enumerate(zip(table.head[1:], table.subheads[1:], strict=True)):
        scores = [
            row.cells[i] if isinstance(row.cells[i], tables.Score) else None for row in table.rows
        ]
        if any(scores):
            drawing = curves.draw_scores(titles, scores, i)  # pyright: ignore[reportArgumentType]
            drawings.append({"title": title, "unit": unit, "drawing": markupsafe.Markup(drawing)})
    return drawings


def _stage_drawings(run: Run, name: str) -> dict[str, Any]:
    """Returns a stage's panels: those of the paper's figures, then every other metric it logged."""
    records = run.metrics[name]
    known = curves.curves_of(records)
    panels, taken = [], set()
    for panel in curves.PANELS:
        if found := curves.panel_curves(panel, known):
            panels.append(_panel(panel, found))
            taken |= found.keys()
    others = [curves.Panel(metric, (metric,)) for metric in known if metric not in taken]
    stages = {stage.get("stage"): stage for stage in tables.stages_of(run.summary)}
    stage = stages.get(name) or {}
    details = [
        stage.get("algorithm"),
        f"{max(r.get('step', 0) for r in records):,} steps",
        tables.duration(stage.get("wall_seconds")),
    ]
    return {
        "name": name,
        "title": run.title_of(name),
        "details": " · ".join(filter(None, details)),
        "panels": panels,
        "others": [_panel(panel, {panel.title: known[panel.title]}) for panel in others],
    }


def _panel(panel: curves.Panel, found: Mapping[str, curves.Curve]) -> dict[str, Any]:
    first = next(iter(found.values()))[1]
    show = "{:.1%}".format if panel.is_share else tables.compact
    return {
        "title": panel.title,
        "unit": panel.unit,
        "first": show(first[0]),
        "last": show(first[-1]),
        "legend": [tables.title_of(name.split("/", 1)[-1]) for name in found]
        if len(found) > 1
        else [],
        "drawing": markupsafe.Markup(curves.draw_curves(found, is_share=panel.is_share)),
    }


def _shown(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the last few samples of a stage, cut to length and in pieces."""
    shown = []
    for sample in samples[-SAMPLES_PER_STAGE:]:
        texts = {}
        for part in ("prompt", "response"):
            text = str(sample.get(part, ""))
            texts[part] = list(segments(text[:LONGEST_TRANSCRIPT]))
            if (left := len(text) - LONGEST_TRANSCRIPT) > 0:
                texts[part].append(("cut", f"… {left:,} more characters"))
        reward = tables.number_of(sample.get("reward"))
        shown.append({
            "task": str(sample.get("task", "")),
            "reward": "" if reward is None else tables.compact(reward),
            "is_good": reward is not None and reward > 0,
            **texts,
        })  # fmt: skip
    return shown


def _read_object(path: pathlib.Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON ({error}). Run the recipe again to rewrite it."
        ) from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; expected a JSON object.")
    return value


def _read_lines(path: pathlib.Path) -> tuple[list[dict[str, Any]], int]:
    """Returns the objects of a .jsonl file and the number of lines that are none."""
    if not path.exists():
        return [], 0
    objects, num_bad = [], 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in filter(str.strip, lines):
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if isinstance(value, dict):
                objects.append(value)
            else:
                num_bad += 1
    return objects, num_bad
