r"""Converts checkpoints: Hugging Face safetensors <-> Orbax -> SGLang. The source's kind is recognised.

    python launch/convert.py --source=GLM-4.5-Air --target=air-orbax --to=orbax --verify
    python launch/convert.py --source=runs/demo/rlhf --target=finished --to=hf
    python launch/convert.py --source=air-orbax --target=air-fp8 --to=sglang_fp8 \
        --tensor_parallel=8 --expert_parallel=8
    python launch/convert.py --inspect --source=GLM-4.5-Air

Killed, it goes on when the same command is given again. The target appears when it is whole.
"""

from __future__ import annotations

import sys
from functools import partial

from absl import app, flags
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from axion_jax.checkpoint import convert, inspect
from axion_jax.checkpoint.export import TARGETS, Export
from axion_jax.checkpoint.source import open_checkpoint

SOURCE = flags.DEFINE_string("source", None, "Hugging Face or Orbax directory, or RUN/STAGE.")
TARGET = flags.DEFINE_string("target", None, "Directory to create.")
TO = flags.DEFINE_enum("to", None, TARGETS, "Kind of the target.")
INSPECT = flags.DEFINE_bool("inspect", False, "Only say what --source holds.")
VERIFY = flags.DEFINE_bool("verify", False, "Read --target back; alone: only that.")
SHARD_GB = flags.DEFINE_float("shard_gb", 5.0, "Largest safetensors shard, in 10^9 bytes.")
THREADS = flags.DEFINE_integer("threads", 0, "Readers and writers; 0: twice the cores, at most 16.")
ROUTER_DTYPE = flags.DEFINE_enum("router_dtype", None, ["float32", "bfloat16"], "Router weights.")
HIGH_PRECISION_LAYERS = flags.DEFINE_integer(
    "high_precision_layers", None, "First layers that FP8 leaves alone; default 3, channels 0."
)
TENSOR_PARALLEL = flags.DEFINE_integer("tensor_parallel", 1, "Of the server that loads FP8.")
EXPERT_PARALLEL = flags.DEFINE_integer("expert_parallel", 1, "Of the server that loads FP8.")


def main(_) -> None:
    try:
        run(Console())
    except ValueError as error:
        sys.exit(f"Error: {error}")


def run(console: Console) -> None:
    if INSPECT.value:
        table = Table(show_header=False)
        for row in inspect.lines(inspect.summarise(open_checkpoint(_needed(SOURCE)))):
            table.add_row(*row)
        console.print(table)
        return
    target = _needed(TARGET)
    if TO.value is not None or not VERIFY.value:
        export = Export(
            to=_needed(TO),
            router_dtype=ROUTER_DTYPE.value,
            high_precision_layers=HIGH_PRECISION_LAYERS.value,
            tensor_parallel=TENSOR_PARALLEL.value,
            expert_parallel=EXPERT_PARALLEL.value,
        )
        shard_size = int(SHARD_GB.value * 1e9)
        conversion = convert.prepare(_needed(SOURCE), target, export, shard_size=shard_size)
        for reason, modules in conversion.plan.skipped_by_reason().items():
            console.print(f"Not quantised ({reason}): {modules}")
        with _bar(console) as bar:
            task = bar.add_task("Converting", total=conversion.total_bytes)
            convert.run(conversion, threads=THREADS.value, progress=partial(bar.advance, task))
    if VERIFY.value:
        with _bar(console) as bar:
            task = bar.add_task("Verifying", total=convert.written_bytes(target))
            total = convert.verify(target, progress=partial(bar.advance, task))
        console.print(f"{total:,} bytes read back, as they were written.")
    console.print(f"{target} is complete.")


def _needed(flag: flags.FlagHolder) -> str:
    if flag.value is None:
        raise ValueError(f"--{flag.name} is missing.")
    return flag.value


def _bar(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    return Progress(*columns, TimeRemainingColumn(), console=console)


if __name__ == "__main__":
    app.run(main)
