"""Scoring a file equals scoring each row alone, survives kills, and names the line that is wrong."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axion_jax.checkpoint.load import load_params
from axion_jax.data.tokenizer import build_tokenizer
from axion_jax.evaluation import score
from axion_jax.evaluation.score import ScoreConfig, score_file
from axion_jax.models.decoder import Decoder

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "families"
LENGTHS = (300, 1, 2, 17, 40, 9, 5)
"""More than one bucket; a row without predictions."""


def model(tmp_path, variant):
    folder = tmp_path / variant
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / variant / name, folder)
    return folder


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    return model(tmp_path_factory.mktemp("models"), "glm_all_moe")


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 40, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def config():
    # Eight devices, one row of 256 each: fewer than the rows need, so that a bucket has two batches.
    return ScoreConfig(entropy=True, routed_experts=True, tokens_per_batch=1)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def scored(glm, rows, config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scored")
    source = write(folder / "tokens.jsonl", [{"input_ids": ids} for ids in rows])
    assert score_file(glm, source, folder / "scores.jsonl", config) == len(rows)
    assert sorted(p.name for p in folder.iterdir()) == ["scores.jsonl", "tokens.jsonl"]
    return folder / "scores.jsonl"


def test_every_row_gets_what_it_gets_alone(glm, rows, scored):
    params = load_params(glm)
    decoder = Decoder(score.open_checkpoint(glm).config)

    @jax.jit
    def alone(ids):
        out = decoder(params, ids[None], jnp.arange(300)[None], jnp.ones((1, 300), jnp.int32))
        return jax.nn.log_softmax(decoder.logits(params, out.hidden)[0]), out.routing[0]

    for ids, found in zip(rows, read(scored), strict=True):
        n = len(ids) - 1
        assert set(found) == {"logprobs", "entropy", "routed_experts"}
        logprobs, routing = alone(jnp.asarray(np.resize(ids, 300)))
        expected = np.asarray(logprobs)[np.arange(n), ids[1:]]
        np.testing.assert_allclose(found["logprobs"], expected, atol=2e-5)
        entropy = -np.sum(np.exp(logprobs) * logprobs, axis=-1)[:n]
        np.testing.assert_allclose(found["entropy"], entropy, atol=2e-5)
        assert len(found["routed_experts"]) == n
        if n:
            ours = np.sort(np.array(found["routed_experts"]))
            np.testing.assert_array_equal(ours, np.sort(routing[:n]))


def test_logprobs_are_written_with_the_digits_of_float32(scored):
    assert all(
        np.float32(x) == x or str(np.float32(x)) == str(x) for x in read(scored)[0]["logprobs"]
    )
    assert len(scored.read_text().split(",")[1]) < 15


def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(glm, rows, config, scored, tmp_path):
    source = write(tmp_path / "tokens.jsonl", [{"input_ids": ids} for ids in rows])
    target = tmp_path / "scores.jsonl"
    seen = []

    def die(count, tokens, nbytes):
        seen.append(count)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        # Eight tokens a window: the first holds the first row alone.
        score_file(glm, source, target, config, progress=die)
    assert seen == [1] and not target.exists()
    partial = tmp_path / "scores.jsonl.partial"
    with partial.open("a") as file:
        file.write('{"logprobs": [0.')  # the line it died in
    assert score_file(glm, source, target, config) == len(rows)
    assert target.read_bytes() == scored.read_bytes()
    assert not partial.exists()


def test_a_run_begun_with_other_settings_is_not_gone_on_with(glm, rows, config, tmp_path):
    source = write(tmp_path / "tokens.jsonl", [{"input_ids": rows[3]}, {"input_ids": [1, 99]}])
    target = tmp_path / "scores.jsonl"
    with pytest.raises(ValueError, match="tokens.jsonl:2: token id 99 .* vocabulary of 40"):
        score_file(glm, source, target, config)
    assert len((tmp_path / "scores.jsonl.partial").read_text().splitlines()) == 1
    with pytest.raises(ValueError, match="was begun with entropy=True, not False"):
        score_file(glm, source, target, ScoreConfig(tokens_per_batch=1))


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "not JSON"),
        ("[1, 2]", r'expected \{"input_ids": \[...\]\} or'),
        ('{"input_ids": [1], "messages": []}', r'expected \{"input_ids"'),
        ('{"input_ids": []}', "list of one or more whole numbers"),
        ('{"input_ids": [1, 2.5]}', "list of one or more whole numbers"),
        ('{"input_ids": [1, true]}', "list of one or more whole numbers"),
        ('{"input_ids": [3, -1]}', "token id -1 is not in"),
        ('{"input_ids": [3, 99999999999]}', "token id 99999999999 is not in"),
        ('{"messages": [{"role": "user", "content": "hi"}]}', "has no tokenizer.json"),
    ],
)
def test_a_bad_row_is_named_with_file_and_line(glm, tmp_path, line, message):
    source = tmp_path / "tokens.jsonl"
    source.write_text(f'{{"input_ids": [1]}}\n\n{line}\n')
    with pytest.raises(ValueError, match=rf"tokens\.jsonl:3: .*{message}"):
        list(score._windows(source, score.open_checkpoint(glm), score.Done(), 100))


def test_what_cannot_be_had_is_refused_before_anything_runs(glm, tmp_path):
    source = write(tmp_path / "tokens.jsonl", [{"input_ids": [1, 2]}])
    target = tmp_path / "scores.jsonl"
    dense = model(tmp_path, "llama")
    with pytest.raises(ValueError, match="dense model: it has no routed experts"):
        score_file(dense, source, target, ScoreConfig(routed_experts=True))
    classifier = model(tmp_path, "qwen3_classifier")
    with pytest.raises(ValueError, match="classifier: its tokens have no entropy"):
        score_file(classifier, source, target, ScoreConfig(entropy=True))
    with pytest.raises(ValueError, match="no such file"):
        score_file(dense, tmp_path / "none.jsonl", target, ScoreConfig())
    target.write_text("")
    with pytest.raises(ValueError, match="exists. Remove it"):
        score_file(dense, source, target, ScoreConfig())
    with pytest.raises(ValueError, match="dtype='float8' must be"):
        ScoreConfig(dtype="float8")


def test_a_classifier_is_read_at_the_last_token_that_is_not_padding(tmp_path):
    folder = model(tmp_path, "qwen3_classifier")
    with np.load(GOLDEN / "qwen3_classifier" / "expected.npz") as file:
        tokens, num_tokens, scores = (file[k] for k in ("tokens", "num_tokens", "scores"))
    # The golden's rows are padded with 0, the config's pad token; as they are, and cut to size.
    rows = [{"input_ids": row.tolist()} for row in tokens]
    rows += [{"input_ids": row[:n].tolist()} for row, n in zip(tokens, num_tokens, strict=True)]
    source = write(tmp_path / "tokens.jsonl", rows)
    score_file(folder, source, tmp_path / "scores.jsonl", ScoreConfig(tokens_per_batch=256))
    found = [row["score"] for row in read(tmp_path / "scores.jsonl")]
    np.testing.assert_allclose(found, np.tile(scores, 2), atol=5e-5)


def test_messages_are_rendered_by_the_models_own_template(tmp_path):
    folder = model(tmp_path, "llama")
    # 292 ids: more than the model's 40, so only ids are looked at, not scores.
    build_tokenizer().save_pretrained(str(folder))
    checkpoint = score.open_checkpoint(folder)
    tokenizer = score.tokenizer_of(checkpoint)
    ids = score._render(tokenizer, [{"role": "user", "content": "hi"}], None)
    assert tokenizer.decode(ids) == "[gMASK]<sop><|user|>\nhi"
    with pytest.raises(ValueError, match="messages must be a list"):
        score._render(tokenizer, [{"content": "hi"}], None)
    call = {"function": {"name": "add", "arguments": "{}"}}  # a string: the template wants a dict
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(ValueError, match="chat template refuses"):
        score._render(tokenizer, messages, None)
