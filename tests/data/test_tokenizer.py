"""The texts of tokens, from files of the package tokenizers."""

import pytest

from leakbound.attacks.tokens.layers import words
from leakbound.data import token_words
from leakbound.data.tokenizer import MOST_BYTES
from leakbound.domains import TokenDomain

tokenizers = pytest.importorskip("tokenizers")
TEXT = ["Anna has a fever of 39.5 since May", "患者 は 熱 が ある", "the café was closed ☂"] * 5


def byte_level(place):
    """A tokenizer of bytes, as of GPT-2 and Llama 3: spaces begin tokens, characters may break."""
    held = tokenizers.Tokenizer(tokenizers.models.BPE())
    held.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    held.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    held.train_from_iterator(TEXT, trainer)
    held.save(str(place))
    return held


def test_every_token_has_a_text(tmp_path):
    held = byte_level(tmp_path / "tokenizer.json")
    found = token_words(tmp_path / "tokenizer.json", 500)
    count = held.get_vocab_size()
    assert len(found) == 500
    assert all(found)
    assert found[count:] == tuple(f"<{token}>" for token in range(count, 500))
    read = {found[token] for text in TEXT for token in held.encode(text).ids}
    assert {"fever", "Anna", "患者", "café"} <= read
    # The bytes of ☂ that no token joins have no text of their own.
    broken = held.encode("☂").ids
    assert not any("\N{REPLACEMENT CHARACTER}" in found[token] for token in broken)


def test_files_that_are_refused(tmp_path):
    place = tmp_path / "tokenizer.json"
    held = byte_level(place)
    count = held.get_vocab_size()
    with pytest.raises(ValueError, match=f"has {count} tokens, and the model 7"):
        token_words(place, 7)
    for text in ("", "[]", "{}", '{"model": {"type": "BPE"}}', "[" * 100_000):
        place.write_text(text)
        with pytest.raises(ValueError, match="is not a file of the package tokenizers"):
            token_words(place)
    with pytest.raises(ValueError, match="cannot be read"):
        token_words(tmp_path / "none.json")
    with place.open("wb") as stream:
        stream.truncate(MOST_BYTES + 1)
    with pytest.raises(ValueError, match="is over"):
        token_words(place)


def test_words_that_may_tell_of_a_person_come_first():
    texts = ("of", "##ed", "since", "fever", "39", "Anna", "the", "COVID")
    domain = TokenDomain(len(texts), 4, words=texts)
    (fact,) = words(domain, [0, 1, 2, 5, 4, 6, 3], None, "")
    assert fact.items == ("39", "Anna", "since", "fever", "of", "##ed", "the")
    (fact,) = words(TokenDomain(8, 4), [5, 0, 3], None, "")
    assert fact.items == ("5", "0", "3")
