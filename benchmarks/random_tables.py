"""Words from adapters of bases with random word tables: adds to docs/results/language_models.json.

    python benchmarks/random_tables.py [SEEDS] [NULLS]

Of random tables, no word resembles another, and the law of chance holds exactly: they show what
width, rank and batches do alone. NULLS clients have words that are in no table; a word that is
stated of them is wrong.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from language_models import LENGTH, RATE, Training, client, llama, write
from torch import Tensor

from leakbound import captured
from leakbound.domains import TokenDomain

HEADING = "Random tables"
WORDS = (
    "The same attack where the word table is random: a Llama-like model of two layers, all of it "
    "at random (`benchmarks/random_tables.py`). Tokens of 32 places a text are drawn by Zipf's law "
    "with an exponent of 1.1. A line says how many different tokens a client has, and which share "
    "of them is stated (mean, 95 % interval over clients). *Right* is the share of stated words "
    "that are right. *Wrong* counts clients with a wrong word. Seconds (median) are of one thread "
    "of a busy processor without AVX-512."
)
NULL = (
    "Clients whose words have vectors that the attacker's table does not hold (rank 8, "
    "{count:,} × {width}, 10 steps of AdamW on 4 texts): {wrong} of {lists:,} lists state a word. "
    "The level is 1 %."
)
EXPONENT = 1.1
TABLES = [
    (8_000, 512, Training(10, 4, rank=8)),
    (8_000, 1_024, Training(10, 4, rank=16)),
    (32_000, 2_048, Training(10, 4, rank=16)),
    (32_000, 2_048, Training(10, 4, rank=8, fresh=True)),
]
UNKNOWN = 2_000, 128
HEADS = [
    "words × width",
    "rank",
    "optimizer",
    "steps",
    "texts",
    "tokens",
    "share",
    "right",
    "wrong",
    "s",
]


def drawn(count: int, texts: int, seed: int) -> Tensor:
    """(texts, LENGTH) tokens by Zipf's law."""
    source = torch.Generator().manual_seed(10_000 + seed)
    law = torch.arange(1.0, count + 1) ** -EXPONENT
    ids = torch.multinomial(
        law,
        texts * LENGTH,
        replacement=True,
        generator=source,
    )
    return ids.view(texts, LENGTH)


def attacked(
    training: Training,
    ids: Tensor,
    seed: int,
    size: tuple[int, int],
    known: bool = True,
) -> tuple[set[int], float]:
    """The tokens that the attack states, and its seconds; not `known`: by another table."""
    base = llama(*size, size[1], seed)
    with tempfile.TemporaryDirectory() as written:
        place = Path(written)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            client(training, base, (ids, ids), place)
        base = llama(*size, size[1], seed)
        if not known:
            other: Any = llama(*size, size[1], seed + 1)
            base.load_state_dict(
                {"model.embed_tokens.weight": other.get_input_embeddings().weight},
                strict=False,
            )
        began = time.perf_counter()
        model = captured.read_adapter(place / "server", base)
        sent = captured.sent_tensors(place / "client", base)
        update = captured.load(sent, model.state_dict())
    told = captured.TrainingInfo(
        examples=training.examples,
        learning_rate=RATE,
        steps=training.steps,
        batch_size=training.batch,
        optimizer=training.optimizer,
        weight_decay=training.decay,
    )
    settings = captured.Settings(
        domain=TokenDomain(size[0], LENGTH),
        attacks="adapter_words",
        loss="next_token",
    )
    (record,) = captured.attack_update(update, model, settings, told).records
    facts = [fact for fact in record.facts if fact.kind == "words"]
    found = {int(item) for fact in facts for item in fact.items}
    return found, time.perf_counter() - began


def row(count: int, width: int, training: Training, seeds: int) -> list[str]:
    """One line of the page."""
    tokens, shares, right, seconds = [], [], [], []
    wrong = 0
    for seed in range(seeds):
        ids = drawn(count, training.examples, seed)
        truth = {*ids.flatten().tolist()}
        found, took = attacked(training, ids, seed, (count, width))
        tokens.append(len(truth))
        shares.append(len(found & truth) / len(truth))
        right += [word in truth for word in found]
        seconds.append(took)
        wrong += bool(found - truth)
    spread = 1.96 * np.std(shares, ddof=1) / seeds**0.5
    return [
        f"{count:,} × {width:,}",
        str(training.rank),
        training.named,
        f"{training.steps}" + ", new batches" * training.fresh,
        str(training.examples),
        f"{np.mean(tokens):.0f}",
        f"{np.mean(shares):.2f}\u00a0±\u00a0{spread:.2f}",
        f"{np.mean(right):.3f}",
        f"{wrong} of {seeds}",
        f"{np.median(seconds):.0f}",
    ]


def main(seeds: str = "5", nulls: str = "1000") -> None:
    """Measure all lines, and the clients of another table."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    wrong = 0
    training = Training(10, 4, rank=8)
    for seed in range(int(nulls)):
        ids = drawn(UNKNOWN[0], training.examples, seed)
        wrong += bool(attacked(training, ids, seed, UNKNOWN, known=False)[0])
    said = NULL.format(count=UNKNOWN[0], width=UNKNOWN[1], wrong=wrong, lists=int(nulls))
    print(said, flush=True)
    rows = []
    for count, width, how in TABLES:
        rows.append(row(count, width, how, int(seeds)))
        print(" | ".join(rows[-1]), flush=True)
    table = {"columns": HEADS, "align": "lrlrrrrrrr", "rows": rows}
    write(HEADING, [WORDS, table, said])


if __name__ == "__main__":
    main(*sys.argv[1:])
