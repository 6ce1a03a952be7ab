r"""Decoded tokens per CPU-second of the embedded engine, at the size of the tiny recipe.

    python benchmarks/decode.py

Every row runs to the full length (no stop ids), so all decoded tokens count; prefill of 32-token
prompts is included. CPU-seconds are this process's own, whatever else the machine does.
"""

from __future__ import annotations

import time

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from axion_jax.models.config import ModelConfig
from axion_jax.models.decoder import Decoder, num_parameters
from axion_jax.rollout.engine import Sampling
from axion_jax.rollout.jax_engine import JaxEngine
from configs.tiny.recipe import get_config

PROMPT, NEW, REPEATS = 32, 48, 5


def main() -> None:
    config = ModelConfig(**get_config().model.to_dict())
    decoder = Decoder(config)
    params = jax.jit(decoder.init)(jax.random.key(0))
    rng = np.random.default_rng(0)
    table = Table(title=f"{num_parameters(config):,} parameters, {PROMPT} + {NEW} tokens a row")
    for column in ("rows", "precision", "tokens / CPU-s", "tokens / s", "ms / token step"):
        table.add_column(column, justify="right")
    for rows in (64, 256):
        prompts = list(rng.integers(0, config.vocab_size, (rows, PROMPT)).astype(np.int32))
        for name, layers in (("float32", None), ("FP8 after layer 1", 1)):
            engine = JaxEngine(decoder, high_precision_layers=layers, max_batch=rows)
            engine.update_weights(params, 0)
            sampling = Sampling(max_new_tokens=NEW, stop_ids=())
            engine.generate(prompts, sampling)  # compiles
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(REPEATS):
                engine.generate(prompts, sampling)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            tokens = rows * NEW * REPEATS
            table.add_row(
                str(rows),
                name,
                f"{tokens / cpu:,.0f}",
                f"{tokens / wall:,.0f}",
                f"{1000 * wall / (NEW * REPEATS):.1f}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
