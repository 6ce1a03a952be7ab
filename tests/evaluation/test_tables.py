import json
import math

import rich.console

from axion_jax.evaluation import tables


def entry(value: float, half: float = 0.02) -> dict:
    return {"pass@1": value, "ci95": [value - half, value + half], "n": 100}


def summary(*scores: float | None) -> dict:
    return {
        "stages": [
            {"stage": f"s{i}", "eval": {} if score is None else {"reasoning": entry(score)}}
            for i, score in enumerate(scores)
        ]
    }


def cells(table: tables.Table) -> list:
    return [row.cells[0] for row in table.rows]


def test_changes_are_points_against_the_row_above():
    first, second, third = cells(tables.stage_table(summary(0.5, 0.625, 0.61)))
    assert (first.text, first.change_text, first.direction) == ("50.0", "", "level")
    assert (second.text, second.change_text, second.direction) == ("62.5", "+12.5", "rise")
    assert (third.text, third.change_text, third.direction) == ("61.0", "−1.5", "fall")
    assert second.interval_text == "[60.5, 64.5]"


def test_a_change_is_certain_where_the_intervals_are_apart():
    _, far, near = cells(tables.stage_table(summary(0.5, 0.7, 0.69)))
    assert far.is_certain and not near.is_certain


def test_a_change_that_rounds_to_nothing_has_no_direction():
    for other in (0.5004, 0.4996):
        _, second = cells(tables.stage_table(summary(0.5, other)))
        assert second.direction == "level"
        assert second.change_text in ("+0.0", "−0.0")


def test_a_missing_score_is_blank_and_the_next_has_no_change():
    first, second, third = cells(tables.stage_table(summary(0.5, None, 0.6)))
    assert second == tables.BLANK
    assert first.change is None and third.change is None


def test_reward_scores_are_shown_as_they_are_with_their_pass_rate_below():
    entry = {"reward_score": -0.314, "ci95": [-0.5, -0.1], "n": 8, "pass@1": 0.25}
    score = tables.score_of(entry)
    assert (score.text, score.interval_text) == ("−0.31", "[−0.50, −0.10]")
    assert score.notes == ("pass@1 25.0",)
    table = tables.stage_table({"stages": [{"stage": "rlhf", "eval": {"preference": entry}}]})
    assert table.subheads == ("", "reward · 8 prompts")


def test_an_unknown_interval_is_left_out():
    assert tables.score_of({"reward_score": 1.0, "ci95": [math.nan, math.nan]}).interval is None
    assert tables.score_of({"pass@1": math.nan}) is None
    assert tables.score_of({"n": 3}) is None


def test_families_compare_each_checkpoint_with_the_one_before():
    stages = [
        {
            "stage": f"s{i}",
            "eval": {"reasoning": entry(0.5) | {"families": {"count": entry(score)}}},
        }
        for i, score in enumerate((0.4, 0.6))
    ]
    (row,) = tables.family_table({"stages": stages}).rows
    assert (row.title, row.subtitle) == ("count", "Reasoning · 100 prompts")
    assert [cell.change_text for cell in row.cells] == ["", "+20.0"]


def test_mismatch_shows_both_ways_and_their_ratio():
    mismatch = {
        "with_replay": {"mean_abs_logprob_diff": 0.02, "k3": 0.001, "expert_disagreement": 0.0},
        "without_replay": {"mean_abs_logprob_diff": 0.05, "k3": 0.004, "expert_disagreement": 0.1},
    }
    rows = tables.mismatch_table({"mismatch": mismatch}).rows
    assert [row.title for row in rows] == ["Own routing", "Replayed routing", "Smaller by"]
    assert rows[2].cells == ("2.5×", "4×", "to zero")
    assert not tables.mismatch_table({}).rows


def test_names_become_titles():
    assert tables.title_of("reasoning_rl") == "Reasoning RL"
    assert tables.title_of("sft") == "SFT"
    assert tables.title_of("instruction_following") == "Instruction following"


def test_numbers_and_durations_read_easily():
    assert [tables.compact(x) for x in (0.01734, -1.5, 12345.6, 0.0)] == [
        "0.0173",
        "−1.5",
        "12,346",
        "0",
    ]
    assert [tables.duration(s) for s in (48.2, 185, 7800, None)] == [
        "48 s",
        "3 min 05 s",
        "2 h 10 min",
        "",
    ]


def test_the_terminal_shows_falls_and_names_with_brackets_as_they_are():
    run = summary(0.7, 0.5)
    run["stages"][1] |= {"title": "RL [bold]", "algorithm": "GSPO"}
    console = rich.console.Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(tables.stage_table(json.loads(json.dumps(run))))
    text = console.export_text()
    assert "−20.0" in text and "RL [bold]" in text and "GSPO" in text
