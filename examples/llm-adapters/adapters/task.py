"""What all sides agree on: the model with its adapters, and who holds which texts."""

from functools import cache

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from leakbound import data

PLACES, NOTES, RANK = 16, 4, 8
"""Tokens of a text, texts of a clinic, and rank of the adapters."""


@cache
def texts():
    """Sentences of Python's help texts, in place of clinical notes."""
    return data.load("topics", size=PLACES)


def build(**_) -> PeftModel:
    """The same base model for everyone, with adapters at their start (B is zero).

    Real teams load published weights here. Its base is frozen: only adapters are sent.
    """
    words = len(texts().words)
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=384,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = LlamaForCausalLM(config)
        lora = LoraConfig(r=RANK, lora_alpha=16, target_modules=["q_proj", "v_proj"])
        return get_peft_model(base, lora).eval()


def notes(client: int) -> torch.Tensor:
    """The texts (NOTES, PLACES) of one clinic."""
    return texts().inputs[100 + NOTES * client :][:NOTES]
