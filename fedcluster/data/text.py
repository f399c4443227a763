"""Text as tokens: characters, bytes, or a Hugging Face tokenizer from disk; windows of it to predict the next token in.

Token 0 is padding; of characters it also stands for those that the training part does not have. A text that is
classified gets the special tokens and the padding of its Hugging Face tokenizer, as in `tokenizer(text,
padding="max_length", truncation=True)` of transformers.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcluster.data.targets import IGNORED
from fedcluster.errors import BadData, BadExperiment
from fedcluster.inputs import MOST_TEXT, check_size, located, read_bytes

LENGTH = 80  # tokens in a window, as in LEAF's Shakespeare
MOST_TOKENIZER = 256 * 2**20  # bytes of its file
CONFIG = "tokenizer_config.json"
Tokens = NDArray[np.int64]


class Tokenizer(Protocol):
    """A text's tokens, from 0 to `size` - 1. `padding` fills what is too short."""

    size: int
    padding: int

    def encode(self, text: str) -> Tokens: ...

    def encode_whole(self, text: str, length: int) -> Tokens:
        """A text of its own, at most `length` tokens."""
        ...


class Characters:
    """Every character is a token, numbered from 1 in the order of Unicode."""

    padding = 0

    def __init__(self, texts: Iterable[str]) -> None:
        self.alphabet = sorted(set().union(*texts))
        self.codes = np.array([ord(character) for character in self.alphabet], np.uint32)
        self.size = 1 + len(self.alphabet)

    def __str__(self) -> str:
        return f"{len(self.alphabet):,} characters"

    def encode(self, text: str) -> Tokens:
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        if not len(self.codes):
            return np.zeros(len(codes), np.int64)
        place = np.minimum(np.searchsorted(self.codes, codes), len(self.codes) - 1)
        return np.where(self.codes[place] == codes, place + 1, 0)

    def encode_whole(self, text: str, length: int) -> Tokens:
        return self.encode(text[:length])


class Bytes:
    """Every byte of the UTF-8 text is a token."""

    size, padding = 256, 0

    def __str__(self) -> str:
        return "bytes"

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def encode_whole(self, text: str, length: int) -> Tokens:
        return self.encode(text)[:length]


class FromDisk:
    """A Hugging Face tokenizer: its tokenizer.json, or the folder that it is in. Its padding is the token that
    tokenizer_config.json beside it names as `pad_token`, else as `eos_token`, else token 0."""

    def __init__(self, path: Path) -> None:
        self.path = path
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.exists():
            raise BadData(f'data.tokenizer: there is no file {file}; use "characters", "bytes" or a tokenizer.json')
        try:
            from tokenizers import Tokenizer as HuggingFace
        except ImportError:
            raise BadExperiment(
                f'data.tokenizer = {str(path)!r} needs the library tokenizers: pip install "fedcluster[text]"'
            ) from None
        content = read_bytes(file, "data.tokenizer", MOST_TOKENIZER)
        try:
            json.loads(content)
            self.tokenizer = HuggingFace.from_str(content.decode())
            self.tokenizer.no_padding()
            self.tokenizer.no_truncation()
        except Exception as error:  # whatever the file holds
            raise BadData(f"data.tokenizer: {file} is not a tokenizer ({str(error)[:120]})") from None
        self.size = int(self.tokenizer.get_vocab_size())
        known = map(self.tokenizer.token_to_id, padding_tokens(file))
        self.padding = next((token for token in known if token is not None), 0)

    def __str__(self) -> str:
        return f"{self.size:,} tokens of {self.path}"

    def encode(self, text: str) -> Tokens:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int64)

    def encode_whole(self, text: str, length: int) -> Tokens:
        self.tokenizer.enable_truncation(length)  # which leaves room for the special tokens
        ids = self.tokenizer.encode(text).ids
        self.tokenizer.no_truncation()
        return np.array(ids[:length], np.int64)


def padding_tokens(file: Path) -> list[str]:
    """The tokens that can stand for padding, by the tokenizer_config.json beside the tokenizer's file."""
    config = file.with_name(CONFIG)
    try:
        about = json.loads(read_bytes(config, "data.tokenizer", MOST_TEXT)) if config.exists() else {}
        named = [about.get(key) for key in ("pad_token", "eos_token")]
    except (ValueError, AttributeError, RecursionError):
        raise BadData(f"data.tokenizer: {config} is not a tokenizer's configuration") from None
    texts = [token.get("content") if isinstance(token, dict) else token for token in named]
    return [text for text in texts if isinstance(text, str)]


def tokenizer(name: str, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names; characters are those of the training texts."""
    if name == "characters":
        return Characters(texts)
    return Bytes() if name == "bytes" else FromDisk(located(name, "data.tokenizer"))


def padded(texts: Sequence[str], tokenize: Tokenizer, length: int, source: Any) -> NDArray[np.int64]:
    """A row of `length` tokens for every text, cut or padded at its end."""
    check_size(source, 8 * length * len(texts))
    rows = np.full((len(texts), length), tokenize.padding, np.int64)
    for row, text in zip(rows, texts, strict=True):
        tokens = tokenize.encode_whole(text, length)
        row[: len(tokens)] = tokens
    return rows


def windows(
    streams: Sequence[str], tokenize: Tokenizer, length: int, source: Any
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Inputs and next tokens [windows, length], and the stream that each window is of.

    A stream of tokens t_0 ... t_L is cut into windows that do not overlap, so that every token but the first is
    predicted once. The last window of a stream is padded; padding is not predicted.
    """
    tokens = [tokenize.encode(text) for text in streams]
    counts = np.array([-(-max(len(stream) - 1, 0) // length) for stream in tokens], np.int64)
    check_size(source, 16 * length * int(counts.sum()))
    inputs = np.zeros((int(counts.sum()), length), np.int64)
    targets = np.full_like(inputs, IGNORED)
    start = 0
    for stream, count in zip(tokens, counts.tolist(), strict=True):
        predicted = len(stream) - 1
        inputs[start : start + count].reshape(-1)[: max(predicted, 0)] = stream[:-1]
        targets[start : start + count].reshape(-1)[: max(predicted, 0)] = stream[1:]
        start += count
    return inputs, targets, np.repeat(np.arange(len(streams)), counts)
