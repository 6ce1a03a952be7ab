"""Training checkpoints: what was saved comes back bit for bit, and from a damaged one the last whole one."""

import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from axion_jax.checkpoint.training import (
    TrainingCheckpoints,
    abstract_like,
    read_json,
    write_json,
)
from axion_jax.types import TrainState

# Reads that Orbax gave up on complain when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

HOST = {"seconds": 1.5, "guard": {"losses": [0.1, float("inf")]}, "data": {"next": 3}}


def state_of(step, sharding=None):
    rng = np.random.default_rng(step)
    state = TrainState(
        step=jnp.int32(step),
        params={
            "embed": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32),
            "moe": {"q": jnp.asarray(rng.normal(size=(2, 8, 4)), jnp.bfloat16)},
        },
        opt_state=({"mu": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)},),
        skipped=jnp.int32(0),
    )
    return jax.device_put(state, sharding) if sharding else state


ABSTRACT = abstract_like(state_of(0))


def assert_same(state, step):
    for ours, saved in zip(jax.tree.leaves(state), jax.tree.leaves(state_of(step)), strict=True):
        assert ours.dtype == saved.dtype
        np.testing.assert_array_equal(ours, saved)


@pytest.fixture
def opened(tmp_path):
    """`opened()`: the checkpoints of a directory, opened once more; all are closed in the end."""
    every = []

    def open_again(**options):
        every.append(TrainingCheckpoints(tmp_path / "checkpoints", **options))
        return every[-1]

    yield open_again
    for checkpoints in every:
        checkpoints.close()


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A directory with the checkpoints of steps 1 and 2, to be copied."""
    directory = tmp_path_factory.mktemp("two") / "checkpoints"
    checkpoints = TrainingCheckpoints(directory)
    for step in (1, 2):
        checkpoints.save(step, state_of(step), HOST | {"step": step})
    checkpoints.close()
    return directory


@pytest.fixture
def damaged(two_steps, tmp_path, opened):
    """`damaged(how, steps)`: copies of the two checkpoints with those steps damaged, opened."""

    def damage(how, steps=(2,)):
        shutil.copytree(two_steps, tmp_path / "checkpoints")
        for step in steps:
            how(tmp_path / "checkpoints" / str(step))
        return opened()

    return damage


def test_a_directory_without_checkpoints_has_nothing_to_restore(opened):
    assert opened().restore_latest(ABSTRACT) is None


def test_the_newest_checkpoint_comes_back_bit_for_bit_to_whoever_opens_the_directory(opened):
    first = opened()
    for step in (3, 4):
        first.save(step, state_of(step), HOST | {"step": step})
    first.wait()
    step, state, host = opened().restore_latest(ABSTRACT)
    assert step == 4 and host == HOST | {"step": 4}
    assert_same(state, 4)
    assert isinstance(state, TrainState)


def test_old_checkpoints_go_as_new_ones_come(opened):
    checkpoints = opened(keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, state_of(step), HOST)
    checkpoints.wait()
    assert opened().steps() == [2, 3]


def test_what_happens_to_the_host_state_after_a_save_is_not_saved(opened):
    checkpoints = opened()
    host = {"guard": {"losses": [1.0]}}
    checkpoints.save(1, state_of(1), host)
    host["guard"]["losses"].append(2.0)
    host["guard"] = None
    checkpoints.wait()
    _, _, restored = checkpoints.restore_latest(ABSTRACT)
    assert restored == {"guard": {"losses": [1.0]}}


def test_a_step_that_is_there_is_not_written_again(opened):
    checkpoints = opened()
    checkpoints.save(1, state_of(1), HOST)
    checkpoints.wait()
    checkpoints.save(1, state_of(2), {})
    checkpoints.wait()
    _, state, host = checkpoints.restore_latest(ABSTRACT)
    assert_same(state, 1)
    assert host == HOST


def test_a_checkpoint_of_one_mesh_is_restored_onto_another(opened):
    devices = np.array(jax.devices())
    assert len(devices) == 8

    def layout(*shape):
        mesh = jax.sharding.Mesh(
            devices[: np.prod(shape)].reshape(shape), ("data", "fsdp"), (AxisType.Auto,) * 2
        )

        def of(leaf):
            # The second last dimension, of 8 or more, is split.
            split = (None,) * (leaf.ndim - 2) + ("fsdp",) if leaf.ndim >= 2 else ()
            return jax.NamedSharding(mesh, jax.P(*split))

        return jax.tree.map(of, ABSTRACT)

    checkpoints = opened()
    checkpoints.save(5, state_of(5, layout(2, 4)), HOST)
    checkpoints.wait()
    for shape in ((1, 8), (2, 2), (1, 1)):
        wanted = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
            ABSTRACT,
            layout(*shape),
        )
        _, state, _ = opened().restore_latest(wanted)
        assert_same(state, 5)
        for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
            assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)


def cut_the_data(step):
    for file in (step / "state" / "d").iterdir():
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def change_a_byte_of_the_host_state(step):
    file = step / "host" / "metadata"
    text = file.read_text()
    assert "1.5" in text
    file.write_text(text.replace("1.5", "1.7"))


DAMAGE = {
    "a data file is cut in half": cut_the_data,
    "the data is gone": lambda step: shutil.rmtree(step / "state" / "d"),
    "the list of arrays is empty": lambda step: (step / "state" / "_METADATA").write_text(""),
    "the manifest is gone": lambda step: (step / "state" / "manifest.ocdbt").unlink(),
    "the state is gone": lambda step: shutil.rmtree(step / "state"),
    "the host state is gone": lambda step: shutil.rmtree(step / "host"),
    "the host state is half written": lambda step: (step / "host" / "metadata").write_text('{"js'),
    "a byte of the host state is another": change_a_byte_of_the_host_state,
    "nothing is left but the directory": lambda step: [shutil.rmtree(d) for d in step.glob("*/")],
}


@pytest.mark.parametrize("how", DAMAGE)
def test_from_a_damaged_checkpoint_it_goes_back_to_the_last_whole_one_and_says_so(
    damaged, how, caplog
):
    checkpoints = damaged(DAMAGE[how])
    step, state, host = checkpoints.restore_latest(ABSTRACT)
    assert step == 1 and host == HOST | {"step": 1}
    assert_same(state, 1)
    assert f"{checkpoints.directory}/2 cannot be read" in caplog.text
    assert "falling back to an older one" in caplog.text


def test_arrays_that_read_well_but_hold_other_numbers_are_noticed_by_their_checksum(
    damaged, caplog
):
    def other_numbers(step_directory):
        shutil.rmtree(step_directory / "state")
        shutil.copytree(step_directory.parent / "1" / "state", step_directory / "state")

    step, state, _ = damaged(other_numbers).restore_latest(ABSTRACT)
    assert step == 1
    assert_same(state, 1)
    assert "the arrays are damaged: their checksum differs" in caplog.text


def test_a_damaged_json_file_is_named(tmp_path):
    (tmp_path / "done.json").write_text('{"stage": ')
    with pytest.raises(ValueError, match="done.json is damaged .* Delete it"):
        read_json(tmp_path / "done.json")


def test_the_damaged_checkpoint_is_set_aside_and_its_step_can_be_written_again(damaged, opened):
    for attempt in range(2):
        checkpoints = damaged(cut_the_data) if not attempt else opened()
        if attempt:  # a disk that lies twice
            cut_the_data(checkpoints.directory / "2")
        assert checkpoints.restore_latest(ABSTRACT)[0] == 1
        aside = sorted(p.name for p in checkpoints.directory.parent.iterdir())[1:]
        assert aside == ["checkpoints-unreadable-2", "checkpoints-unreadable-2-1"][: attempt + 1]
        checkpoints.save(2, state_of(2), HOST)
        checkpoints.close()
    step, state, _ = opened().restore_latest(ABSTRACT)
    assert step == 2
    assert_same(state, 2)


def test_checkpoints_that_are_all_damaged_are_an_error_that_names_them_and_deletes_nothing(damaged):
    checkpoints = damaged(cut_the_data, steps=(1, 2))
    with pytest.raises(ValueError) as caught:
        checkpoints.restore_latest(ABSTRACT)
    message = str(caught.value)
    assert message.startswith(f"None of the checkpoints in {checkpoints.directory} can be read")
    assert "step 1: " in message and "step 2: " in message
    assert "Remove the directory to train this stage again." in message
    assert checkpoints.steps() == [1, 2]


def test_what_a_kill_leaves_of_an_unfinished_save_is_no_checkpoint(two_steps, tmp_path, opened):
    shutil.copytree(two_steps, tmp_path / "checkpoints")
    half = next((tmp_path / "checkpoints").glob("2"))
    half.rename(half.with_name("2.orbax-checkpoint-tmp"))
    checkpoints = opened()
    assert checkpoints.steps() == [1]
    assert checkpoints.restore_latest(ABSTRACT)[0] == 1
    checkpoints.save(2, state_of(2), HOST)
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2]


def test_json_is_replaced_as_a_whole(tmp_path, monkeypatch):
    file = tmp_path / "done.json"
    write_json(file, {"a": 1})

    def killed(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(pathlib.Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_json(file, {"a": 2})
    assert file.read_text() == '{\n "a": 1\n}\n'
