import xml.etree.ElementTree

import numpy as np

from axion_jax.evaluation import curves
from axion_jax.evaluation.tables import Score


def test_curves_leave_out_steps_without_a_finite_value():
    records = [
        {"stage": "sft", "step": 1, "loss": 2.0},
        {"stage": "sft", "step": 2, "loss": float("nan"), "held_out": {"sum": 0.25, "count": 0.5}},
        {"stage": "sft", "step": 3, "loss": 1.0, "note": "text is no metric"},
    ]
    found = curves.curves_of(records)
    assert list(found) == ["loss", "held_out/sum", "held_out/count"]
    np.testing.assert_array_equal(found["loss"], [[1, 3], [2.0, 1.0]])
    np.testing.assert_array_equal(found["held_out/sum"], [[2], [0.25]])


def test_a_panel_takes_its_metrics_and_their_parts():
    one = (np.array([1.0]), np.array([0.5]))
    known = {"raw_reward": one, "reward": one, "reward/length": one, "rewarding": one}
    panel = curves.Panel("Training reward", ("reward", "raw_reward"))
    assert list(curves.panel_curves(panel, known)) == ["reward", "reward/length", "raw_reward"]


def test_running_mean_keeps_a_straight_line_and_its_ends():
    line = np.linspace(3.0, 7.0, 50)
    np.testing.assert_allclose(curves.running_mean(line, 9), line)


def test_running_mean_averages_the_neighbours():
    # Window 3, shrunk to 1 at the ends.
    np.testing.assert_allclose(curves.running_mean(np.array([0.0, 3.0, 0.0, 6.0]), 3), [0, 1, 3, 6])


def test_drawings_are_light_xml_in_the_pages_colours():
    steps = np.arange(20_000.0)
    svg = curves.draw_curves({"loss": (steps, np.sin(steps))})
    xml.etree.ElementTree.fromstring(svg)
    assert len(svg) < 60_000
    assert "var(--series-1)" in svg and "#0102" not in svg
    assert "font-family" not in svg and 'pt"' not in svg


def test_the_same_curve_gives_the_same_drawing():
    curve = {"loss": (np.arange(5.0), np.arange(5.0))}
    assert curves.draw_curves(curve) == curves.draw_curves(curve)


def test_one_point_and_a_flat_line_can_be_drawn():
    for values in ([0.5], [0.0, 0.0]):
        svg = curves.draw_curves({"x": (np.arange(len(values)), np.array(values))}, is_share=True)
        xml.etree.ElementTree.fromstring(svg)


def test_stage_titles_are_drawn_as_they_are():
    svg = curves.draw_scores(["a $x_1$ <b>", "b"], [Score(value=0.5), None], 0)
    texts = "".join(xml.etree.ElementTree.fromstring(svg).itertext())
    assert "$x_1$ <b>" in " ".join(texts.split())
