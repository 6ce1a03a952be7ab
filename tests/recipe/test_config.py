"""From config sections to frozen dataclasses: every mistake is answered with the place and the next move."""

import dataclasses
import re

import pytest

from axion_jax.recipe.config import parse


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    size: int
    rate: float = 0.5

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"size={self.size} must be at least 1.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    learning_rate: float
    num_steps: int
    inner: Inner
    shuffle: bool = True
    limit: int | None = None
    extra: Inner | None = None
    options: dict[str, float] = dataclasses.field(default_factory=dict)
    axes: tuple[int, ...] = ()


GOOD = {"name": "a", "learning_rate": 0.1, "num_steps": 3, "inner": {"size": 2}}


def refusal(change, where="stage", drop=()):
    section = {key: value for key, value in (GOOD | change).items() if key not in drop}
    with pytest.raises(ValueError) as caught:
        parse(Outer, section, where)
    return str(caught.value)


def test_sections_become_dataclasses_with_their_defaults():
    parsed = parse(Outer, GOOD | {"extra": {"size": 4, "rate": 1}, "axes": [1, 2]}, "stage")
    assert parsed == Outer(
        name="a",
        learning_rate=0.1,
        num_steps=3,
        inner=Inner(size=2),
        extra=Inner(size=4, rate=1.0),
        axes=(1, 2),
    )


def test_an_unknown_key_is_answered_with_the_nearest():
    assert refusal({"num_stepz": 1}) == (
        "config.stage.num_stepz is not an option here. Did you mean 'num_steps'?"
    )


def test_a_key_like_no_other_is_answered_with_all_of_them():
    message = refusal({"inner": {"size": 2, "qqq": 1}})
    assert message == "config.stage.inner.qqq is not an option here. Known: rate, size."


def test_missing_keys_are_all_named():
    message = refusal({}, drop=("num_steps", "name"))
    assert message == "config.stage lacks name, num_steps."


def test_the_top_level_has_no_name_of_its_own():
    assert refusal({}, where="", drop=("name",)) == "config lacks name."
    assert refusal({"inner": {}}, where="") == "config.inner lacks size."
    assert refusal({"nam": 1}, where="").startswith("config.nam is not an option here.")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_steps": "3"}, "config.stage.num_steps must be int, not '3'."),
        ({"num_steps": 3.0}, "config.stage.num_steps must be int, not 3.0."),
        ({"num_steps": True}, "config.stage.num_steps must be int, not True."),
        ({"num_steps": None}, "config.stage.num_steps must be int, not None."),
        ({"learning_rate": "x"}, "config.stage.learning_rate must be float, not 'x'."),
        ({"learning_rate": True}, "config.stage.learning_rate must be float, not True."),
        ({"shuffle": 1}, "config.stage.shuffle must be bool, not 1."),
        ({"name": 1}, "config.stage.name must be str, not 1."),
        ({"limit": "x"}, "config.stage.limit must be int, not 'x'."),
        ({"inner": 3}, "config.stage.inner must be a section, not 3."),
        ({"extra": "x"}, "config.stage.extra must be a section, not 'x'."),
        ({"options": 3}, "config.stage.options must be a section, not 3."),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_place(change, message):
    assert refusal(change) == message


def test_an_int_stands_for_a_float_and_none_for_what_is_optional():
    parsed = parse(Outer, GOOD | {"learning_rate": 1, "limit": None, "extra": None}, "stage")
    assert isinstance(parsed.learning_rate, float)
    assert parsed.limit is None and parsed.extra is None


def test_what_a_dataclass_refuses_is_said_with_its_place():
    assert refusal({"inner": {"size": 0}}) == "config.stage.inner: size=0 must be at least 1."
    assert re.match("config.stage.extra: size=-1", refusal({"extra": {"size": -1}}))


def test_the_section_is_not_shared_with_what_was_parsed():
    section = GOOD | {"options": {"a": 1.0}}
    parsed = parse(Outer, section, "stage")
    section["options"]["a"] = 2.0
    assert parsed.options == {"a": 1.0}
