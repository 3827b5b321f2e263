"""Models and sequences that tests of attacks on text share."""

import torch

from leakbound import models
from leakbound.randomness import stream

WORDS, WIDTH = 120, 96


def decoder_or_encoder(kind, length, seed=0, words=WORDS, width=WIDTH):
    """A built-in model; the words rotary and tied in `kind` say how."""
    given = {"input_shape": (length,), "generator": stream(seed, "model"), "width": width}
    if kind == "encoder":
        return models.encoder(classes=2, vocabulary=words, heads=2, **given)
    turned = "rotary" if "rotary" in kind else "learned"
    return models.decoder(classes=words, heads=2, positions=turned, tied="tied" in kind, **given)


def tokens(count, length, seed=0, words=WORDS, lowest=0):
    return torch.randint(lowest, words, (count, length), generator=stream(seed, "ids"))


def peer(transformers, kind, seed=0):
    """A small random model of the transformers library."""
    wide = {"num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 192}
    wide |= {"vocab_size": WORDS, "hidden_size": WIDTH}
    special = {"bos_token_id": None, "eos_token_id": None}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "bert":
            config = transformers.BertConfig(max_position_embeddings=16, **wide)
            return transformers.BertForSequenceClassification(config).eval()
        if kind.startswith("masked"):
            config = transformers.BertConfig(
                max_position_embeddings=16, tie_word_embeddings="tied" in kind, **wide
            )
            return transformers.BertForMaskedLM(config).eval()
        if kind == "llama":
            wide |= {"num_key_value_heads": 2, "max_position_embeddings": 16, **special}
            config = transformers.LlamaConfig(**wide)
            return transformers.LlamaForCausalLM(config).eval()
        sizes = {"n_positions": 16, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, **special}
        if kind == "gpt2 classes":
            config = transformers.GPT2Config(vocab_size=WORDS, **sizes, pad_token_id=0)
            return transformers.GPT2ForSequenceClassification(config).eval()
        config = transformers.GPT2Config(
            vocab_size=WORDS, **sizes, tie_word_embeddings="tied" in kind
        )
        return transformers.GPT2LMHeadModel(config).eval()
