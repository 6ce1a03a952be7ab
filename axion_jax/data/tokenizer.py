"""Small byte-level tokenizers with GLM-4.5's special tokens, and what any GLM tokenizer is asked.

The ids are laid out as GLM-4.5 lays them out: base vocabulary first, then its 36 added tokens in
its order. The base vocabulary is the 256 bytes (the id of a byte is its value), so any text
survives a round trip, and a list of words.

Surprising at first: a word is not an added token but an entry of a BPE model without merges. The
text is first split into words, each with the space before it; a piece found whole in the vocabulary
is one token, any other piece is its bytes. So "apple" and " apple" cost one token each and never
match inside "pineapples".
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

CHAT_TEMPLATE = pathlib.Path(__file__).with_name("glm45.jinja").read_text(encoding="utf-8")

SPECIAL_TOKENS = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
    *("<|begin_of_audio|>", "<|end_of_audio|>"),
    *("<|begin_of_transcription|>", "<|end_of_transcription|>"),
    *("<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
    *("<|begin_of_box|>", "<|end_of_box|>", "<|image|>", "<|video|>"),
)
"""GLM-4.5's added tokens in the order of their ids (151329 to 151364 in its own tokenizer)."""

KEPT_TOKENS = frozenset(
    SPECIAL_TOKENS[SPECIAL_TOKENS.index("<think>") : SPECIAL_TOKENS.index("/nothink")]
)
"""Those that `skip_special_tokens` keeps, as in GLM-4.5: thinking, tools and arguments."""

STOP_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")
"""GLM-4.5's eos list: a turn ends where the next role's marker would begin."""


def build_tokenizer(
    phrases: Sequence[str] = (), words: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with GLM-4.5's special tokens, chat template, and the given shortcuts.

    Args:
      phrases: fixed wordings that become one token each wherever they occur, the leftmost and
        longest first, inside words too. They never swallow a part of a special token.
      words: runs of letters, of digits or of punctuation. Each gets two tokens, alone and with one
        space before it, and matches whole words only. Written with its leading space, a word gets
        that one form only.

    Raises:
      ValueError: an entry is there twice, could not be decoded again, or is no single word.
    """
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    vocab = {char: byte for byte, char in enumerate(_byte_chars())}
    for word in words:
        for form in [word] if word.startswith(" ") else [word, " " + word]:
            pieces = [piece for piece, _ in split.pre_tokenize_str(form)]
            if len(pieces) != 1:
                raise ValueError(
                    f"words: {form!r} splits into {len(pieces)} pieces, so it would never match "
                    "as a whole. List it under phrases."
                )
            if pieces[0] in vocab:
                raise ValueError(f"words: {form!r} is in the vocabulary already.")
            vocab[pieces[0]] = len(vocab)

    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [AddedToken(t, special=t not in KEPT_TOKENS, normalized=False) for t in SPECIAL_TOKENS]
    )
    for phrase in phrases:
        # "normalized" puts phrases into a second pass, over the text between special tokens.
        if backend.token_to_id(phrase) is not None or not backend.add_tokens(
            [AddedToken(phrase, special=False, normalized=True)]
        ):
            raise ValueError(f"phrases: {phrase!r} is empty or in the vocabulary already.")
        if backend.decode(backend.encode(phrase).ids, skip_special_tokens=False) != phrase:
            raise ValueError(
                f"phrases: {phrase!r} would not decode to itself: without a blank, letters such as "
                "'é' are taken for the names of bytes. Add a blank or leave it to bytes."
            )

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _byte_chars() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The ids of `text`, special tokens recognised and none added."""
    return _backend(tokenizer).encode(text, add_special_tokens=False).ids


def encode_batch(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[np.ndarray]:
    """`encode` of many texts on all cores, each an [N] int32 array."""
    encodings = _backend(tokenizer).encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(encoding.ids, np.int32) for encoding in encodings]


def _backend(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """The inner tokenizer, without padding or truncation that an earlier call may have left set."""
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    return backend


def stop_ids(tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """The ids at which sampling a turn stops: `<|endoftext|>`, `<|user|>`, `<|observation|>`."""
    vocab = tokenizer.get_vocab()
    missing = [token for token in STOP_TOKENS if token not in vocab]
    if missing:
        raise ValueError(
            f"The tokenizer lacks GLM-4.5's stop tokens {missing}. Is it a GLM tokenizer?"
        )
    return tuple(vocab[token] for token in STOP_TOKENS)


def save(tokenizer: PreTrainedTokenizerFast, directory: str | pathlib.Path) -> None:
    """Writes the Hugging Face files, chat template included, into `directory`."""
    tokenizer.save_pretrained(str(directory))


def load(directory: str | pathlib.Path) -> PreTrainedTokenizerFast:
    """Reads a tokenizer back from its Hugging Face files; never asks the network.

    A base model's tokenizer comes without a chat template; it gets GLM-4.5's.
    """
    if not (pathlib.Path(directory) / "tokenizer.json").is_file():
        raise ValueError(f"No tokenizer.json in {directory}.")
    tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
