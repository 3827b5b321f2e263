"""Defenses as Flower mods: the same updates as the library's own client, bit for bit."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy import stats

from leakbound import registry
from leakbound.client import local_update
from leakbound.core import Batch, ClientContext, Unit, Update
from leakbound.defenses import (
    Clip,
    ClipCoordinates,
    ClipExamples,
    CorrelatedNoise,
    DpSgd,
    GaussianMechanism,
    GaussianNoise,
    Mean,
    NoisyCopy,
    SecureAggregation,
    WhitenedDpSgd,
    Withhold,
    chain,
)
from leakbound.flower import DefenseMod, InProcessGrid, Setup, run
from leakbound.flower.mods import computes_anew
from leakbound.protocol import resolve, step
from leakbound.randomness import stream

GIVEN = {
    "clip": Clip(0.1),
    "clip_coordinates": ClipCoordinates(0.01),
    "clip_examples": chain(ClipExamples(1.0), Mean()),
    "color": WhitenedDpSgd(),
    "correlated_noise": chain(ClipExamples(1.0), Mean(), CorrelatedNoise(0.7, "bisr:3")),
    "gaussian_mechanism": chain(ClipExamples(1.0), Mean(), GaussianMechanism(0.7)),
    "whiten": WhitenedDpSgd(correlation="low_rank", rank=2),
}
NAMES = [name for name in registry.entries("defense") if name not in ("none", "secure_aggregation")]


def build(name):
    return chain(GIVEN[name] if name in GIVEN else registry.build("defense", name, {}))


def expected(defense, setup, batch, user, seed=3, round=1, state=None):
    """The weights by the library: of its own client, or of its defense on the user's training."""
    task = setup.task(setup.state(), {"lr": 0.5})
    ready, source = resolve(defense, task, batch.size), stream(seed, "flower", "0", str(round), 0)
    if computes_anew(defense):
        update, state = step(task, batch, ready, source, state)
        plan = ready.prepare(task, stream(0)).plan
        return task.parameters - plan.learning_rate * update.rows[0], state
    own, state = ready.begin(task, state or ready.init(task), source)
    assert torch.equal(own.parameters, task.parameters)  # in a first round
    rows = ((task.parameters - user) / 0.5)[None]
    update = Update(rows, Unit.CLIENT, (batch.size,))
    update, state = ready.transform(update, state, ClientContext(own, batch), source)
    return task.parameters - 0.5 * update.rows[0], state


@pytest.mark.parametrize("name", NAMES)
def test_a_defense_gives_the_librarys_weights_bit_for_bit(name, flower, setup, batches):
    defense = build(name)
    batch = Batch(*batches(0, 1)[0])
    plain = flower.ask(flower.client_app(batches=batches))
    user = flower.weights(plain.content["arrays"])
    reply = flower.ask(flower.client_app([DefenseMod(defense, setup, seed=3)], batches=batches))
    assert not reply.has_error(), reply.error.reason
    found = flower.weights(reply.content["arrays"])
    assert torch.equal(found, expected(defense, setup, batch, user)[0])
    assert not torch.equal(found, user) or name in {"withhold", "pri_prune"}
    assert list(reply.content["arrays"]) == list(flower.Net().state_dict())


READING = {"soteria", "local_optimal_noise", "local_optimal_pruning", "optimal_dp_sgd"}
ANEW = {"mixup", "hidden_dropout", "local_aggregation", "noisy_copy"}
ONE_STEP = {
    *("clip_examples", "mean", "gaussian_mechanism", "whiten", "color"),
    *("dp_sgd", "whitened_dp_sgd", "correlated_noise"),
}
"""All others edit the update of any training."""


@pytest.mark.parametrize("name", NAMES)
def test_which_defenses_work_around_a_training_of_several_steps(name, flower, setup, batches):
    """What the table of docs/flower.md says."""
    planned = replace(setup, steps=5, batch_size=flower.SIZE)

    def works(shown, setup):
        mods = [DefenseMod(build(name), setup, seed=3)]
        app = flower.client_app(mods, batches=batches, steps=5, shown=shown)
        return not flower.ask(app).has_error()

    special = READING | ANEW | ONE_STEP
    assert works(False, setup) == (name not in special)
    assert works(True, setup) == (name not in special)
    assert works(True, planned) == (name not in ONE_STEP)


def test_the_table_of_the_docs_has_every_defense():
    page = (Path(__file__).parents[2] / "docs" / "flower.md").read_text("utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    links = {registry.snake(word) for row in rows for word in re.findall(r"`(\w+)`", row)}
    after = {"clip_examples", "mean", "gaussian_mechanism", "whiten", "color"}
    assert {*NAMES} - after <= links
    where = {
        registry.snake(word): number
        for number, row in enumerate(rows)
        for word in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    for number, names in ((2, READING), (3, ANEW), (4, ONE_STEP - after)):
        assert {where[name] for name in names} == {number}


def test_the_users_training_is_the_librarys_up_to_rounding_of_the_weights(flower, setup, batches):
    task = setup.task(setup.state(), {"lr": 0.5})
    reply = flower.ask(flower.client_app(batches=batches))
    row = (task.parameters - flower.weights(reply.content["arrays"])) / 0.5
    ours = local_update(task, *batches(0, 1)[0])
    slack = 2**-23 * (task.parameters.abs() / 0.5 + ours.abs()) + 1e-7
    assert bool(((row - ours).abs() <= slack).all())
    assert float(ours.norm()) > 0.1


def noise(flower, setup, batches, **given):
    """What the mod added to the client's row, in gradient units."""
    plain = flower.weights(flower.ask(flower.client_app(batches=batches)).content["arrays"])
    mod = DefenseMod(GaussianNoise(0.1), setup, **given)
    replies = [flower.ask(flower.client_app([mod], batches=batches)) for _ in range(6)]
    found = [flower.weights(reply.content["arrays"]) for reply in replies]
    return torch.stack([(plain - one) / flower.RATE for one in found]).double()


def test_the_noise_of_a_release_has_the_declared_law(flower, setup, batches):
    drawn = noise(flower, setup, batches)
    z = (drawn / 0.1).flatten().numpy()
    assert len(z) == 6 * 910
    assert stats.kstest(z, "norm").pvalue > 1e-6
    assert stats.kstest(z * 1.3, "norm").pvalue < 1e-6  # a wrong level
    for scale, holds in ((1, True), (0.88, False), (1.12, False)):
        assert (abs((scale * z).var() - 1) < 5.5 * (2 / len(z)) ** 0.5) == holds
    assert stats.kstest(z, stats.laplace(scale=2**-0.5).cdf).pvalue < 1e-6  # a wrong kind
    together = torch.corrcoef(drawn)  # of replies, each with its own noise
    assert float((together - torch.eye(6)).abs().max()) < 5 / 910**0.5
    by_layer = [part.std() for part in drawn.split([768, 12, 120, 10], dim=1)]
    assert all(0.06 < float(std) < 0.14 for std in by_layer)


def test_a_release_cannot_be_replayed_and_a_seeded_one_is_marked(flower, setup, batches):
    drawn = noise(flower, setup, batches)
    assert not torch.equal(drawn[0], drawn[1])
    seeded = noise(flower, setup, batches, seed=1)
    assert torch.equal(seeded[0], seeded[1])
    assert not torch.equal(seeded[0], noise(flower, setup, batches, seed=2)[0])
    for seed, marked in ((None, False), (1, True)):
        mod = DefenseMod(GaussianNoise(0.1), setup, seed=seed)
        metrics = flower.ask(flower.client_app([mod], batches=batches)).content["metrics"]
        assert ("leakbound-experiment-only" in metrics) == marked
        assert metrics["num-examples"] == flower.SIZE


def test_a_seed_names_clients_rounds_and_places(flower, setup, batches):
    mod = DefenseMod(GaussianNoise(0.1), setup, seed=1)
    app = flower.client_app([mod, mod], batches=lambda who, round: batches(0, 0))
    grid = InProcessGrid(app, 2)
    plain = flower.ask(flower.client_app(batches=batches)).content["arrays"]
    seen = []
    for node, round in ((2, 1), (3, 1), (2, 2)):
        reply = flower.ask(app, flower.message(grid, node=node, round=round), grid=grid)
        seen.append(flower.weights(reply.content["arrays"]) - flower.weights(plain))
    once = noise(flower, setup, batches, seed=1)[0]
    for i, one in enumerate(seen):
        for other in seen[:i]:
            assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.2
    both = seen[0] / -flower.RATE
    assert abs(float(torch.corrcoef(torch.stack([both - once, once]).float())[0, 1])) < 0.2


def test_the_mark_is_shown_after_averaging(flower, setup, batches):
    results = []
    app = flower.client_app([DefenseMod(GaussianNoise(0.1), setup, seed=1)], batches=batches)
    run(flower.server_app(into=results), app, 2)
    assert results[0].train_metrics_clientapp[1]["leakbound-experiment-only"] == 1


@pytest.mark.parametrize("level", ["app", "train"])
def test_other_messages_pass_untouched(level, flower, setup, batches):
    mod = DefenseMod(Withhold(rate=0.5), setup, seed=1)
    app = flower.client_app([mod], batches=batches, level=level)
    plain = flower.ask(flower.client_app(batches=batches), kind="evaluate")
    reply = flower.ask(app, kind="evaluate")
    assert reply.content["metrics"] == plain.content["metrics"]
    assert flower.ask(app).content["metrics"]["leakbound-experiment-only"] == 1


def test_three_lines_defend_a_whole_run(flower, batches):
    app = flower.client_app([DefenseMod(DpSgd(1.0, 1.1), Setup(flower.Net))], batches=batches)
    results = []
    grid = run(flower.server_app(2, into=results), app, 3)
    assert list(results[0].train_metrics_clientapp) == [1, 2]
    assert all(not context.state for context in grid.contexts.values())  # nothing is kept


def test_running_statistics_are_sent_back_as_they_came(flower, setup, batches):
    class Normed(flower.Net):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(12)

        def forward(self, inputs):
            return self.last(torch.tanh(self.norm(self.first(inputs.flatten(1)))))

    app = flower.client_app(batches=batches, model=Normed)
    plain = flower.ask(app, model=Normed).content["arrays"].to_torch_state_dict()
    assert bool((plain["norm.running_mean"] != 0).any())
    for defense in (GaussianNoise(0.01), NoisyCopy(0.1)):
        mod = DefenseMod(defense, Setup(Normed))
        app = flower.client_app([mod], batches=batches, model=Normed)
        kept = flower.ask(app, model=Normed).content["arrays"].to_torch_state_dict()
        assert list(kept) == list(plain)
        for name, value in Normed().state_dict().items():
            same = torch.equal(kept[name], value)
            assert same == ("running" in name or "tracked" in name), name


def test_dropout_is_left_out_of_what_a_mod_computes(flower, batches):
    class Dropped(flower.Net):
        def __init__(self):
            super().__init__()
            self.drop = torch.nn.Dropout(0.5)

        def forward(self, inputs):
            return self.last(self.drop(torch.tanh(self.first(inputs.flatten(1)))))

    torch.manual_seed(0)
    expects = torch.rand(1)
    torch.manual_seed(0)
    setup = Setup(Dropped)
    with_dropout, without = setup.task(setup.state(), {"lr": 0.5}), Setup(flower.Net)
    assert torch.equal(torch.rand(1), expects)  # making models has not moved the generator
    plain = without.task(without.state(), {"lr": 0.5})
    x, y = batches(0, 1)[0]
    assert torch.equal(local_update(with_dropout, x, y), local_update(plain, x, y))


@pytest.mark.parametrize("cut", [None, 4])
def test_several_tapped_steps_are_the_plans(cut, flower, batches, digits):
    public = Batch(digits.inputs[1000:1064], digits.labels[1000:1064])
    setup = Setup(flower.Net, steps=3, batch_size=cut, public=public)
    app = flower.client_app([DefenseMod(NoisyCopy(0.1), setup, seed=3)], batches=batches, steps=3)
    reply = flower.ask(app)
    if cut is None:
        assert "other batches than the Setup says (steps=3, " in reply.error.reason
        return
    found = flower.weights(reply.content["arrays"])
    parts = batches(0, 1)[:3]
    whole = Batch(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
    assert torch.equal(found, expected(chain(NoisyCopy(0.1)), setup, whole, None)[0])


def test_a_mod_is_refused_where_it_is_built(setup):
    for defense, words in (
        (SecureAggregation(4), "runs on the updates of all clients"),
        (chain(GaussianNoise(0.1), SecureAggregation(2)), "runs on the updates of all clients"),
        (ClipExamples(1.0), "put Mean\\(\\) after it"),
    ):
        with pytest.raises(ValueError, match=words):
            DefenseMod(defense, setup)
    for given, words in (
        ({"model": torch.nn.Linear(2, 2)}, "give what makes a model"),
        ({"model": torch.nn.Flatten, "learning_rate": 0}, "learning_rate is 0"),
        ({"model": torch.nn.Flatten, "steps": 0}, "steps is 0"),
        ({"model": torch.nn.Flatten, "batch_size": 0}, "batch_size is 0"),
    ):
        with pytest.raises(ValueError, match=words):
            Setup(**given)
