"""Scores of given tokens: a file of sequences in, what the model says of each out, in the same order.

    {"input_ids": [5, 7, 9]}  or  {"messages": [...], "tools": [...]}      one row a line

becomes, of a causal model,

    {"logprobs": [l0, l1]}    l_t = log p(token t+1 | tokens 0..t), nats, float32; one fewer than tokens
    + "entropy": [h0, h1]     of the same distributions
    + "routed_experts"        [N-1][mixture layer][K] experts used for token t
    + "input_ids"             of rows that came as messages: what was scored

and of a sequence classifier {"score": s}, its scalar head at the row's last token that is not padding.

The file is read and written a window at a time: sequences of a window are sorted into buckets of
length and packed into rows, so that a handful of compiled shapes serve any file. What is written is
in `<output>.partial`, whose whole lines a restarted run keeps; it gets its name when it is complete.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedTokenizerFast

from axion_jax.checkpoint.load import load_params
from axion_jax.checkpoint.source import Checkpoint, open_checkpoint, read_json
from axion_jax.checkpoint.training import write_json
from axion_jax.data import tokenizer as tokenizers
from axion_jax.models.decoder import Decoder
from axion_jax.models.scores import make_score_fn, make_value_fn
from axion_jax.rewards.reward_model import judged, pack_for_scoring
from axion_jax.sharding.mesh import MeshConfig, make_mesh
from axion_jax.sharding.rules import batch_sharding, param_shardings
from axion_jax.types import Batch, Trajectory

SHORTEST_ROW = 256
"""Sequences up to this long share rows of this length; longer ones have rows of the next power of 2."""
DEEP = 8
"""Layers from which on one compiled body serves all layers of a kind."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    entropy: bool = False
    routed_experts: bool = False
    dtype: str | None = None
    """Of parameters and activations; None: that of the checkpoint. Router and outputs are float32."""
    tokens_per_batch: int = 16_384
    """Predictions of one compiled batch, over all devices."""
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)

    def __post_init__(self) -> None:
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r} must be float32 or bfloat16.")
        if self.tokens_per_batch < 1:
            raise ValueError(f"tokens_per_batch={self.tokens_per_batch} must be at least 1.")


@dataclasses.dataclass(frozen=True)
class Row:
    line: int
    """Counted from 1."""
    token_ids: np.ndarray
    rendered: bool
    """From messages, by the model's chat template."""


@dataclasses.dataclass(frozen=True)
class Done:
    """How far a run has come."""

    rows: int = 0
    written: int = 0
    """Bytes of output."""
    line: int = 0
    """Lines of input read, blank ones too."""
    offset: int = 0
    """Bytes of input read."""


def score_file(
    model: str | os.PathLike[str],
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    config: ScoreConfig,
    *,
    progress: Callable[[int, int, int], None] = lambda rows, tokens, nbytes: None,
) -> int:
    """Scores every row of `source` into `target`; returns how many rows that file now has.

    Args:
      model: checkpoint directory, Hugging Face or Orbax.
      progress: called after each window with rows, tokens and bytes of `source` done since the last
        call.

    Raises:
      ValueError: a row cannot be scored (names file and line; rows before it are kept), `target`
        exists, or `<target>.partial` was begun with other settings.
    """
    source, target = pathlib.Path(source), pathlib.Path(target)
    if target.exists():
        raise ValueError(f"{target} exists. Remove it to score again, or choose another --output.")
    if not source.is_file():
        raise ValueError(f"{source}: no such file.")
    checkpoint = open_checkpoint(model)
    scorer = Scorer(checkpoint, config)
    settings = {"model": str(pathlib.Path(model).absolute()), "input": str(source.absolute())}
    settings |= {"entropy": config.entropy, "routed_experts": config.routed_experts}
    settings |= {"dtype": scorer.dtype.name}
    partial = target.with_name(target.name + ".partial")
    described = partial.with_name(partial.name + ".json")
    done = _begun(partial, described, settings)
    with partial.open("r+b") as file:
        file.truncate(done.written)  # the window it was killed in is scored again
        file.seek(done.written)
        for rows, line, offset in _windows(source, checkpoint, done, 8 * config.tokens_per_batch):
            for row, result in zip(rows, scorer.score(rows, source), strict=True):
                extra = {"input_ids": row.token_ids.tolist()} if row.rendered else {}
                file.write((json.dumps(extra | result, allow_nan=False) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
            num_tokens, read = sum(len(row.token_ids) for row in rows), offset - done.offset
            done = Done(done.rows + len(rows), file.tell(), line, offset)
            write_json(described, settings | {"done": dataclasses.asdict(done)})
            progress(len(rows), num_tokens, read)
    partial.replace(target)
    described.unlink()
    return done.rows


class Scorer:
    """A checkpoint on the devices of a mesh, and the programs that score batches with it."""

    def __init__(self, checkpoint: Checkpoint, config: ScoreConfig) -> None:
        model = checkpoint.config
        self.classifies = not model.vocab_head
        if config.entropy and self.classifies:
            raise ValueError(f"{checkpoint.directory} is a classifier: its tokens have no entropy.")
        if config.routed_experts and not model.num_moe_layers:
            raise ValueError(f"{checkpoint.directory} is a dense model: it has no routed experts.")
        if jax.process_count() > 1:
            raise ValueError("Scoring runs on the devices of one process; split the input instead.")
        stored = checkpoint.tensors["model.embed_tokens.weight"].dtype.name
        half = (config.dtype or stored) == "bfloat16"
        self.dtype = np.dtype(jnp.bfloat16 if half else np.float32)
        mesh = make_mesh(config.mesh)
        decoder = Decoder(model, dtype=self.dtype, mesh=mesh, scan_layers=model.num_layers > DEEP)
        shardings = param_shardings(mesh, decoder.logical_axes(), decoder.abstract_params())
        self._params = load_params(checkpoint, dtype=self.dtype, shardings=shardings)
        self._config, self._devices, self._sharding = config, mesh.size, batch_sharding(mesh)
        self._pad = checkpoint.hf_config.get("pad_token_id")
        self._run = jax.jit(
            functools.partial(_classify if self.classifies else self._predict, decoder)
        )

    def _predict(self, decoder: Decoder, params: Any, batch: Batch) -> dict[str, Any]:
        scores = make_score_fn(decoder, entropy=self._config.entropy)(params, batch)
        found = {
            "logprobs": scores.logprobs,
            "entropy": scores.entropy,
            "routed_experts": scores.routing if self._config.routed_experts else None,
        }
        return {name: value for name, value in found.items() if value is not None}

    def score(self, rows: Sequence[Row], source: pathlib.Path) -> list[dict[str, Any]]:
        """What is written of each row, in order.

        Raises:
          ValueError: a result is not finite; names the line.
        """
        results: list[dict[str, Any]] = [{} for _ in rows]
        buckets: dict[int, list[tuple[int, Trajectory]]] = {}
        for i, row in enumerate(rows):
            trajectory = self._sequence(row)
            predictions = len(trajectory.loss_mask)
            if predictions:
                length = max(SHORTEST_ROW, 1 << (predictions - 1).bit_length())
                buckets.setdefault(length, []).append((i, trajectory))
            else:
                names = ("logprobs", "entropy", "routed_experts")
                wanted = (True, self._config.entropy, self._config.routed_experts)
                results[i] = {name: [] for name, w in zip(names, wanted, strict=True) if w}
        for length in sorted(buckets):
            numbers, sequences = zip(*buckets[length], strict=True)
            for i, found in zip(numbers, self._bucket(sequences, length), strict=True):
                for name, value in found.items():
                    if not np.all(np.isfinite(value)):
                        raise ValueError(f"{source}:{rows[i].line}: {name} is not finite.")
                results[i] = {name: _jsonable(value) for name, value in found.items()}
        return results

    def _sequence(self, row: Row) -> Trajectory:
        ids = row.token_ids
        if not self.classifies:
            return Trajectory(token_ids=ids, loss_mask=np.zeros(len(ids) - 1, bool))
        if self._pad is not None and ids[-1] == self._pad:
            (real,) = np.nonzero(ids != self._pad)
            ids = ids[: real[-1] + 1] if len(real) else ids[:1]
        return judged(Trajectory(token_ids=ids, loss_mask=np.zeros(len(ids) - 1, bool)), end_id=0)

    def _bucket(self, sequences: Sequence[Trajectory], length: int) -> Iterator[dict[str, Any]]:
        """Results of sequences that rows of this length hold, in order."""
        share = self._config.tokens_per_batch // (length * self._devices)
        rows = max(1, share) * self._devices
        packed = pack_for_scoring(list(sequences), row_length=length, rows=rows, pad_id=0)
        outputs = []
        for m in range(packed.num_microbatches):
            batch = jax.tree.map(lambda x, m=m: x[m], packed.batch)
            run = self._run(self._params, jax.device_put(batch, self._sharding))
            outputs.append(jax.device_get(run))
        for slot in packed.index:
            span = slice(slot.offset, slot.offset + slot.length)
            of_row = {name: x[slot.row, span] for name, x in outputs[slot.microbatch].items()}
            yield {"score": of_row["score"][-1]} if self.classifies else of_row


def _classify(decoder: Decoder, params: Any, batch: Batch) -> dict[str, jax.Array]:
    return {"score": make_value_fn(decoder)(params, batch)}


def _jsonable(value: np.ndarray) -> Any:
    """Nested lists; a float32 with as many digits as it takes to read it back."""
    if value.dtype != np.float32:
        return value.tolist()
    return float(str(value)) if value.ndim == 0 else [float(str(x)) for x in value]


# -- the input ------------------------------------------------------------------------------------


def _windows(
    source: pathlib.Path, checkpoint: Checkpoint, done: Done, most_tokens: int
) -> Iterator[tuple[list[Row], int, int]]:
    """(rows, lines read, bytes read) of about `most_tokens` tokens at a time, from where `done` is."""
    tokenizer = functools.cache(lambda: tokenizer_of(checkpoint))
    rows, tokens, number = [], 0, done.line
    with source.open("rb") as file:
        file.seek(offset := done.offset)
        for number, line in enumerate(file, start=done.line + 1):
            if line.strip():
                try:
                    row = _row(number, line, tokenizer, checkpoint.config.vocab_size)
                except ValueError as error:
                    if rows:  # what came before is good: it is scored, and kept
                        yield rows, number - 1, offset
                    raise ValueError(f"{source}:{number}: {error}") from None
                rows.append(row)
                tokens += len(row.token_ids)
            offset += len(line)
            if tokens >= most_tokens:
                yield rows, number, offset
                rows, tokens = [], 0
    if rows:
        yield rows, number, offset


def _row(
    number: int, line: bytes, tokenizer: Callable[[], PreTrainedTokenizerFast], vocab_size: int
) -> Row:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(fields, dict) or ("input_ids" in fields) == ("messages" in fields):
        raise ValueError('expected {"input_ids": [...]} or {"messages": [...]}.')
    if rendered := "messages" in fields:
        ids = _render(tokenizer(), fields["messages"], fields.get("tools"))
    else:
        ids = fields["input_ids"]
        if not isinstance(ids, list) or not ids or not all(type(x) is int for x in ids):
            raise ValueError("input_ids must be a list of one or more whole numbers.")
    for found in (min(ids), max(ids)):
        if not 0 <= found < vocab_size:
            raise ValueError(f"token id {found} is not in the model's vocabulary of {vocab_size}.")
    return Row(number, np.array(ids, np.int32), rendered)


def _render(tokenizer: PreTrainedTokenizerFast, messages: Any, tools: Any) -> list[int]:
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and "role" in message for message in messages
    ):
        raise ValueError('messages must be a list of {"role": ..., "content": ...}.')
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    except Exception as error:  # Jinja raises what the template's expressions raise
        raise ValueError(f"the chat template refuses these messages: {error}") from None
    ids = tokenizers.encode(tokenizer, str(text))
    if not ids:
        raise ValueError("the messages render to no tokens.")
    return ids


def tokenizer_of(checkpoint: Checkpoint) -> PreTrainedTokenizerFast:
    """The tokenizer that lies beside a checkpoint, with its chat template.

    Raises:
      ValueError: there is none, or it has no template and is not GLM's.
    """
    found = [path.parent for path in checkpoint.side_files if path.name == "tokenizer.json"]
    if not found:
        raise ValueError(
            f"{checkpoint.directory} has no tokenizer.json, which messages need. Give input_ids."
        )
    tokenizer = tokenizers.load(found[0])
    if (
        tokenizer.chat_template == tokenizers.CHAT_TEMPLATE
        and "[gMASK]" not in tokenizer.get_vocab()
    ):
        raise ValueError(
            f"{found[0]} has no chat template, which messages need. Give input_ids, or add"
            " chat_template.jinja."
        )
    return tokenizer


# -- the output -----------------------------------------------------------------------------------


def _begun(partial: pathlib.Path, described: pathlib.Path, settings: dict[str, Any]) -> Done:
    """Where a run with these settings stands; nothing is there of one that has not begun."""
    if not (partial.is_file() and described.is_file()):
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(b"")
        write_json(described, settings | {"done": dataclasses.asdict(Done())})
        return Done()
    before = read_json(described)
    for key, value in settings.items():
        if before.get(key) != value:
            raise ValueError(
                f"{partial} was begun with {key}={before.get(key)!r}, not {value!r}. Remove it, or"
                " give the old value to go on."
            )
    return Done(**before["done"])
