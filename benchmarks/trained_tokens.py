"""How often a certain statement about the text of a client that trained is wrong.

Small language models train for some steps by SGD, Adam or AdamW, with decay, clipping and bfloat16
weights, on one batch or several; some are adapters alone, some have tied word tables and are sure
of what they expect. `attack_update` gets the weights before and after, and knows the training or
infers it. A statement is wrong if it names a word, or a sequence, that the client does not have.
Prints one line for each optimizer. About a second for each round, 1 thread.

    python benchmarks/trained_tokens.py [--rounds 1000] [--seed 0]
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from token_certificates import pick
from torch import Tensor, nn

from leakbound import captured, models
from leakbound.captured import Settings, TrainingInfo
from leakbound.domains import TokenDomain
from leakbound.losses import next_labels
from leakbound.randomness import permutation, stream, uniform

VOCABULARY = 60
FEW = 10
SURE = 1, 1, 5, 20
"""Factors of tied word tables: a model with a large one is sure of what it expects."""
RATES = {"sgd": (0.01, 0.1), "adam": (1e-4, 1e-3), "adamw": (1e-4, 1e-3)}
RULES: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
ATTACKS = ["token_rows", "adapter_pursuit", "adapter_words", "token_span"]


@dataclass(frozen=True)
class Client:
    """A client's model, its weights before and after, and all that it trained on."""

    model: nn.Module
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    batches: list[Tensor]
    optimizer: str
    told: TrainingInfo

    @property
    def words(self) -> set[int]:
        """The words that occur."""
        return {word for batch in self.batches for word in batch.flatten().tolist()}

    @property
    def sequences(self) -> set[tuple[int, ...]]:
        """The sequences that occur."""
        return {tuple(row) for batch in self.batches for row in batch.tolist()}


def model_of(length: int, source: torch.Generator) -> nn.Module:
    """A decoder of one or two layers, as a client gets it."""
    adapters = pick(source, 0, 0, 2, 4, 8)
    tied = not adapters and pick(source, False, True)
    model = models.decoder(
        input_shape=(length,),
        classes=VOCABULARY,
        width=pick(source, 32, 48),
        layers=pick(source, 1, 2),
        positions=pick(source, "learned", "rotary"),
        tied=tied,
        adapters=adapters,
        generator=source,
    )
    with torch.no_grad():
        if tied:
            for _, module in model.named_modules():
                if isinstance(module, nn.Embedding) and len(module.weight) == VOCABULARY:
                    module.weight *= pick(source, *SURE)
        if adapters and pick(source, False, True):  # the first round of an adapter: B = 0
            for name, weight in model.named_parameters():
                if weight.requires_grad and "lora_B" in name:
                    weight.zero_()
    return model.to(torch.bfloat16) if pick(source, False, False, True) else model


def client(seed: int) -> Client:
    """A random client."""
    source = stream(seed, "trained")
    length = pick(source, 4, 8)
    model = model_of(length, source)
    optimizer = pick(source, "sgd", "adam", "adamw", "adamw")
    rate = pick(source, *RATES[optimizer])
    decay = pick(source, 0.0, 0.0, 0.01, 0.1) if optimizer != "adam" else 0.0
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    rule = RULES[optimizer](
        weights,
        lr=rate,
        weight_decay=decay,
    )
    steps, count = pick(source, 1, 1, 2, 5), pick(source, 1, 1, 2, 4)
    same, clipped = pick(source, False, True), pick(source, False, False, True)
    some = permutation(VOCABULARY - 1, source)[: pick(source, FEW, VOCABULARY - 1)] + 1
    before = _weights(model)
    batches = list[Tensor]()
    for _ in range(steps):
        if not batches or not same:
            places = (uniform((count, length), source) * len(some)).long()
            batches.append(some[places])
        ids = batches[-1]
        rule.zero_grad()
        scores = model(ids).float().flatten(0, 1)
        nn.functional.cross_entropy(scores, next_labels(ids, None).flatten()).backward()
        if clipped:
            nn.utils.clip_grad_norm_(weights, 1.0)
        rule.step()
    after = _weights(model)
    model.load_state_dict(before)
    known = pick(source, False, True)
    told = TrainingInfo(
        examples=count * len(batches),
        batch_size=count,
        learning_rate=rate,
        steps=steps if known else None,
        optimizer=optimizer if known else None,
        weight_decay=decay if known else None,
    )
    return Client(
        model=model.float(),
        before=before,
        after=after,
        batches=batches,
        optimizer=optimizer,
        told=told,
    )


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone().float() for name, value in model.state_dict().items()}


def statements(one: Client) -> list[tuple[str, bool]]:
    """What is stated of a client, by kind, and whether it is right."""
    length = one.batches[0].shape[1]
    settings = Settings(
        (length,),
        attacks=ATTACKS,
        domain=TokenDomain(VOCABULARY, length),
        loss="next_token",
        classes=VOCABULARY,
        seconds=20,
    )
    update = captured.load(
        one.after,
        one.before,
        kind="weights",
    )
    result = captured.attack_update(update, one.model, settings, one.told)
    stated = list[tuple[str, bool]]()
    for record, answer in zip(result.records, result.answers, strict=True):
        for fact in record.facts:
            if fact.kind == "words":
                kind = "certain words" if fact.level is None else "words at level 1 %"
                stated.append((kind, {int(word) for word in fact.items} <= one.words))
        if record.certificate and answer is not None:
            rows = {tuple(row) for row in answer.inputs.tolist()}
            stated.append(("certain sequences", rows <= one.sequences))
    return stated


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    clients, made, wrong = Counter[Any](), Counter[Any](), Counter[Any]()
    for seed in range(given.seed, given.seed + given.rounds):
        one = client(seed)
        clients[one.optimizer] += 1
        for kind, right in statements(one):
            made[one.optimizer, kind] += 1
            wrong[one.optimizer, kind] += not right
            if not right:
                print("wrong:", one.optimizer, kind, seed, flush=True)
    print("| optimizer | rounds | statement | made | wrong |")
    print("|---|--:|---|--:|--:|")
    for (optimizer, kind), count in sorted(made.items()):
        of = clients[optimizer]
        print(f"| {optimizer} | {of} | {kind} | {count} | {wrong[optimizer, kind]} |")


if __name__ == "__main__":
    main()
