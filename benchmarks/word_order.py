"""The order of known words after AdamW: adds to docs/results/language_models.json.

    python benchmarks/word_order.py NAME FOLDER [SEEDS]

NAME and FOLDER are those of `benchmarks/language_models.py`. The attacker is given the words of the
client, which no attacker knows; what is left to find is their order.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import warnings
from pathlib import Path

import language_models
import numpy as np
import torch
from language_models import LATER, RATE, Training, base_of, client, drawn, passages, table, write
from torch import Tensor

from leakbound import captured
from leakbound.domains import TokenDomain
from leakbound.registry import Spec

HEADING = "Order of words"
LENGTH, SECONDS = 8, 120
WORDS = (
    "What an attacker could do who knew all words of a text: `token_matching` gets them as its "
    "only candidates and searches their order for {seconds} s of one thread of a busy processor "
    "(`benchmarks/word_order.py`). A client has one text of {places} tokens and trains LoRA of "
    "rank 8 on queries and values of a Llama-like model with the word table of {name}. In *a later "
    "round* B is not 0 but random, of deviation {later}. *Right* is the share of places (mean, "
    "95 % interval over clients); a random order of the words has {chance:.2f}. *Whole* counts "
    "texts that are right at all places."
)
HEADS = ["optimizer", "steps", "right", "whole"]
TRAININGS = [
    Training(1, 1, optimizer="sgd", later=True),
    Training(1, 1, later=True),
    Training(2, 1),
    Training(10, 1),
]


def searched(
    training: Training,
    folder: str,
    ids: Tensor,
    seed: int,
) -> float:
    """The share of places that are right."""
    with tempfile.TemporaryDirectory() as written:
        place = Path(written)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            client(training, base_of(folder, training, seed), (ids, ids), place)
        base = base_of(folder, training, seed)
        model = captured.read_adapter(place / "server", base)
        update = captured.load(
            captured.sent_tensors(place / "client", base),
            model.state_dict(),
        )
    told = captured.TrainingInfo(
        examples=1,
        learning_rate=RATE if training.optimizer == "adamw" else 0.1,
        steps=training.steps,
        batch_size=1,
        optimizer=training.optimizer,
        weight_decay=training.decay,
    )
    settings = captured.Settings(
        domain=TokenDomain(len(table(folder)), LENGTH),
        attacks=[Spec("token_matching", (("among", tuple(ids.unique().tolist())),))],
        loss="next_token",
        seconds=SECONDS,
    )
    result = captured.attack_update(update, model, settings, told)
    (record,), (answer,) = result.records, result.answers
    assert answer is not None, record.status
    return float((answer.inputs == ids).double().mean())


def by_chance(ids: Tensor) -> float:
    """The share of places that a random order of the same tokens has right, on average."""
    counts = ids.unique(return_counts=True)[1].double()
    return float(counts.square().sum() / counts.sum() ** 2)


def row(folder: str, training: Training, clients: list[tuple[int, Tensor]]) -> list[str]:
    """One line of the page."""
    right = [searched(training, folder, ids, seed) for seed, ids in clients]
    spread = 1.96 * np.std(right, ddof=1) / len(right) ** 0.5
    return [
        training.named,
        f"{training.steps}" + ", a later round" * training.later,
        f"{np.mean(right):.2f}\u00a0±\u00a0{spread:.2f}",
        f"{sum(share == 1 for share in right)} of {len(right)}",
    ]


def main(name: str, folder: str, seeds: str = "3") -> None:
    """Measure all lines."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    language_models.LENGTH = LENGTH
    kinds = passages(folder).values()
    clients = [
        (seed, drawn(TRAININGS[0], folder, ids, seed)[0])
        for seed, ids in itertools.product(range(int(seeds)), kinds)
    ]
    rows = []
    for training in TRAININGS:
        rows.append(row(folder, training, clients))
        print(" | ".join(rows[-1]), flush=True)
    said = WORDS.format(
        seconds=SECONDS,
        places=LENGTH,
        name=name,
        later=LATER,
        chance=np.mean([by_chance(ids) for _, ids in clients]),
    )
    write(HEADING, [said, {"columns": HEADS, "align": "lrrr", "rows": rows}])


if __name__ == "__main__":
    main(*sys.argv[1:])
