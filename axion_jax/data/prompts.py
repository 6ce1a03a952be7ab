"""Prompt sets: endless streams of training prompts, and held-out prompts that no stage ever trains
on.

A prompt set is a pure function of (seed, index), so a resumed run needs to remember one number per
set, and what is held out is decided by a hash of the prompt's own text: no split file, and no leak
between stages that share a set.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable
from typing import Any, Protocol

Message = dict[str, Any]

HELD_OUT_SHARE = 0.1
MAX_ATTEMPTS = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One task for the policy."""

    task_id: str
    """Stable across runs: the hash of the text."""
    family: str
    """Which generator made it; results are reported per family."""
    messages: tuple[Message, ...]
    thinking: bool = True
    """False: the template closes the reasoning block itself (/nothink)."""
    entry: Any = None
    """What the scorer needs to know: a gold answer, constraints."""

    @property
    def text(self) -> str:
        return "\n".join(message["content"] for message in self.messages)


class PromptSet(Protocol):
    """What a stage trains and is evaluated on."""

    families: tuple[str, ...]

    def train(self, index: int) -> Prompt:
        """The index-th training prompt; never a held-out one."""
        ...

    def held_out(self, count: int) -> list[Prompt]:
        """`count` distinct held-out prompts, families in turn, the same ones for every stage and
        seed of a run."""
        ...

    def demonstrate(self, prompt: Prompt, rng: random.Random) -> Message:
        """An assistant message of mixed quality: what gives RL something to select."""
        ...


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def is_held_out(text: str) -> bool:
    """Whether a prompt with this text belongs to the held-out tenth of its prompt space."""
    return digest(text)[0] < round(256 * HELD_OUT_SHARE)


def stream_rng(*key: object) -> random.Random:
    """A generator that depends on `key` alone (Python's own hash() differs from process to
    process)."""
    return random.Random(int.from_bytes(digest(repr(key))[:8]))


class GeneratedPrompts:
    """Train and held-out streams over `make(family, rng) -> Prompt | None` (None: not wanted, draw
    again)."""

    def __init__(
        self,
        families: tuple[str, ...],
        make: Callable[[str, random.Random], Prompt | None],
        *,
        seed: int,
    ) -> None:
        self.families = families
        self.seed = seed
        self._make = make

    def train(self, index: int) -> Prompt:
        family = self.families[index % len(self.families)]
        return self._draw(family, ("train", self.seed, index), held_out=False)

    def held_out(self, count: int) -> list[Prompt]:
        found: dict[str, Prompt] = {}
        index = 0
        while len(found) < count:
            if index > 100 * count:
                raise ValueError(
                    f"Only {len(found)} distinct held-out prompts among {index} draws, {count} wanted: the prompt space"
                    f" of {', '.join(self.families)} is too small. Ask for fewer."
                )
            family = self.families[index % len(self.families)]
            prompt = self._draw(family, ("held out", index), held_out=True)
            found.setdefault(prompt.task_id, prompt)
            index += 1
        return list(found.values())

    def _draw(self, family: str, key: tuple, *, held_out: bool) -> Prompt:
        rng = stream_rng(family, *key)
        for _ in range(MAX_ATTEMPTS):
            prompt = self._make(family, rng)
            if prompt is not None and is_held_out(prompt.text) == held_out:
                return prompt
        raise ValueError(
            f"{MAX_ATTEMPTS} draws of {family} gave no prompt with held_out={held_out}."
        )


def make_prompt(family: str, text: str, *, thinking: bool, entry: Any) -> Prompt:
    """A single-turn prompt whose id is the hash of its text."""
    return Prompt(
        task_id=f"{family}-{digest(text).hex()[:12]}",
        family=family,
        messages=({"role": "user", "content": text},),
        thinking=thinking,
        entry=entry,
    )
