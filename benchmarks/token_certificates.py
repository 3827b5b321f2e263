"""How often an attack on text reports no problem and is wrong, over many small random rounds.

Small models are the hard case: points of other sequences may lie in a span by chance, tokens
repeat, labels of encoders cancel, and marks stand at both ends. Prints one line for each attack and
kind of update. About half an hour for 10,000 rounds, 1 thread.

    python benchmarks/token_certificates.py [--rounds 10000] [--seed 0]
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from leakbound import models
from leakbound.attacks import AdapterPursuit, TokenRows, TokenSpan
from leakbound.core import Batch, NotApplicable, Observation, Task
from leakbound.defenses import GaussianNoise, NoDefense
from leakbound.domains import TokenDomain
from leakbound.losses import next_labels
from leakbound.protocol import play
from leakbound.randomness import stream

KINDS = ("exact", "noise", "float16", "bfloat16")


def pick(source: torch.Generator, *options: Any) -> Any:
    return options[int(torch.randint(len(options), (1,), generator=source))]


def scene(seed: int) -> tuple[Tensor, Observation, str]:
    """The sequences of a random round, what the server sees of it, and its kind."""
    source = stream(seed, "certificates")
    vocabulary, length, count = (
        pick(source, 8, 20, 60),
        pick(source, 2, 3, 5, 8),
        pick(source, 1, 2, 4),
    )
    causal, padded = pick(source, True, True, False), pick(source, False, False, True)
    tokens = torch.randint(1, vocabulary, (count, length), generator=source)
    if pick(source, True, False):  # marks at both ends, as encoders have them
        tokens[:, 0], tokens[:, -1] = 1, 2
    side = pick(stream(seed, "side"), "right", "left")
    if padded and length > 2:
        tokens[0, -1 if side == "right" else 0] = 0
    domain = TokenDomain(
        vocabulary,
        length,
        padding=0 if padded else None,
        padding_side=side,
    )
    given = {
        "input_shape": (length,),
        "width": pick(source, 8, 16, 32),
        "layers": pick(source, 1, 2, 3),
        "heads": 2,
        "generator": source,
    }
    if causal:
        model = models.decoder(
            classes=vocabulary,
            positions=pick(source, "learned", "rotary"),
            tied=pick(source, False, True),
            adapters=pick(source, 0, 0, 2, 4, 8),
            **given,
        )
        task = Task.of(model, domain=domain, loss="next_token", classes=vocabulary)
        labels = next_labels(tokens, domain.padding)
    else:
        model = models.encoder(classes=2, vocabulary=vocabulary, **given)
        task = Task.of(model, domain=domain, classes=2)
        labels = torch.arange(count) % 2
    kind = pick(source, *KINDS)
    sources = [stream(seed, "client"), stream(seed, "cohort")]
    seen = play(task, [Batch(tokens, labels)], NoDefense(), sources).observation
    rows = seen.update.rows
    if kind == "noise":
        size = 10.0 ** -pick(source, 3, 4, 5, 6, 7) * float(rows.norm())
        defense = GaussianNoise(noise_std=size)
        seen = play(task, [Batch(tokens, labels)], defense, sources).observation
    elif kind != "exact":
        rounded = rows.to(getattr(torch, kind)).to(rows.dtype)
        seen = replace(seen, update=replace(seen.update, rows=rounded))
    return tokens, seen, kind


def certified(attack: Any, seen: Observation, tokens: Tensor, seed: int) -> bool | None:
    """Whether an answer without a problem is right; None if it has one.

    Of adapters, the answer is that some tokens occur, without the last of each sequence, which is a
    label, and without padding. Padding before a sequence sees its last token.
    """
    if isinstance(attack, AdapterPursuit):
        found = attack.found(seen)
        before = seen.task.domain.padded_before
        ends = (row[row > 0][: None if before else -1].tolist() for row in tokens)
        words = {*found.tokens} - ({0} if before else set())
        return words <= {k for row in ends for k in row} if found.certain else None
    answer = attack(seen, stream(seed, "attack"))
    return sorted(answer.inputs.tolist()) == sorted(tokens.tolist()) if not answer.problem else None


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rounds, sure, wrong = Counter[Any](), Counter[Any](), Counter[Any]()
    for seed in range(given.seed, given.seed + given.rounds):
        tokens, seen, kind = scene(seed)
        for attack in (TokenRows(), TokenSpan(), AdapterPursuit()):
            key = type(attack).__name__, kind
            try:
                right = certified(attack, seen, tokens, seed)
            except NotApplicable:
                continue
            rounds[key] += 1
            if right is not None:
                sure[key] += 1
                wrong[key] += not right
                if not right:
                    print("wrong:", key, seed, flush=True)
    print("| attack | update | rounds | without a problem | of these wrong |")
    print("|---|---|--:|--:|--:|")
    for key in sorted(rounds):
        print(f"| {key[0]} | {key[1]} | {rounds[key]} | {sure[key]} | {wrong[key]} |")
    print(f"in all {sum(sure.values())} without a problem, {sum(wrong.values())} of them wrong")


if __name__ == "__main__":
    main()
