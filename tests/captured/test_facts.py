"""What captured updates reveal for certain: by every optimizer, with nothing invented beside it."""

import pytest
import torch
from torch import nn

from leakbound import data, models
from leakbound.attacks import AdapterPursuit
from leakbound.attacks.tokens.adapters import FoundTokens, _filled
from leakbound.captured import findings, load
from leakbound.randomness import permutation, stream

from .flat import attack_update

OPTIMIZERS = {
    "sgd": lambda own: torch.optim.SGD(own, lr=0.05),
    "momentum": lambda own: torch.optim.SGD(own, lr=0.05, momentum=0.9),
    "adam": lambda own: torch.optim.Adam(own, lr=1e-3),
    "adamw": lambda own: torch.optim.AdamW(own, lr=1e-3, weight_decay=0.0),
    "decay": lambda own: torch.optim.SGD(own, lr=0.05, weight_decay=1e-2),
    "adamw with decay": lambda own: torch.optim.AdamW(own, lr=1e-3, weight_decay=1e-2),
}


def state(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def patients(count, seed):
    rows = data.load("german")
    at = permutation(len(rows.labels), stream(seed, "patients"))[:count]
    return rows.domain, rows.inputs[at], rows.labels[at]


def trained_on(model, inputs, labels, optimizer, epochs=3, size=32):
    before, own = state(model), OPTIMIZERS[optimizer](model.parameters())
    for _ in range(epochs):
        for part in torch.arange(len(inputs)).split(size):
            own.zero_grad()
            nn.functional.cross_entropy(model(inputs[part]), labels[part]).backward()
            own.step()
    return before, state(model)


HIDDEN = {("decay", 128), ("adamw with decay", 128)}
"""All levels occur, so that no column shows the decay alone."""
EACH = [(name, count) for name in OPTIMIZERS for count in (8, 128)]


@pytest.mark.parametrize(("optimizer", "count"), [one for one in EACH if one not in HIDDEN])
def test_the_levels_that_occur_are_facts(optimizer, count):
    """After three epochs of batches of 32: every named level occurs, and none is missing."""
    domain, inputs, labels = patients(count, 1)
    model = models.mlp(
        input_shape=domain.shape, classes=2, hidden=(32,), generator=stream(0, "model")
    )
    before, after = trained_on(model, inputs, labels, optimizer)
    found = attack_update(
        load(after, before, kind="weights"),
        model,
        domain=domain,
        examples=count,
        attacks="touched_rows",
        search=0,
    )
    [record] = found.records
    assert record.verdict == "facts exposed"
    levels = [fact for fact in record.facts if fact.kind == "levels"]
    named = {(fact.subject, item) for fact in levels for item in fact.items}
    occur = {
        (column.name, column.names[level])
        for column, start, stop in domain.placed
        if column.categorical
        for level in (inputs[:, start:stop].sum(0) > 0).nonzero()[:, 0].tolist()
    }
    assert named == occur
    assert [fact.sensitive for fact in record.facts] == sorted(
        (fact.sensitive for fact in record.facts), reverse=True
    )


@pytest.mark.parametrize("tokens", [40, 256])
def test_a_set_of_tokens_is_claimed_only_by_a_test(tokens):
    """Before, "the set of tokens is found" ended every answer."""
    found = FoundTokens(tuple(range(tokens)), None, 0.5, False, "they explain half of it")
    rows, said = _filled(found, 4, 16)
    assert "found" not in said or "no set of tokens is found" in said
    assert "they explain half of it" in said
    assert rows.any() == (tokens <= 64)
    assert AdapterPursuit.__doc__


def test_impossible_sums_of_labels_are_not_printed():
    """Before, 64 labels of 0 and 1 had sums such as 167.8 and -107 after Adam."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 4))
    inputs, labels = torch.rand(64, 1, 6, 6), torch.randint(0, 2, (64, 4)).float()
    before = state(model)
    own = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(8):
        own.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(inputs), labels).backward()
        own.step()
    inferred = attack_update(
        load(state(model), before, kind="weights"),
        model,
        input_shape=(1, 6, 6),
        examples=64,
        learning_rate=0.05,
        steps=8,
        loss="bce",
        attacks="linear_inversion",
    ).inferred[0]
    [finding] = [one for one in inferred.findings if one.name == "labels"]
    assert "no possible sums of 64 labels" in finding.how
    assert "-" not in finding.how.split("sums")[-1]


def test_possible_sums_are_within_their_range():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 4))
    inputs, labels = torch.rand(64, 1, 6, 6), torch.zeros(64, 4)
    labels[:3, 0], labels[:, 3] = 1, 1
    before = state(model)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    nn.functional.binary_cross_entropy_with_logits(model(inputs), labels).backward()
    own.step()
    inferred = attack_update(
        load(state(model), before, kind="weights"),
        model,
        input_shape=(1, 6, 6),
        examples=64,
        learning_rate=0.1,
        steps=1,
        loss="bce",
        attacks="linear_inversion",
    ).inferred[0]
    [finding] = [one for one in inferred.findings if one.name == "labels"]
    sums = finding.how.partition("about ")[2].partition(", if")[0].split(", ")
    assert [float(v) for v in sums] == pytest.approx([3, 0, 0, 64], abs=3)
    assert all(0 <= float(v) <= 64 for v in sums)
    assert findings.TYPICAL < 0.1


def test_many_labels_are_counted_by_class():
    assert findings._grouped((0, 0, 3)) == "0, 0, 3"
    assert findings._grouped((0,) * 12 + (3,) * 20) == "20 of class 3, 12 of class 0"
    assert findings._grouped(tuple(range(40))).endswith("1 of class 15, ...")
