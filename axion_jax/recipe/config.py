"""From a ConfigDict at the door to frozen dataclasses inside, once, with every mistake answered in
a sentence."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, cast


def parse[T](cls: type[T], section: Mapping[str, Any], where: str) -> T:
    """Builds dataclass `cls` from the config section at dotted path `where`, nested ones included.

    Raises:
      ValueError: a key that `cls` has no use for (answered with the nearest), one that is missing,
        a value of the wrong type, or whatever the dataclass itself refuses. The message names the
        place, as `config.<where>.<key>`.
    """
    prefix = f"config.{where}." if where else "config."
    fields = {field.name: field for field in dataclasses.fields(cast(Any, cls))}
    hints = typing.get_type_hints(cls)
    for key in section:
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            hint = (
                f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(sorted(fields))}."
            )
            raise ValueError(f"{prefix}{key} is not an option here.{hint}")
    missing = [
        name
        for name, field in fields.items()
        if name not in section
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{prefix.removesuffix('.')} lacks {', '.join(missing)}.")
    values = {
        key: _value(hints[key], value, f"{where}.{key}".lstrip("."))
        for key, value in section.items()
    }
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{prefix.removesuffix('.')}: {error}") from None


def _value(hint: Any, value: Any, where: str) -> Any:
    _check_finite(value, where)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        if value is None:
            return None
        (hint,) = [arm for arm in typing.get_args(hint) if arm is not type(None)]
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ValueError(f"config.{where} must be a section, not {value!r}.")
        return parse(cast(Any, hint), value, where)
    if hint is dict or typing.get_origin(hint) is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"config.{where} must be a section, not {value!r}.")
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    plain = {int: int, float: float, bool: bool, str: str}.get(hint)
    if plain is not None and (
        not isinstance(value, plain) or (plain is int and isinstance(value, bool))
    ):
        raise ValueError(f"config.{where} must be {plain.__name__}, not {value!r}.")
    if typing.get_origin(hint) is tuple or hint is tuple:
        return tuple(cast(Any, value))
    return value


def _check_finite(value: Any, where: str) -> None:
    """NaN passes every comparison, so it would switch a bound off without a word."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_finite(inner, f"{where}.{key}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"config.{where}={value} must be a finite number.")
