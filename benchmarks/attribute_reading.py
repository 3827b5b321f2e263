"""How often an update reveals one person's outcome: writes docs/results/attribute_reading.json.

People are rows of german, drawn again, with a diagnosis of 300 codes that follow Zipf's law, as
rare codes do in hospitals. No row of the people who train is a row of the public people. The
attacker knows everything of a person but the outcome, and that the person alone has the code. About
10 minutes in two processes.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leakbound import data
from leakbound._util.intervals import clopper_pearson
from leakbound.attacks.attribute import read_attribute
from leakbound.bounds.knowledge import noise_for_gain
from leakbound.core import Batch, LocalPlan, Task
from leakbound.defenses import Defense, DpSgd, NoDefense, SecureAggregation
from leakbound.protocol import play
from leakbound.randomness import permutation, stream

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import stored

CODES = 300
PEOPLE = 256
PUBLIC = 3000
OPEN = 400
"""Rows of german that public people are drawn from; the others are private."""
ASKED = 60
"""People whose outcome is asked for, of each setting."""
TESTED = 10
"""The first of them, of whom a p-value says whether chance explains the answer."""
TESTS = 99
"""Trainings under each hypothesis, for a p-value of .01 at least."""
A_SITE = 6
"""Most people of one round who are asked for."""
PLANS = {
    "1 step of SGD": LocalPlan(learning_rate=0.1),
    "3 epochs, SGD 0.05": LocalPlan(24, 0.05, 32),
    "3 epochs, Adam 0.001": LocalPlan(24, 0.001, 32, "adam"),
}


def people(count: int, seed: int, *, public: bool = False) -> Batch:
    """Rows of german and a one-hot code; the outcome depends on the row."""
    table = data.load("german")
    draw = stream(seed, "people")
    order = permutation(len(table.inputs), stream(0, "split"))
    rows = order[:OPEN] if public else order[OPEN:]
    at = rows[torch.randint(0, len(rows), (count,), generator=draw)]
    law = 1 / torch.arange(1, CODES + 1).double()
    code = torch.multinomial(law, count, replacement=True, generator=draw)
    hot = nn.functional.one_hot(code, CODES).to(table.inputs)
    return Batch(torch.cat([table.inputs[at], hot], 1), table.labels[at])


def network(kind: str, width: int, seed: int) -> nn.Module:
    """A model at random weights, drawn from a named stream."""
    hidden = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 2))
    model = nn.Linear(width, 2) if kind == "logistic regression" else hidden
    draw = stream(seed, "weights")
    with torch.no_grad():
        for weights in model.parameters():
            weights.copy_(torch.randn(weights.shape, generator=draw) / width**0.5)
    return model


@dataclass(frozen=True)
class Remedy:
    """What a team can do without noise: merge rare codes, drop the code, train more people."""

    words: str = "none"
    codes: int = CODES
    people: int = PEOPLE

    def seen(self, batch: Batch) -> Batch:
        """What the model is fed: the most frequent codes, and one column for all others."""
        if self.codes == CODES:
            return batch
        first = batch.inputs.shape[1] - CODES
        kept = batch.inputs[:, : first + self.codes]
        others = batch.inputs[:, first + self.codes :].sum(1, keepdim=True)
        return Batch(torch.cat([kept, others], 1), batch.labels)


class Answer(NamedTuple):
    """About one person: whether the answer is right, the outcome, and the p-value if tested."""

    right: bool
    outcome: int
    p_value: float | None

    @property
    def read(self) -> bool:
        """Whether the outcome is read: chance does not explain the answer."""
        return self.p_value is not None and self.p_value <= 1 / (1 + TESTS)


def rounds(
    kind: str, plan: LocalPlan, sites: int, defense: Defense, remedy: Remedy
) -> Iterator[Answer]:
    """The answer for each person asked for."""
    seed = 0
    asked = 0
    public = remedy.seen(people(PUBLIC, 10**6, public=True))
    while asked < ASKED:
        seed += 1
        whole = [people(remedy.people // sites, 1000 * seed + site) for site in range(sites)]
        parts = [remedy.seen(part) for part in whole]
        everyone = Batch(torch.cat([p.inputs for p in parts]), torch.cat([p.labels for p in parts]))
        codes = torch.cat([part.inputs for part in whole])
        task = Task.of(network(kind, everyone.inputs.shape[1], seed), plan=plan)
        sources = [stream(seed, "play", at) for at in range(sites + 1)]
        seen = play(task, parts, defense, sources).observation
        seen = replace(seen, auxiliary=public)
        for at, column in _sole_carriers(codes)[: min(A_SITE, ASKED - asked)]:
            completions = Batch(everyone.inputs[at].expand(2, -1), torch.tensor([0, 1]))

            def alone(batch: Batch, column: int = column) -> Tensor:
                return batch.inputs[:, column] == 0

            reading = read_attribute(
                seen,
                completions,
                stream(seed, "attack", at),
                alone=alone if remedy.codes == CODES else None,
                tests=TESTS if asked < TESTED else 0,
            )
            outcome = int(everyone.labels[at])
            yield Answer(reading.value == outcome, outcome, reading.p_value)
            asked += 1


def _sole_carriers(inputs: Tensor) -> list[tuple[int, int]]:
    """Who alone has a code: place and column."""
    first = inputs.shape[1] - CODES
    counts = inputs[:, first:].sum(0)
    columns = (first + torch.nonzero(counts == 1).flatten()).tolist()
    holders = [int(inputs[:, column].argmax()) for column in columns]
    return list(zip(holders, columns, strict=True))


def line(
    kind: str,
    name: str,
    sites: int,
    words: str,
    defense: Defense,
    remedy: Remedy = Remedy(),
) -> list[str]:
    """One line of the table."""
    answers = list(rounds(kind, PLANS[name], sites, defense, remedy))
    right = sum(answer.right for answer in answers)
    zero = sum(answer.outcome == 0 for answer in answers)
    common = max(zero, len(answers) - zero) / len(answers)
    tested = [answer for answer in answers if answer.p_value is not None]
    return [
        kind,
        name,
        str(sites),
        words,
        _share(right, len(answers)),
        f"{100 * common:.0f} %",
        _share(sum(answer.read for answer in tested), len(tested)),
        str(sum(answer.read and not answer.right for answer in tested)),
    ]


def _share(count: int, total: int) -> str:
    low, high = clopper_pearson(count, total, 0.025)
    return f"{count} of {total} ({100 * low:.0f} to {100 * high:.0f} %)"


def _line(setting: tuple[Any, ...]) -> list[str]:
    torch.set_num_threads(1)
    row = line(*setting)
    print(" | ".join(row), flush=True)
    return row


def main() -> int:
    """Measure every setting and write the page."""
    settings = [
        *((KINDS[0], name, 1, "none", NoDefense()) for name in PLANS),
        *(
            (KINDS[1], name, sites, "none", SecureAggregation(sites) if sites > 1 else NoDefense())
            for name in PLANS
            for sites in (1, 4, 9)
        ),
        *(
            (KINDS[1], "1 step of SGD", 1, f"DP-SGD, noise {noise:.3g}", DpSgd(1.0, noise))
            for noise in (0.1, 1.0, float(noise_for_gain(0.1)))
        ),
        *((KINDS[1], "1 step of SGD", 1, remedy.words, NoDefense(), remedy) for remedy in REMEDIES),
    ]
    with multiprocessing.Pool(int(sys.argv[1]) if len(sys.argv) > 1 else 2) as pool:
        table = pool.map(_line, settings, chunksize=1)
    plain = [row for row in table if row[3] == "none"]
    asked = ASKED * len(plain)
    right = sum(int(row[4].split()[0]) for row in plain)
    tested = TESTED * len(plain)
    read = sum(int(row[6].split()[0]) for row in plain)
    wrong = sum(int(row[7]) for row in table)
    heads = [
        "model",
        "local training",
        "sites",
        "defense",
        "right answers",
        "the commoner outcome",
        "read (p ≤ .01)",
        "read, but wrong",
    ]
    says = WORDS.format(
        all=_share(right, asked),
        read=_share(read, tested),
        wrong=f"{wrong} of {TESTED * len(table)}",
        gain=float(noise_for_gain(0.1)),
    )
    page = {
        "title": "One outcome of a known person",
        "sections": [{"body": [says, {"columns": heads, "align": "llrlllll", "rows": table}]}],
    }
    (stored.FOLDER / "attribute_reading.json").write_text(stored.dumps(page), "utf-8")
    return 0


REMEDIES = (
    Remedy("2,048 people", people=2048),
    Remedy("codes beyond 100 merged", codes=100),
    Remedy("codes beyond 20 merged", codes=20),
    Remedy("code dropped", codes=0),
)
KINDS = ("logistic regression", "perceptron, 64 units")
WORDS = (
    f"{PEOPLE} people take part in a round; several sites share them and the attacker sees the "
    f"mean. Each line asks for the outcomes of {ASKED} people who alone have their code, with a "
    "95 % interval (Clopper and Pearson; up to 6 people are of one round). Without a defense "
    "{all} answers are right. The attacker has 3,000 "
    "public people, drawn from other rows than those who train, and knows the local "
    "training and, for DP-SGD, the noise. Answers use no prior, so under strong noise the commoner "
    f"outcome is the better answer. Of the first {TESTED} people of a line a p-value says whether "
    f"chance explains the answer: the update among {TESTS} trainings with the other outcome, "
    "and among as many without the person. Without a defense {read} are read; in all lines {wrong} "
    "are read and wrong. Noise {gain:.3g} is that of the target "
    "gain<=0.1 for the label. The last lines change the training and add no noise: the same people "
    "are asked for, who alone have their code among all."
)

if __name__ == "__main__":
    sys.exit(main())
