"""Sequences of tokens: a text file, or the help texts that come with Python."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from leakbound._util import files
from leakbound.data.raw import MAX_BYTES, Options, Raw
from leakbound.losses import next_labels

PLACES, MOST_WORDS = 16, 4096
"""Tokens of a sequence, and of the vocabulary, unless other numbers are given."""
PADDING, UNKNOWN = "<pad>", "<unknown>"
_WORD = re.compile(r"\w+|[^\w\s]")
_SENTENCE = re.compile(r"(?<=[.!?:])\s+")


def topics(options: Options) -> Raw:
    """The 2,500 sentences of Python's help texts (`pydoc_data.topics`)."""
    from pydoc_data.topics import topics as found

    text = "\n\n".join(found[name] for name in sorted(found))
    return sequences(_sentences(text), options, full=True)


def read_text(path: Path, options: Options) -> Raw:
    """A UTF-8 text: every line is one record, such as a note or a message."""
    files.check_regular(path)
    size = path.stat().st_size
    if size > MAX_BYTES // 16:
        raise ValueError(f"it has {size / 2**30:.1f} GiB; the limit is {MAX_BYTES / 2**34:.2f} GiB")
    try:
        text = files.read(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8 text; save the file as UTF-8") from None
    return sequences([line for line in text.splitlines() if line.strip()], options)


def sequences(records: Sequence[str], options: Options, *, full: bool = False) -> Raw:
    """Records as sequences of `size` words, lower case, padded or cut; one for each record.

    `full` leaves out records that would be padded.

    The vocabulary holds the most frequent words; others are UNKNOWN. Labels are the tokens
    themselves, UNSCORED in padding: clients train on the next token.
    """
    if options.channels is not None:
        raise ValueError("text has no channels; leave them out")
    places = options.size or PLACES
    words = [_WORD.findall(record.lower())[:places] for record in records]
    words = [own for own in words if len(own) >= (places if full else 2)]
    if not words:
        raise ValueError("it holds no line with two words or more; give a text, one record a line")
    counts = Counter(word for own in words for word in own)
    kept = sorted(counts, key=lambda word: (-counts[word], word))[: MOST_WORDS - 2]
    names = (PADDING, UNKNOWN, *kept)
    number = {word: k for k, word in enumerate(names)}
    tokens = torch.zeros(len(words), places, dtype=torch.int64)
    for row, own in zip(tokens, words, strict=True):
        row[: len(own)] = torch.tensor([number.get(word, 1) for word in own])
    return Raw(tokens, next_labels(tokens, 0), names, words=names)


def _sentences(text: str) -> list[str]:
    parts = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return [sentence for part in parts for sentence in _SENTENCE.split(part)]
