"""Facts that updates reveal: right, complete, none invented, with a verdict."""

from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from leakbound import Batch, data, models, simulate
from leakbound._util.results import Fact
from leakbound.assess.facts import confirmed, together, zero_values
from leakbound.assess.record import ATTRIBUTE, EXPOSED, FACTS, UNDECIDED, WORDS
from leakbound.assess.sentences import of_fact, ordered
from leakbound.assess.verdict import decide, of_configuration, verdict
from leakbound.attacks import ConstantImage
from leakbound.attacks.adaptive import SHARE, equal_sizes, not_sgd
from leakbound.core import Task
from leakbound.randomness import normal, stream
from leakbound.report.sentences import revealed_in_short

BLIND = ConstantImage(0.5)
OFF = {"error_bound": "none", "probability": None}


def fact(**changes):
    return Fact(**{"kind": "levels", "count": 1, "items": ("a",), "assumes": "b"} | changes)


def test_facts_have_a_verdict_of_their_own():
    assert decide(facts=[fact()]) == FACTS
    assert decide(facts=[fact(), fact(kind="words")]) == WORDS
    assert decide(exposed=True, facts=[fact()]) == EXPOSED
    assert verdict([], facts=[fact(level=0.02)]) == UNDECIDED
    assert verdict([], facts=[fact(level=0.01)]) == FACTS


def read(*items, places=None, level=0.01):
    places = tuple(range(len(items))) if places is None else places
    return fact(
        kind="attribute",
        subject="foreign_worker",
        items=items,
        examples=places,
        count=len(items),
        level=level,
    )


def test_an_attribute_is_exposed_if_it_is_read_and_right():
    assert decide(facts=[fact(kind="words"), read("yes")]) == ATTRIBUTE
    assert verdict([], facts=[read("yes", level=0.02)]) == UNDECIDED
    rows = data.load("german")
    truth = rows.batch(torch.arange(3))
    values = [row[-1] for row in rows.domain.rows(truth.inputs)]
    wrong = {"yes": "no", "no": "yes"}[values[1]]
    [kept] = confirmed([read(values[0], wrong)], truth, rows.domain)
    assert (kept.items, kept.examples, kept.count, kept.level) == ((values[0],), (0,), 1, 0.01)
    [guess] = confirmed([read(wrong, places=(1,))], truth, rows.domain)
    assert guess.level == 1.0
    assert verdict([], facts=[guess]) == UNDECIDED
    assert of_fact(read("yes", "no", places=(2, 0))).startswith(
        "foreign_worker is read: yes of example 3, no of example 1 (wrong with probability 0.01"
    )


@pytest.fixture(scope="module")
def one():
    """The record of an attack that states nothing."""
    digits = data.load("mnist5k")
    return simulate(
        nn.Sequential(nn.Flatten(), nn.Linear(784, 10)),
        digits.batch(torch.tensor([0])),
        attack=BLIND,
        **OFF,
    ).assessment


def test_many_experiments_are_many_tries(one):
    def run(level, **more):
        return replace(one, verdict=ATTRIBUTE, facts=(read("yes", level=level),), **more)

    def missed():
        return replace(one, verdict=UNDECIDED, facts=(read("yes", level=0.6),))

    assert of_configuration([run(0.005), missed()]) == ATTRIBUTE
    assert of_configuration([run(0.01), missed(), missed()]) == UNDECIDED
    assert of_configuration([run(0.01), run(0.01), run(0.01)]) == ATTRIBUTE


def test_one_list_of_words_of_many_is_chance(one):
    silent = replace(one, verdict=UNDECIDED)

    def named(level, **more):
        return replace(silent, verdict=WORDS, facts=(fact(kind="words", level=level),), **more)

    assert of_configuration([named(0.01)]) == WORDS  # exactly the level, on every machine
    assert of_configuration([named(0.01), silent]) == UNDECIDED
    assert of_configuration([named(0.01), named(0.01), *[silent] * 8]) == WORDS
    assert of_configuration([named(0.01), named(0.01), *[silent] * 30]) == UNDECIDED
    assert of_configuration([named(1e-6), *[silent] * 30]) == WORDS
    assert of_configuration([named(None), *[silent] * 30]) == WORDS
    other = replace(silent, attack=replace(silent.attack, hash="0" * 12))
    assert of_configuration([named(0.01), other]) == UNDECIDED
    apart = replace(silent, attack=replace(silent.attack, name="token_rows", hash="0" * 12))
    assert of_configuration([named(0.01), apart]) == WORDS


def test_sensitive_and_rare_ones_come_first():
    rows = data.load("german")
    column = next(c for c in rows.domain.columns if c.name == "foreign_worker")
    levels = column.names
    public = Batch(rows.inputs, rows.labels)
    often = rows.domain.frequencies(public.inputs)
    rare = min(levels, key=lambda level: often[column.name, level])
    found = together(
        [
            fact(kind="zero values", subject=""),
            fact(subject="purpose"),
            fact(subject=column.name, items=levels, count=2, sensitive=True),
            fact(subject="purpose"),
        ],
        rows.domain,
        public,
    )
    assert [one.subject for one in found] == [column.name, "purpose", ""]
    assert found[0].items[0] == rare


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("seed", range(3))
def test_zero_values_are_those_of_all_images(size, seed):
    digits = data.load("mnist5k")
    at = torch.arange(size) * 311 + seed
    batch = Batch(digits.inputs[at], digits.labels[at])
    model = models.mlp(
        input_shape=(1, 28, 28), classes=10, hidden=(64,), generator=stream(seed, "model")
    )
    run = simulate(model, batch, attack=BLIND, **OFF)
    [own] = run.assessment.facts
    dark = (batch.inputs.flatten(1) == 0).all(0)
    assert own.count == int(dark.sum())
    named = {tuple(map(int, item.split(", "))) for item in own.items}
    assert all(dark.reshape(1, 28, 28)[place] for place in named)
    assert run.verdict == FACTS


def test_what_public_images_never_show_is_no_news():
    digits = data.load("mnist5k")
    batch, public = Batch(digits.inputs[:4], digits.labels[:4]), digits.inputs[100:1100]
    model = models.mlp(
        input_shape=(1, 28, 28), classes=10, hidden=(64,), generator=stream(0, "model")
    )
    given = Batch(public, digits.labels[100:1100])
    run = simulate(model, batch, attack=BLIND, public=given, **OFF)
    varies = (run.round.observation.auxiliary.inputs.flatten(1) != 0).any(0)
    dark = (batch.inputs.flatten(1) == 0).all(0)
    assert run.assessment.facts[0].count == int((dark & varies).sum()) < int(dark.sum())


@pytest.mark.parametrize(
    "defense", ["gaussian_noise,noise_std=1e-6", "dp_sgd", "magnitude_pruning,rate=0.5"]
)
def test_no_value_is_named_where_noise_or_a_mask_covers_it(defense):
    digits = data.load("mnist5k")
    batch = Batch(digits.inputs[:4], digits.labels[:4])
    model = models.mlp(
        input_shape=(1, 28, 28), classes=10, hidden=(64,), generator=stream(0, "model")
    )
    run = simulate(model, batch, attack=BLIND, defense=defense, **OFF)
    assert zero_values(run.round.observation) is None
    assert run.assessment.facts == ()


def test_pruned_weights_prove_nothing():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        model[1].weight[:, :5] = 0
    batch = Batch(torch.rand(2, 1, 4, 4), torch.tensor([0, 1]))
    run = simulate(model, batch, attack=BLIND, **OFF)
    update = run.round.observation.update
    cut = update.rows.clone()
    cut[:, : 16 * 8].view(8, 16)[:, :5] = 0  # a client that sends nothing for pruned weights
    seen = torch_replace(run.round.observation, cut)
    assert zero_values(seen) is None


def torch_replace(observation, rows):
    from dataclasses import replace

    return replace(observation, update=replace(observation.update, rows=rows))


def updates(optimizer, steps, seed, decay=0.0):
    """The change of an MLP's weights by torch's own optimizer, over its rate."""
    source = stream(seed, "optimizer")
    model = models.mlp(input_shape=(1, 8, 8), classes=5, hidden=(64, 32), generator=source)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    own = optimizer(model.parameters(), lr=1e-3, weight_decay=decay)
    inputs = normal((8 * steps, 1, 8, 8), source)
    labels = torch.arange(8 * steps) % 5
    for step in range(steps):
        part = slice(8 * step, 8 * step + 8)
        own.zero_grad()
        nn.functional.cross_entropy(model(inputs[part]), labels[part]).backward()
        own.step()
    after = nn.utils.parameters_to_vector(model.parameters()).detach()
    return Task.of(model), (before - after) / 1e-3


@pytest.mark.parametrize("steps", [1, 5])
def test_sgd_is_never_called_another_optimizer(steps):
    for seed in range(25):
        for decay in (0.0, 0.01):
            task, row = updates(torch.optim.SGD, steps, seed, decay)
            assert equal_sizes(task, row) < SHARE / 2


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_a_step_of_adam_is_seen(optimizer):
    for seed in range(25):
        task, row = updates(optimizer, 1, seed)
        assert equal_sizes(task, row) > 0.9


def test_an_update_by_signs_is_no_sum_of_gradients():
    digits = data.load("digits")
    batch = Batch(digits.inputs[:4], digits.labels[:4])
    model = models.mlp(input_shape=(1, 8, 8), classes=10, hidden=(32,), generator=stream(0))
    plain, signs = (
        simulate(model, batch, attack=BLIND, defense=name, **OFF).round.observation
        for name in ("none", "sign")
    )
    assert not_sgd(plain) is None
    assert "have the same size" in not_sgd(signs)


def test_sentences():
    assert of_fact(fact(kind="words", items=("fever",), level=1e-3)).startswith(
        "the word fever occurs (wrong with probability"
    )
    norms = fact(kind="batch statistics", count=32, items=("1", "4", "7"))
    assert of_fact(norms, shown=2).startswith(
        "mean and variance of 32 channels over the batch, in layers: 1, 4 and 1 more (certain"
    )
    many = fact(kind="zero values", count=1200, items=("0, 0, 0",))
    assert of_fact(many) == "1,200 values are 0 in every example (certain, if b)"
    update = SimpleNamespace(facts=(many, fact(kind="words", count=3, level=0.01)))
    assert revealed_in_short([update]) == (
        "Updates reveal for certain 1 set of values that are 0. Updates reveal 3 words; what one "
        "of them reveals is wrong with probability 0.01 at most."
    )


def test_pages_and_terminals_list_what_matters_most_first():
    """Attacks found facts in another order: classes by the first, levels by the second."""
    found = [
        Fact(kind="classes", items=("0",), count=1, assumes="it is SGD"),
        Fact(kind="levels", subject="city", items=("Bern",), count=1, assumes="it is SGD"),
        Fact(kind="classes", subject="hiv", items=("1",), count=1, assumes="", sensitive=True),
    ]
    assert [(fact.kind, fact.subject) for fact in ordered(found)] == [
        ("classes", "hiv"),
        ("levels", "city"),
        ("classes", ""),
    ]
