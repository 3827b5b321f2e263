"""What exact attacks reconstruct of tokens: prints one table of sets, order and sequences.

Random weights: a GPT-2-like decoder (6 layers, width 384, 30,522 tokens) with separate and shared
output layers, and a BERT-like encoder of the same size with two classes. Labels are not known for
the decoder. Tokens follow a Zipf distribution, so they repeat. About 5 minutes a seed, 1 thread.
It needs transformers.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leakbound.attacks.tokens.rows import TokenRows
from leakbound.attacks.tokens.span import TokenSpan
from leakbound.core import Batch, NotApplicable, Observation, Task
from leakbound.defenses import NoDefense
from leakbound.domains import TokenDomain
from leakbound.protocol import play
from leakbound.randomness import stream

VOCABULARY, WIDTH, LAYERS, HEADS = 30_522, 384, 6, 12
SIZES, LENGTHS = (1, 4, 8), (16, 32)
KINDS = ("decoder", "decoder, shared", "encoder", "encoder, marks")
MARKS = 101, 102
"""What stands at both ends of a sequence for BERT."""


@dataclass(frozen=True)
class Found:
    """One batch: set precision and recall of each attack; sequences found, without their last
    token for a decoder; whole sequences; whether the attack certified them; and seconds.
    """

    rows: tuple[float, float]
    span: tuple[float, float]
    ordered: float
    begun: float
    whole: float
    certain: bool
    wrong: bool
    rows_s: float
    span_s: float


def model_of(kind: str) -> Any:
    import transformers

    if kind.startswith("encoder"):
        own = transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=4 * WIDTH,
            max_position_embeddings=64,
            num_labels=2,
        )
        return transformers.BertForSequenceClassification(own).eval()
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        tie_word_embeddings=kind != "decoder",
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.GPT2LMHeadModel(config).eval()


def draw(size: int, length: int, seed: int) -> Tensor:
    """Sequences of tokens by Zipf's law (exponent 1), in a random order of the vocabulary."""
    source = stream(seed, "tokens", size, length)
    weights = 1 / torch.arange(1, VOCABULARY + 1).double()
    ranks = torch.multinomial(weights, size * length, replacement=True, generator=source)
    names = torch.randperm(VOCABULARY, generator=source)
    return names[ranks].reshape(size, length)


def observed(kind: str, ids: Tensor, seed: int) -> Observation:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_of(kind)
    decoder = not kind.startswith("encoder")
    task = Task.of(
        model,
        domain=TokenDomain(VOCABULARY, ids.shape[1]),
        loss="next_token" if decoder else "cross_entropy",
        classes=VOCABULARY if decoder else 2,
    )
    batch = Batch(ids, ids if decoder else torch.arange(len(ids)) % 2)
    return play(task, [batch], NoDefense(), [stream(0, "client"), stream(0, "all")]).observation


def overlap(found: Sequence[int], truth: set[int]) -> tuple[float, float]:
    """Precision and recall."""
    right = len(truth & set(found))
    return right / max(len(found), 1), right / len(truth)


def share(truth: Tensor, found: Tensor) -> float:
    """The share of sequences that are found, one for one."""
    left, right = list(map(tuple, found.tolist())), 0
    for row in map(tuple, truth.tolist()):
        if row in left:
            left.remove(row)
            right += 1
    return right / len(truth)


def attacked(kind: str, size: int, length: int, seed: int) -> Found:
    ids = draw(size, length, seed)
    if kind.endswith("marks"):
        ids[:, 0], ids[:, -1] = MARKS
    seen = observed(kind, ids, seed)
    most = length - (not kind.startswith("encoder"))
    truth = set(ids[:, :most].flatten().tolist())
    start = time.perf_counter()
    try:
        rows = overlap(TokenRows().tokens(seen), truth)
        ordered = share(ids[:, :most], TokenRows()(seen, stream(seed)).inputs[:, :most])
    except NotApplicable:
        rows, ordered = (float("nan"),) * 2, float("nan")
    middle = time.perf_counter()
    answer = TokenSpan()(seen, stream(seed, "span"))
    end = time.perf_counter()
    whole = share(ids, answer.inputs)
    return Found(
        rows,
        overlap(TokenSpan().tokens(seen), truth),
        ordered,
        share(ids[:, :most], answer.inputs[:, :most]),
        whole,
        answer.problem is None,
        answer.problem is None and whole < 1,
        middle - start,
        end - middle,
    )


def line(kind: str, size: int, length: int, every: Sequence[Found]) -> str:
    """One line of the table: means over batches."""

    def mean(values: Sequence[Any]) -> str:
        return f"{sum(values) / len(values):.3g}"

    cells = [
        kind,
        str(size),
        str(length),
        " / ".join(mean([one.rows[k] for one in every]) for k in (0, 1)),
        " / ".join(mean([one.span[k] for one in every]) for k in (0, 1)),
        mean([one.ordered for one in every]) if size == 1 else "–",
        mean([one.begun for one in every]),
        mean([one.whole for one in every]),
        f"{sum(one.certain for one in every)} of {len(every)}",
        str(sum(one.wrong for one in every)),
        mean([one.rows_s for one in every]),
        mean([one.span_s for one in every]),
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    print(
        "| model | B | n | rows: P / R | span: P / R | order, B=1 | all but last | whole "
        "| certified | certified, wrong | rows, s | span, s |"
    )
    print("|---|" + "--:|" * 11)
    for kind in given.kinds:
        for size in given.sizes:
            for length in given.lengths:
                every = [attacked(kind, size, length, seed) for seed in range(given.seeds)]
                print(line(kind, size, length, every), flush=True)


if __name__ == "__main__":
    main()
