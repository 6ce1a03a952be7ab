"""Exact round trips, GLM-4.5's special tokens, and shortcuts that match what they should."""

import random
import subprocess
import sys

import numpy as np
import pytest

from axion_jax.data import tokenizer as tk

PHRASES = ["State the answer: ", " words.", "Write exactly", "x <"]
WORDS = ["apple", " pear", "APPLE", "42"]


@pytest.fixture(scope="module")
def tokenizer():
    return tk.build_tokenizer(PHRASES, WORDS)


def tokens(tokenizer, text):
    return [tokenizer.decode([i]) for i in tk.encode(tokenizer, text)]


def random_text(rng):
    pieces = [
        lambda: chr(rng.choice([rng.randrange(1, 128), rng.randrange(128, 0xD800), 0x1F600])),
        lambda: chr(rng.randrange(0xE000, 0x110000)),
        lambda: rng.choice([*PHRASES, *WORDS, *tk.SPECIAL_TOKENS, " ", "\n", "  ", "Ġ"]),
    ]
    return "".join(rng.choice(pieces)() for _ in range(rng.randrange(40)))


def test_any_text_decodes_to_itself_and_batches_change_nothing(tokenizer):
    rng = random.Random(0)
    texts = [random_text(rng) for _ in range(2000)]
    for text, ids in zip(texts, tk.encode_batch(tokenizer, texts), strict=True):
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert ids.dtype == np.int32 and ids.tolist() == tk.encode(tokenizer, text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids.tolist()


def test_special_tokens_come_in_glms_order_after_the_base_vocabulary(tokenizer):
    ids = tokenizer.convert_tokens_to_ids(list(tk.SPECIAL_TOKENS))
    assert len(ids) == 36
    # 256 bytes, then 7 words: "apple", "APPLE" and "42" in two forms, " pear" in one.
    assert ids == list(range(263, 263 + 36))
    assert len(tokenizer) == 263 + 36 + len(PHRASES)
    # Distances in GLM-4.5's own table: <|user|> 151336, <think> 151350, <|video|> 151364.
    place = dict(zip(tk.SPECIAL_TOKENS, ids, strict=True))
    assert place["<think>"] - place["<|user|>"] == 14
    assert place["<|video|>"] - place["<|endoftext|>"] == 35
    assert tk.encode(tokenizer, "A") == [65]


def test_thinking_and_tool_tokens_survive_skip_special_tokens(tokenizer):
    text = (
        "[gMASK]<sop><|user|>\nHi/nothink<|assistant|>\n<think></think>\n<tool_call>f\n</tool_call>"
    )
    kept = tokenizer.decode(tk.encode(tokenizer, text), skip_special_tokens=True)
    assert kept == "\nHi\n<think></think>\n<tool_call>f\n</tool_call>"


def test_stop_and_pad_ids_are_glms(tokenizer):
    assert tokenizer.convert_ids_to_tokens(tk.stop_ids(tokenizer)) == list(tk.STOP_TOKENS)
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == tk.stop_ids(tokenizer)[0]
    assert tokenizer.bos_token is None


def test_a_word_costs_one_token_with_or_without_its_space_and_only_as_a_whole(tokenizer):
    assert tokens(tokenizer, "apple apple,\nAPPLE pear 42") == [
        *("apple", " apple", ",", "\n", "APPLE", " pear", " 42"),
    ]
    assert tokens(tokenizer, "apples")[0] == "a"
    assert tokens(tokenizer, "pineapple")[-1] == "e"
    assert tokens(tokenizer, "421")[0] == "4"
    assert tokens(tokenizer, "pear")[0] == "p"  # Only the form with a space was asked for.


def test_a_phrase_costs_one_token_and_leaves_special_tokens_whole(tokenizer):
    assert tokens(tokenizer, "State the answer: 7") == ["State the answer: ", "7"]
    assert tokens(tokenizer, "Write exactly 7 words.") == ["Write exactly", " ", "7", " words."]
    assert tokens(tokenizer, "x <think>x <") == ["x", " ", "<think>", "x <"]


@pytest.mark.parametrize(
    ("phrases", "words", "said"),
    [
        (["a b", "a b"], [], "already"),
        (["apple"], ["apple"], "already"),
        (["<think>"], [], "already"),
        ([""], [], "empty"),
        (["né"], [], "decode"),
        ([], ["don't"], "phrases"),
        ([], ["two words"], "phrases"),
        ([], ["apple", "apple"], "already"),
        ([], ["a"], "already"),
    ],
)
def test_shortcuts_that_could_not_work_are_refused(phrases, words, said):
    with pytest.raises(ValueError, match=said):
        tk.build_tokenizer(phrases, words)


def test_saved_and_loaded_it_is_the_same(tokenizer, tmp_path):
    tk.save(tokenizer, tmp_path)
    loaded = tk.load(tmp_path)
    rng = random.Random(1)
    for _ in range(200):
        text = random_text(rng)
        assert tk.encode(loaded, text) == tk.encode(tokenizer, text)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.chat_template == tk.CHAT_TEMPLATE
    assert tk.stop_ids(loaded) == tk.stop_ids(tokenizer)
    tk.save(loaded, tmp_path / "again")
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_hugging_face_loads_it_without_us(tokenizer, tmp_path):
    tk.save(tokenizer, tmp_path)
    script = (
        "import sys; from transformers import AutoTokenizer\n"
        "t = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "ids = t.encode('apple <think>', add_special_tokens=False)\n"
        "print(ids, t.pad_token, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    ids = tk.encode(tokenizer, "apple <think>")
    assert done.stdout.strip() == f"{ids} <|endoftext|> False"


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match="No tokenizer.json"):
        tk.load(tmp_path)
