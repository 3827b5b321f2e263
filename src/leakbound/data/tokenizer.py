"""The texts of tokens, from the file of a model's tokenizer."""

from __future__ import annotations

from pathlib import Path

from leakbound._util import files

MOST_BYTES = 2**27
"""The largest file; one of 256,000 tokens takes a quarter of this."""
BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What a part of a character is decoded to."""


def token_words(path: Path | str, vocabulary: int | None = None) -> tuple[str, ...]:
    """The text of each token of a tokenizer, for display, such as `TokenDomain(..., words=...)`.

    Args:
        path: a `tokenizer.json`, as the package tokenizers and transformers write it. No code runs.
        vocabulary: tokens of the model; it may have more than the tokenizer, whose names are then
            their numbers. By default as many as the tokenizer.

    Raises:
        ValueError: the package tokenizers is missing, the file is no tokenizer of its, or it has
            more tokens than the vocabulary.

    Example:
        >>> import tempfile
        >>> from tokenizers import Tokenizer, models
        >>> held = Tokenizer(models.WordLevel({"fever": 0, "cough": 1}, unk_token="fever"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     held.save(f"{folder}/tokenizer.json")
        ...     token_words(f"{folder}/tokenizer.json", 3)
        ('fever', 'cough', '<2>')
    """
    what = f"tokenizer {str(path)!r}"
    content = files.read_bytes(Path(path), what, most=MOST_BYTES)
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError(f"{what} needs tokenizers; pip install 'leakbound[text]'") from None
    try:
        held = Tokenizer.from_buffer(content)
    except Exception:  # tokenizers raises no narrower one
        raise ValueError(
            f"{what} is not a file of the package tokenizers; give the model's tokenizer.json"
        ) from None
    count = held.get_vocab_size()
    if vocabulary is not None and count > vocabulary:
        raise ValueError(
            f"{what} has {count} tokens, and the model {vocabulary}; give the model's own"
        )
    texts = held.decode_batch([[token] for token in range(count)], skip_special_tokens=False)
    words = [
        text.strip() if text.strip() and BROKEN not in text else held.id_to_token(token)
        for token, text in enumerate(texts)
    ]
    words += [None] * ((vocabulary or count) - count)
    return tuple(word or f"<{token}>" for token, word in enumerate(words))
