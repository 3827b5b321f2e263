"""Sequences of tokens: a text file, or the help texts that come with Python."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from leakbound._util import files
from leakbound.data.raw import MAX_BYTES, Options, Raw
from leakbound.losses import next_labels

PLACES = 16
MOST_WORDS = 4096
"""Tokens of a sequence, and of the vocabulary, unless other numbers are given."""
PADDING = "<pad>"
UNKNOWN = "<unknown>"
_BOUNDARY = r"(?V1w)\b"
"""Between two words by the default rules of Unicode (UAX 29)."""
_SHOWN = r"[\p{L}\p{M}\p{N}\p{P}\p{S}]"
"""What a word holds: all but spaces and letters that nobody sees, such as a byte order mark."""
_LINE = re.compile(r"\r\n|\n|\r")
_SENTENCE = re.compile(r"(?<=[.!?:])\s+")


def topics(options: Options) -> Raw:
    """The sentences of Python's help texts (`pydoc_data.topics`), about 2,700 of 16 words."""
    from pydoc_data.topics import topics as texts

    text = "\n\n".join(texts[name] for name in sorted(texts))
    return sequences(_sentences(text), options, full=True)


def read_text(path: Path, options: Options) -> Raw:
    """A UTF-8 text: every line is one record, such as a note or a message.

    A line ends with a line feed, a carriage return or both; other signs that separate lines, such
    as a form feed, are spaces.
    """
    files.check_regular(path)
    size = path.stat().st_size
    if size > MAX_BYTES // 16:
        raise ValueError(f"it has {size / 2**30:.1f} GiB; the limit is {MAX_BYTES / 2**34:.2f} GiB")
    try:
        text = files.read(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8 text; save the file as UTF-8") from None
    return sequences([line for line in _LINE.split(text) if line.strip()], options)


def words(text: str) -> list[str]:
    """The words, numbers and signs of a text, in lower case.

    Boundaries are those of Unicode's default rules (UAX 29) after normalization (NFC): marks stay
    with their letter, "can't" and "3.14" are one word. In scripts without spaces, such as Chinese
    or Thai, a word is a letter with its marks; runs of katakana stay together.

    Example:
        >>> words("It can't be 3.14!"), words("नमस्ते दुनिया"), words("我们。")
        (['it', "can't", 'be', '3.14', '!'], ['नमस्ते', 'दुनिया'], ['我', '们', '。'])
    """
    boundary, shown = _patterns()
    parts = boundary.split(unicodedata.normalize("NFC", text.lower()))
    return [part for part in parts if shown.search(part)]


@cache
def _patterns() -> tuple[Any, Any]:
    """What lies between two words, and what a word holds."""
    import regex  # it takes a tenth of a second, and only text needs it

    return regex.compile(_BOUNDARY), regex.compile(_SHOWN)


def sequences(
    records: Sequence[str],
    options: Options,
    *,
    full: bool = False,
) -> Raw:
    """Records as sequences of `size` words, lower case, padded or cut; one for each record.

    `full` leaves out records that would be padded.

    The vocabulary holds the most frequent words; others are UNKNOWN. Labels are the tokens
    themselves, UNSCORED in padding: clients train on the next token.
    """
    if options.channels is not None:
        raise ValueError("text has no channels; leave them out")
    places = options.size or PLACES
    texts = [words(record)[:places] for record in records]
    texts = [text for text in texts if len(text) >= (places if full else 2)]
    if not texts:
        raise ValueError("it holds no line with two words or more; give a text, one record a line")
    counts = Counter(word for text in texts for word in text)
    # Ties go by the word: the order of the lines then does not matter. Two places are taken.
    kept = sorted(counts, key=lambda word: (-counts[word], word))[: MOST_WORDS - 2]
    names = (PADDING, UNKNOWN, *kept)
    number = {word: k for k, word in enumerate(names)}
    tokens = torch.zeros(len(texts), places, dtype=torch.int64)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = torch.tensor([number.get(word, 1) for word in text])
    return Raw(tokens, next_labels(tokens, 0), names, words=names)


def _sentences(text: str) -> list[str]:
    parts = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return [sentence for part in parts for sentence in _SENTENCE.split(part)]
