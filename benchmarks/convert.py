"""Speed of checkpoint conversion beside `cp` of the same files, and of FP8 beside a plain numpy loop.

    python benchmarks/convert.py --gigabytes=2 --directory=/a/disk/with/room

Writes a synthetic GLM-4.5-type checkpoint of that size, then takes turns: `cp`, to Orbax, back to Hugging
Face, FP8; every turn ends with its files flushed to disk, and the medians are compared. Peak memory is
that of a process which does the conversion and nothing else. CPU seconds are given beside seconds: on a
machine that is shared they are the steadier of the two.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import ml_dtypes
import numpy as np
from absl import app, flags

from axion_jax.checkpoint import fp8, names
from axion_jax.checkpoint.hf_config import GLM4_MOE, hf_config
from axion_jax.checkpoint.safetensors_file import layout
from axion_jax.models.config import ModelConfig

GIGABYTES = flags.DEFINE_float("gigabytes", 1.0, "Size of the synthetic checkpoint, 10^9 bytes.")
DIRECTORY = flags.DEFINE_string("directory", None, "Where to work; a temporary directory.")
ROUNDS = flags.DEFINE_integer("rounds", 3, "Turns of each.")

ONE_CONVERSION = """
import sys, time
from axion_jax.checkpoint import convert
from axion_jax.checkpoint.export import Export
start = time.perf_counter()
source, target, kind = sys.argv[1:]
convert.run(convert.prepare(source, target, Export(to=kind, high_precision_layers=0)))
(line,) = [x for x in open("/proc/self/status") if x.startswith("VmHWM")]
print(time.perf_counter() - start, time.process_time(), int(line.split()[1]) / 2**20)
"""


def model(gigabytes: float) -> ModelConfig:
    """Half the width of GLM-4.5-Air with 32 experts; as many layers as the size asks for."""
    experts, width, expert_width = 32, 2048, 1408
    per_layer = 2 * 3 * (experts + 1) * width * expert_width + 2 * 2 * 24 * 128 * width
    return ModelConfig(
        vocab_size=32_000,
        hidden_size=width,
        num_layers=1 + max(1, round((gigabytes * 1e9 - 0.3e9) / per_layer)),
        num_heads=24,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=5504,
        moe_intermediate_size=expert_width,
        num_dense_layers=1,
        num_experts=experts,
        num_experts_per_token=4,
        num_shared_experts=1,
    )


def write_synthetic(directory: pathlib.Path, config: ModelConfig) -> int:
    """A checkpoint in shards of one layer, as GLM-4.5-Air has; returns its bytes."""
    directory.mkdir(parents=True)
    text = json.dumps(hf_config(config, GLM4_MOE), indent=2)
    (directory / "config.json").write_text(text)
    shards: dict[int, dict] = {}
    for name, place in names.expected(config, GLM4_MOE).items():
        dtype = np.dtype(np.float32 if name.endswith("_bias") else ml_dtypes.bfloat16)
        shards.setdefault(names.layer_index(name) or 0, {})[name] = (place.shape, dtype)
    rng, index, total = np.random.default_rng(0), {}, 0
    noise = rng.normal(size=2**25).astype(ml_dtypes.bfloat16).view(np.uint8)
    for number, tensors in shards.items():
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        header, _, size = layout(tensors, {"format": "pt"})
        with (directory / file).open("wb") as out:
            out.write(header)
            left = size - len(header)
            while left:
                left -= out.write(noise[: min(left, len(noise))])
        index |= dict.fromkeys(tensors, file)
        total += size
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(content))
    return total


def timed_copy(source: pathlib.Path, target: pathlib.Path) -> tuple[float, float]:
    """(seconds, CPU seconds) of `cp`."""
    start, before = time.perf_counter(), os.times()
    subprocess.run(["cp", "-r", source, target], check=True)
    for file in target.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    after = os.times()
    busy = after.children_user + after.children_system + after.system
    busy -= before.children_user + before.children_system + before.system
    return time.perf_counter() - start, busy


def timed_conversion(source, target, kind: str) -> tuple[float, float, float]:
    """(seconds, CPU seconds, peak memory in GiB) of a process of its own, imports not counted in the first."""
    command = [sys.executable, "-c", ONE_CONVERSION, source, target, kind]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, busy, peak = map(float, done.stdout.split())
    return seconds, busy, peak


def disk(directory: pathlib.Path) -> None:
    total = write_synthetic(directory / "source", model(GIGABYTES.value))
    os.sync()
    turns: dict[str, list[tuple[float, float, float]]] = {}
    for _ in range(ROUNDS.value):
        turn = (*timed_copy(directory / "source", directory / "copy"), 0.0)
        turns.setdefault("cp", []).append(turn)
        for name, origin, kind in (
            ("HF -> Orbax", "source", "orbax"),
            ("Orbax -> HF", "orbax", "hf"),
            ("HF -> FP8", "source", "sglang_fp8"),
        ):
            turn = timed_conversion(directory / origin, directory / kind, kind)
            turns.setdefault(name, []).append(turn)
        for name in ("copy", "orbax", "hf", "sglang_fp8"):
            shutil.rmtree(directory / name)
        os.sync()
    copy = statistics.median(seconds for seconds, _, _ in turns["cp"])
    print(f"{total / 1e9:.2f} GB, {ROUNDS.value} turns, medians; seconds of each turn in brackets")
    for name, found in turns.items():
        seconds, busy, peak = (statistics.median(column) for column in zip(*found, strict=True))
        memory = f", peak memory {peak:.2f} GiB" if peak else ""
        each = " ".join(f"{turn[0]:.1f}" for turn in found)
        print(
            f"  {name:12} {total / 1e9 / seconds:5.2f} GB/s, {100 * copy / seconds:4.0f} % of cp,"
            f" {busy:4.1f} CPU s{memory} [{each}]"
        )


def plain_loop(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The definition of block quantisation, one block after the other."""
    w = weight.astype(np.float32)
    scales = np.empty([-(-n // 128) for n in w.shape], np.float32)
    codes = np.empty(w.shape, ml_dtypes.float8_e4m3fn)
    for i, j in np.ndindex(scales.shape):
        at = np.s_[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
        scales[i, j] = np.maximum(np.abs(w[at]).max(), np.float32(1e-12)) / np.float32(448)
        codes[at] = np.clip(w[at] / scales[i, j], -448, 448).astype(codes.dtype)
    return codes, scales


def quantisation() -> None:
    for shape, dtype in (((1408, 4096), ml_dtypes.bfloat16), ((12288, 4096), np.float32)):
        weight = np.random.default_rng(0).normal(size=shape).astype(dtype)

        def ours(weight=weight):
            return fp8.in_panels(fp8.quantize_blocks, weight)

        def best(function, clock):
            times = []
            for _ in range(7):
                start = clock()
                function()
                times.append(clock() - start)
            return min(times)

        codes, scales = ours()
        want_codes, want_scales = plain_loop(weight)
        assert (codes == want_codes.view(np.uint8)).all() and (scales == want_scales).all()
        wall, busy = (
            best(lambda w=weight: plain_loop(w), clock) / best(ours, clock)
            for clock in (time.perf_counter, time.process_time)
        )
        print(
            f"  FP8 blocks of {np.dtype(dtype).name} {shape}:"
            f" {weight.size / best(ours, time.perf_counter) / 1e6:.0f} M/s, {wall:.1f} x the plain"
            f" loop ({busy:.1f} x by CPU time), same bits"
        )


def main(_) -> None:
    quantisation()
    with tempfile.TemporaryDirectory(dir=DIRECTORY.value) as directory:
        disk(pathlib.Path(directory))


if __name__ == "__main__":
    app.run(main)
