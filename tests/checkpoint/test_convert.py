"""Conversions on disk: bit for bit there and back, killed and resumed, and never half a target."""

import errno
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from axion_jax.checkpoint import convert, jobs, layouts
from axion_jax.checkpoint.export import Export
from axion_jax.checkpoint.load import load_params
from axion_jax.checkpoint.source import open_checkpoint

from .conftest import GLM, glm_shapes, write_hf

DTYPES = {"BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F32": np.float32}
ROOT = pathlib.Path(__file__).parents[2]


def to(source, target, kind, **options):
    sizes = {key: options.pop(key) for key in ("shard_size",) if key in options}
    convert.run(convert.prepare(source, target, Export(to=kind, **options), **sizes), threads=4)
    return target


def all_tensors(directory):
    """What the files say, read by hand: the safetensors package has no float8 for numpy."""
    tensors = {}
    for file in directory.glob("*.safetensors"):
        data = file.read_bytes()
        base = 8 + int.from_bytes(data[:8], "little")
        for name, row in json.loads(data[8:base]).items():
            if name == "__metadata__":
                continue
            start, end = row["data_offsets"]
            raw = np.frombuffer(data[base + start : base + end], np.uint8)
            tensors[name] = raw.view(DTYPES[row["dtype"]]).reshape(row["shape"])
    return tensors


def test_the_safetensors_package_reads_what_we_write(glm_directory, tmp_path):
    back = to(glm_directory, tmp_path / "hf", "hf")
    assert_same_bits(load_file(back / "model.safetensors"), all_tensors(back))


def assert_same_bits(ours, theirs):
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert (ours[name].shape, ours[name].dtype) == (tensor.shape, tensor.dtype), name
        np.testing.assert_array_equal(
            ours[name].view(np.uint8), tensor.view(np.uint8), err_msg=name
        )


@pytest.fixture(scope="module")
def orbax_directory(glm_directory, tmp_path_factory):
    return to(glm_directory, tmp_path_factory.mktemp("orbax") / "glm", "orbax")


def test_there_and_back_is_bit_identical_with_everything_that_lay_beside(
    glm_directory, glm_tensors, orbax_directory, tmp_path
):
    back = to(orbax_directory, tmp_path / "hf", "hf")
    assert_same_bits(all_tensors(back), glm_tensors)
    assert json.loads((back / "config.json").read_text()) == GLM
    for name in ("generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (back / name).read_bytes() == (glm_directory / name).read_bytes()
    with safe_open(back / "model.safetensors", "numpy") as file:  # as transformers checks
        assert file.metadata() == {"format": "pt"}


def test_the_prediction_layer_is_kept_by_its_number(orbax_directory, tmp_path):
    tensors = all_tensors(to(orbax_directory, tmp_path / "hf", "hf"))
    assert "model.layers.3.shared_head.head.weight" in tensors
    assert "model.layers.3.mlp.experts.7.up_proj.weight" in tensors


def test_orbax_has_one_leaf_for_each_layer_and_tensor_and_restores_it_anywhere(
    orbax_directory, glm_tensors
):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    handler = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False))
    shapes = handler.metadata(orbax_directory).item_metadata.tree
    key = "model.layers.2.mlp.experts.gate_proj.weight"
    assert shapes[key].shape == (8, 8, 16)
    # Norms and attention 9, dense MLP 3; router 2, shared 3 and experts 3 in the other layers; 6 more
    # in the prediction layer; embedding, norm, head.
    assert len(shapes) == 12 + 3 * 17 + 6 + 3
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    wanted = {
        k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=jax.NamedSharding(mesh, jax.P()))
        for k, v in shapes.items()
    }
    wanted[key] = jax.ShapeDtypeStruct((8, 8, 16), jnp.bfloat16, sharding=sharding)
    arguments = ocp.args.PyTreeRestore(
        wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted)
    )
    restored = handler.restore(orbax_directory, arguments)
    assert restored[key].sharding == sharding
    for expert in range(8):
        name = f"model.layers.2.mlp.experts.{expert}.gate_proj.weight"
        np.testing.assert_array_equal(restored[key][expert], glm_tensors[name])
    np.testing.assert_array_equal(restored["lm_head.weight"], glm_tensors["lm_head.weight"])


def test_both_kinds_load_the_same_parameters(glm_directory, orbax_directory):
    jax.tree.map(
        np.testing.assert_array_equal, load_params(orbax_directory), load_params(glm_directory)
    )


def test_shards_keep_to_the_size_asked_for_and_the_index_finds_every_tensor(
    glm_directory, glm_tensors, tmp_path
):
    back = to(glm_directory, tmp_path / "hf", "hf", shard_size=4000)
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in glm_tensors.values())
    assert set(index["weight_map"]) == set(glm_tensors)
    for file in back.glob("*.safetensors"):
        held = load_file(file)
        assert sum(t.nbytes for t in held.values()) <= 4000
        assert all(index["weight_map"][name] == file.name for name in held)
    numbers = sorted(file.name[6:11] for file in back.glob("*.safetensors"))
    assert numbers[-1] == f"{len(numbers):05d}"


@pytest.mark.parametrize("chunk", [100, 1000])  # bytes: some leaves in ragged pieces
def test_leaves_in_chunks_come_back_whole(glm_directory, glm_tensors, tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(layouts, "CHUNK", chunk)
    monkeypatch.setattr(jobs, "PIECE", 37)  # pieces that end in the middle of numbers and chunks
    orbax = to(glm_directory, tmp_path / "orbax", "orbax")
    assert len(list((orbax / "lm_head.weight").iterdir())) > 2
    assert convert.verify(orbax) == sum(t.nbytes for t in glm_tensors.values())
    assert_same_bits(all_tensors(to(orbax, tmp_path / "hf", "hf")), glm_tensors)


def test_chunks_divide_their_leaf_where_a_divisor_is_near():
    def rows(*shape):
        return layouts.chunk_rows(shape, np.dtype(ml_dtypes.bfloat16))

    assert rows(128, 1408, 4096) == 4  # experts of GLM-4.5-Air: 46 MB, and 8 would be 92
    assert rows(151_552, 4096) == 4736  # its vocabulary: 32 chunks of 39 MB
    assert rows(151_549, 4096) == 8192  # a prime: the last chunk is padded
    assert rows(48) == 48


def test_one_way_or_the_other_the_router_keeps_its_dtype_unless_told(glm_directory, tmp_path):
    name = "model.layers.1.mlp.gate.weight"
    kept = all_tensors(to(glm_directory, tmp_path / "a", "hf"))[name]
    wide = all_tensors(to(glm_directory, tmp_path / "b", "hf", router_dtype="float32"))[name]
    assert (kept.dtype, wide.dtype) == (ml_dtypes.bfloat16, np.float32)
    np.testing.assert_array_equal(kept.astype(np.float32), wide)


def test_an_existing_target_is_refused(glm_directory, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="there exists"):
        convert.prepare(glm_directory, tmp_path / "there", Export(to="orbax"))


# -- interrupted


class Kill(BaseException):
    """As final as a signal, for one process."""


def killed_after(monkeypatch, writes, error):
    real, left = jobs.write_exactly, [writes]

    def write(descriptor, start, data):
        left[0] -= 1
        if left[0] < 0:
            real(descriptor, start, data[: len(data) // 2])
            raise error
        real(descriptor, start, data)

    monkeypatch.setattr(jobs, "write_exactly", write)


@pytest.mark.parametrize("kind", ["orbax", "hf", "sglang_fp8_channel"])
def test_a_killed_conversion_goes_on_without_redoing_what_is_finished(
    kind, glm_directory, tmp_path, monkeypatch
):
    whole = to(glm_directory, tmp_path / "whole", kind, shard_size=4000)
    with monkeypatch.context() as patch:
        killed_after(patch, 60, Kill())
        with pytest.raises(Kill):
            to(glm_directory, tmp_path / "again", kind, shard_size=4000)
    partial = tmp_path / "again.partial"
    assert not (tmp_path / "again").exists()
    with (partial / "convert.json").open("a") as journal:
        journal.write('{"file": "cut off by the ki')
    finished = [
        json.loads(x)["file"] for x in (partial / "convert.json").read_text().split("\n")[1:-1]
    ]
    assert finished
    before = {name: (partial / name).stat().st_mtime_ns for name in finished}
    to(glm_directory, tmp_path / "again", kind, shard_size=4000)
    again = tmp_path / "again"
    assert {name: (again / name).stat().st_mtime_ns for name in finished} == before
    for file in whole.rglob("*"):
        if file.is_file() and file.name not in ("_CHECKPOINT_METADATA", "manifest.json"):
            assert (again / file.relative_to(whole)).read_bytes() == file.read_bytes(), file
    assert convert.verify(again) == convert.verify(whole)
    assert not (again / "convert.json").exists() and not partial.exists()


def test_a_full_disk_names_file_and_tensor_and_leaves_no_target(
    glm_directory, tmp_path, monkeypatch
):
    killed_after(monkeypatch, 30, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(
        ValueError, match=r"disk is full: could not write model\..*safetensors.*room"
    ):
        to(glm_directory, tmp_path / "target", "hf", shard_size=4000)
    assert not (tmp_path / "target").exists()
    with pytest.raises(ValueError, match="did not finish"):
        load_params(tmp_path / "target.partial")


def test_a_disk_too_small_is_noticed_before_anything_is_written(
    glm_directory, tmp_path, monkeypatch
):
    usage = type("usage", (), {"free": 10})
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match="GB, but its disk has 0.0 GB free"):
        to(glm_directory, tmp_path / "target", "hf")


def test_another_conversion_into_the_same_target_is_refused(glm_directory, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        killed_after(patch, 30, Kill())
        with pytest.raises(Kill):
            to(glm_directory, tmp_path / "target", "hf", shard_size=4000)
    with pytest.raises(ValueError, match="begun by another conversion"):
        to(glm_directory, tmp_path / "target", "sglang_bf16", shard_size=4000)


# -- verification


@pytest.mark.parametrize("kind", ["orbax", "hf"])
def test_verification_finds_one_flipped_bit_and_names_the_tensor(kind, glm_directory, tmp_path):
    target = to(glm_directory, tmp_path / "target", kind)
    convert.verify(target)
    name = "model.layers.2.mlp.experts.5.down_proj.weight"
    extent = open_checkpoint(target).tensors[name].extents[0]
    with extent.path.open("r+b") as file:
        file.seek(extent.start + extent.nbytes - 1)
        last = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(ValueError, match=r"experts\.5\.down_proj\.weight is not what was written"):
        convert.verify(target)


def test_a_missing_or_short_chunk_is_named(glm_directory, tmp_path):
    target = to(glm_directory, tmp_path / "target", "orbax")
    chunk = target / "model.norm.weight" / "0"
    content = chunk.read_bytes()
    chunk.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"model\.norm\.weight.*has 31 bytes instead of 32"):
        open_checkpoint(target)
    chunk.unlink()
    with pytest.raises(ValueError, match=r"a part of model\.norm\.weight, is missing"):
        open_checkpoint(target)


# -- from a run


def test_a_stage_of_a_run_becomes_a_release(glm_directory, tmp_path):
    from axion_jax.checkpoint.training import TrainingCheckpoints

    params = load_params(glm_directory)
    params["moe"]["mlp"]["router"] += 1e-4  # what only float32 holds
    config = open_checkpoint(glm_directory).config
    run = tmp_path / "run"
    checkpoints = TrainingCheckpoints(run / "rlhf" / "checkpoints")
    checkpoints.save(7, {"params": params, "step": jnp.int32(7)}, {})
    checkpoints.close()
    (run / "config.json").write_text(json.dumps({"model": config.__dict__}))
    (run / "tokenizer").mkdir()
    (run / "tokenizer" / "tokenizer.json").write_text("{}")
    released = to(run / "rlhf", tmp_path / "hf", "hf")
    tensors = all_tensors(released)
    assert tensors["model.layers.1.mlp.gate.weight"].dtype == ml_dtypes.bfloat16
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == np.float32
    np.testing.assert_array_equal(
        tensors["model.layers.0.self_attn.q_proj.weight"],
        load_file(glm_directory / "model-00001-of-00003.safetensors")[
            "model.layers.0.self_attn.q_proj.weight"
        ],
    )
    wide = to(run / "rlhf", tmp_path / "wide", "hf", router_dtype="float32")
    router = all_tensors(wide)["model.layers.2.mlp.gate.weight"]
    np.testing.assert_array_equal(router, params["moe"]["mlp"]["router"][1].T)
    orbax = to(run / "rlhf", tmp_path / "orbax", "orbax")  # keeps what the trainer had, to the bit
    jax.tree.map(np.testing.assert_array_equal, load_params(orbax), params)
    assert_same_bits(all_tensors(to(orbax, tmp_path / "hf2", "hf")), tensors)
    assert (released / "tokenizer.json").exists()


# -- the command


def command(*arguments):
    return subprocess.run(
        [sys.executable, ROOT / "launch" / "convert.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "160"},
    )


@pytest.mark.slow
def test_the_command_converts_verifies_and_inspects(glm_directory, tmp_path):
    target = tmp_path / "orbax"
    done = command(f"--source={glm_directory}", f"--target={target}", "--to=orbax", "--verify")
    assert done.returncode == 0, done.stderr
    assert "read back" in done.stdout and "complete" in done.stdout
    again = command(f"--source={glm_directory}", f"--target={target}", "--to=orbax")
    assert again.returncode == 1 and again.stderr.startswith("Error: ")
    seen = command("--inspect", f"--source={target}")
    assert "Glm4MoeForCausalLM" in seen.stdout, seen.stderr


CONVERT_AND_SAY_PEAK = """
import pathlib, sys
from axion_jax.checkpoint import convert
from axion_jax.checkpoint.export import Export
source, target = map(pathlib.Path, sys.argv[1:])
convert.run(convert.prepare(source, target / "orbax", Export(to="orbax")), threads=4)
convert.run(convert.prepare(target / "orbax", target / "hf", Export(to="hf")), threads=4)
(line,) = [x for x in open("/proc/self/status") if x.startswith("VmHWM")]
print(int(line.split()[1]) * 1024)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path):
    peaks = []
    for layers in (1, 9):
        config = GLM | {"hidden_size": 512, "moe_intermediate_size": 512, "n_shared_experts": 2}
        config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 0}
        config |= {"first_k_dense_replace": 0}
        tensors = {
            name: np.zeros(shape, np.float32 if name.endswith("_bias") else ml_dtypes.bfloat16)
            for name, shape in glm_shapes(config).items()
        }
        source = write_hf(tmp_path / f"{layers}", config, tensors, shards=2)
        arguments = [sys.executable, "-c", CONVERT_AND_SAY_PEAK, source, tmp_path / f"out{layers}"]
        done = subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    # A layer has (8 + 2) * 3 * 512 * 512 bfloat16 numbers in experts alone: eight more are 126 MB.
    assert peaks[1] - peaks[0] < 25e6
