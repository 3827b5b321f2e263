"""Tokens from adapters: prints a Markdown table of precision, recall, certificates and seconds.

A Llama-like model at random weights (V = 30,522, d = 384, 2 layers), PEFT's adapters on queries and
values, sequences of 32 tokens. Tokens are drawn by Zipf's law, so that they repeat as in text.

    python benchmarks/adapter_quality.py [--seeds 3] [--only "r=4 B=8"] [--uniform]
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import replace
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from leakbound.attacks.tokens.adapters import AdapterPursuit
from leakbound.core import Batch, LocalPlan, NotApplicable, Observation, Task
from leakbound.defenses import NoDefense
from leakbound.domains import TokenDomain
from leakbound.protocol import play
from leakbound.randomness import permutation, stream, uniform

WORDS, WIDTH, LENGTH, RATE = 30_522, 384, 32, 0.01
STARTS = {"random B": (0.02, 1), "B = 0, SGD 2 steps": (0.0, 2), "B = 0, SGD 8 steps": (0.0, 8)}


def model(rank: int, seed: int, start: float) -> nn.Module:
    """The adapted model, with B of this size."""
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=2 * LENGTH,
        tie_word_embeddings=False,
    )
    lora = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "v_proj"])
    made: Any = peft.get_peft_model(LlamaForCausalLM(config), lora)
    for name, p in made.named_parameters():
        if "lora_B" in name and start:
            nn.init.normal_(p, std=start)
    return made.eval()


def sequences(batch: int, seed: int, *, zipf: bool) -> Tensor:
    """(batch, 32) tokens, frequent ones with a chance of 1 / (k + 3)."""
    draw = uniform((batch, LENGTH), stream(seed, "text")).double()
    if not zipf:
        return (draw * WORDS).long()
    chance = 1 / torch.arange(3, WORDS + 3).double()
    place = torch.searchsorted((chance.cumsum(0) / chance.sum()).contiguous(), draw)
    return permutation(WORDS, stream(seed, "words"))[place]


def rounded(observation: Observation) -> Observation:
    """The update as the difference of weights that were sent as float32."""
    task, rows = observation.task, observation.update.rows
    after = task.parameters - task.plan.learning_rate * rows
    change = (task.parameters - after) / task.plan.learning_rate
    return replace(observation, sent=after, update=replace(observation.update, rows=change))


def line(rank: int, batch: int, name: str, seeds: int, *, zipf: bool) -> str:
    """One line of the table."""
    start, steps = STARTS[name]
    rows = []
    for seed in range(seeds):
        ids = sequences(batch, seed, zipf=zipf)
        task = Task.of(
            model(rank, seed, start),
            domain=TokenDomain(WORDS, LENGTH),
            loss="next_token",
            classes=WORDS,
            plan=LocalPlan(steps, RATE),
        )
        sources = [stream(seed, "play", k) for k in range(2)]
        seen = play(task, [Batch(ids, ids)], NoDefense(), sources).observation
        seen = rounded(seen) if steps > 1 else seen
        began = time.perf_counter()
        try:
            found = AdapterPursuit().found(seen)
        except NotApplicable as error:
            return f"| {rank} | {batch} | {name} | not applicable: {error.reason} | | | | |"
        took = time.perf_counter() - began
        wanted = set(ids[:, :-1].flatten().tolist())  # nothing attends to the last tokens
        hits = len(wanted & set(found.tokens))
        rows.append(
            (
                len(wanted),
                hits / max(1, len(found.tokens)),
                hits / len(wanted),
                found.certain,
                took,
            )
        )
    count, precision, recall, certain, took = zip(*rows, strict=True)
    return (
        f"| {rank} | {batch} | {name} | {mean(count):.0f} | {mean(precision):.3f} | "
        f"{mean(recall):.3f} | {sum(certain)} of {seeds} | {mean(took):.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help='for example "r=4 B=8"')
    parser.add_argument("--uniform", action="store_true", help="tokens without repeats")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print("| r | B | update | tokens | precision | recall | certain | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for rank in (4, 8, 16, 32, 64):
        for batch in (1, 4, 8):
            for name in STARTS:
                if all(part in f"r={rank} B={batch} {name}" for part in args.only.split(" & ")):
                    print(line(rank, batch, name, args.seeds, zipf=not args.uniform), flush=True)


if __name__ == "__main__":
    main()
