"""What a checkpoint holds: family, parameters, dtypes, sizes, and what is missing from it."""

from __future__ import annotations

import collections
import dataclasses
import math

from axion_jax.checkpoint import names
from axion_jax.checkpoint.source import Checkpoint


@dataclasses.dataclass(frozen=True)
class Summary:
    kind: str
    family: str
    stored: int
    """Numbers in the checkpoint, multi-token-prediction layers and buffers included."""
    total: int
    """Trainable parameters of the model: without those layers and the router's correction bias."""
    active: int
    """Numbers that one token's computation uses, vocabulary and correction bias included."""
    active_in_layers: int
    """`active` without embedding and head: how "12B active" is counted."""
    mtp: int
    """Numbers in multi-token-prediction layers."""
    nbytes: int
    files: int
    dtypes: dict[str, tuple[int, int]]
    """dtype -> (tensors, bytes)."""
    missing: list[str]
    unexpected: list[str]
    wrong: list[str]
    """Sentences about tensors of another shape or dtype than the config asks for."""


def summarise(checkpoint: Checkpoint) -> Summary:
    """Counts from names and shapes; reads no weights."""
    config = checkpoint.config
    missing, unexpected = names.compare(checkpoint.tensors, config, checkpoint.family)
    expected = names.expected(config, checkpoint.family)
    wrong = []
    for name, place in expected.items():
        if name in checkpoint.tensors:
            tensor = checkpoint.tensors[name]
            try:
                names.check_tensor(name, tensor.shape, tensor.dtype, place, tensor.where, config)
            except ValueError as error:
                wrong.append(str(error))
    dtypes: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for tensor in checkpoint.tensors.values():
        row = dtypes[tensor.dtype.name]
        row[0] += 1
        row[1] += tensor.nbytes
    sizes = {name: math.prod(place.shape) for name, place in expected.items()}
    weights = {n: s for n, s in sizes.items() if not n.endswith("e_score_correction_bias")}
    share = config.num_experts_per_token / max(1, config.num_experts)
    experts = sum(size for name, size in weights.items() if ".experts." in name)
    total = sum(weights.values())
    active = sum(sizes.values()) - experts + round(experts * share)
    vocabulary = sum(weights.get(n, 0) for n in ("model.embed_tokens.weight", "lm_head.weight"))
    paths = {extent.path for t in checkpoint.tensors.values() for extent in t.extents}
    return Summary(
        kind=checkpoint.kind,
        family=checkpoint.family,
        stored=sum(math.prod(t.shape) for t in checkpoint.tensors.values()),
        total=total,
        active=active,
        active_in_layers=active - vocabulary,
        mtp=sum(
            math.prod(t.shape) for n, t in checkpoint.tensors.items() if names.is_mtp(n, config)
        ),
        nbytes=sum(t.nbytes for t in checkpoint.tensors.values()),
        files=len(paths),
        dtypes={name: (row[0], row[1]) for name, row in sorted(dtypes.items())},
        missing=missing,
        unexpected=unexpected,
        wrong=wrong,
    )


def lines(summary: Summary) -> list[tuple[str, str]]:
    """Rows of a table for people."""
    rows = [
        ("kind", summary.kind),
        ("family", summary.family),
        ("parameters", f"{summary.total:,}"),
        ("active a token", f"{summary.active:,}"),
        ("  in the layers", f"{summary.active_in_layers:,}"),
        ("multi-token prediction", f"{summary.mtp:,}"),
        ("stored numbers", f"{summary.stored:,}"),
        ("size", f"{summary.nbytes:,} bytes in {summary.files} files"),
    ]
    for name, (count, nbytes) in summary.dtypes.items():
        rows.append((f"  {name}", f"{count:,} tensors, {nbytes:,} bytes"))
    for title in ("missing", "unexpected", "wrong"):
        found = getattr(summary, title)
        text = "; ".join(found[:8]) + (f"; and {len(found) - 8} more" if len(found) > 8 else "")
        rows.append((title, text or "none"))
    return rows
