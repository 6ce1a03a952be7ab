import importlib.util
import io
import json
import pathlib
import re
import subprocess
import sys

import pytest
import rich.console

from axion_jax.evaluation import report

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]


def write_run(workdir: pathlib.Path, **kwargs) -> pathlib.Path:
    spec = importlib.util.spec_from_file_location("synthetic_run", HERE / "synthetic_run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.write(workdir, **kwargs)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "demo")


@pytest.fixture(scope="module")
def page(demo):
    return report.write_report(demo).read_text()


def launch(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "launch/report.py"), *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_finished_run_gives_one_light_page_that_needs_nothing_else(page):
    assert len(page) < 2_000_000
    assert not re.search(r'(?:src|href)="(?!#)', page.replace("xlink:href", "href"))
    assert "@import" not in page and "url(http" not in page
    for text in (
        "Reasoning RL",
        "+25.6",
        "−3.9",
        "Response length",
        "chain_sum",
        "1.73×",
        "91.4 %",
    ):
        assert text in page
    assert "Under way" not in page


def test_stages_have_only_the_panels_of_what_they_logged(page):
    sft = page[page.index('id="stage-sft"') : page.index('id="stage-reasoning_rl"')]
    assert "<b>Loss</b>" in sft and "<b>Training reward</b>" not in sft
    rest = page[page.index('id="stage-reasoning_rl"') :]
    assert "<b>Training reward</b>" in rest and "<b>Held-out score</b>" in rest


def test_what_a_policy_writes_stays_text(page):
    assert "<b>three</b>" not in page and "&lt;b&gt;three&lt;/b&gt;" in page
    assert "<think>" not in page and "&lt;think&gt;" in page and "&lt;|user|&gt;" in page


def test_segments_put_thoughts_and_template_tokens_apart():
    pieces = list(report.segments("<|user|>\n1<2?<think>yes</think>\nTrue<|user|>"))
    assert pieces == [
        ("token", "<|user|>"),
        ("text", "\n1<2?"),
        ("token", "<think>"),
        ("thought", "yes"),
        ("token", "</think>"),
        ("text", "\nTrue"),
        ("token", "<|user|>"),
    ]


def test_a_killed_run_is_reported_as_far_as_it_came(tmp_path):
    run = write_run(tmp_path / "run", finished=2, logged=3)
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"stage": "if_rl", "st')
    html = report.write_report(run).read_text()
    assert "Evaluated: SFT → Reasoning RL" in html
    assert "Instruction-Following RL, step 30" in html
    assert "1 half-written line" in html


def test_a_run_without_any_evaluation_is_reported(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"stage": "sft", "step": 1, "loss": 3.0}\n')
    assert "No stage is evaluated yet" in report.write_report(tmp_path).read_text()
    text = io.StringIO()
    report.print_tables(tmp_path, rich.console.Console(file=text, width=80))
    assert "Under way: SFT, step 1." in text.getvalue()


def test_summaries_with_holes_are_reported(tmp_path):
    stages = [
        {},
        {"stage": "sft", "eval": None},
        {"stage": "x", "eval": {"a": None, "b": {}, "c": 3}},
    ]
    summary = {"stages": stages, "mismatch": {"with_replay": None}, "reward_model": None, "seed": 1}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "samples.jsonl").write_text('{"response": null}\n[1]\n')
    report.write_report(tmp_path)
    report.print_tables(tmp_path, rich.console.Console(file=io.StringIO()))


def test_a_step_logged_again_after_a_resume_counts_once(tmp_path):
    lines = [
        {"stage": "sft", "step": 1, "loss": 3.0, "held_out": 0.1},
        {"stage": "sft", "step": 2, "loss": 2.0},
        {"stage": "sft", "step": 2, "loss": 2.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = report.load_run(tmp_path).metrics["sft"]
    assert [record["loss"] for record in records] == [3.0, 2.5]


def test_long_transcripts_are_cut_and_only_the_last_are_shown(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    samples = [
        {"stage": "rl", "task": f"task{i}.", "prompt": "p", "response": "x" * 5000, "reward": i}
        for i in range(20)
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    html = report.write_report(tmp_path).read_text()
    assert "task19." in html and "task14." in html and "task13." not in html
    assert "… 1,000 more characters" in html and "x" * 4001 not in html


def test_the_command_prints_tables_and_writes_the_page(demo):
    (demo / "report.html").unlink(missing_ok=True)
    result = launch(f"--workdir={demo}")
    assert result.returncode == 0, result.stderr
    assert "Reasoning RL" in result.stdout and "+41.0" in result.stdout
    assert (demo / "report.html").exists()


def test_the_command_says_in_one_sentence_what_is_missing(tmp_path):
    for workdir, sentence in (
        (tmp_path / "nowhere", "There is no run directory"),
        (tmp_path, "neither summary.json nor metrics.jsonl"),
    ):
        result = launch(f"--workdir={workdir}")
        assert result.returncode == 1
        assert sentence in result.stderr and "Traceback" not in result.stderr
    (tmp_path / "summary.json").write_text('{"stages": [')
    result = launch(f"--workdir={tmp_path}")
    assert result.returncode == 1 and "is not JSON" in result.stderr
    assert "Traceback" not in result.stderr
