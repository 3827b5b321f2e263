"""Audits of small programs: seeded bugs, correct variants, and the level of the bounds."""

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from leakbound.audit_epsilon import (
    Claims,
    audit_many_runs,
    audit_one_run,
    of_flower,
    of_training,
    runs,
)
from leakbound.bounds import conversions
from leakbound.core import Batch, Task
from leakbound.domains import TokenDomain
from leakbound.models import decoder
from leakbound.randomness import normal, stream, uniform

from .dp_client import BUGS, DpClient

TRIALS = 400
ALLOWED = int(stats.binom.ppf(0.975, TRIALS, 0.05))
"""So often may so many trials of a limit of 95 % confidence be wrong."""
AUDITS = 200
SAMPLED = {"rate": 0.25, "noise": 0.8}
CORRECT = [
    {},
    {"noise": 0.5},
    {"clip": 0.1},
    {"learning_rate": 2.0},
    {"lot": 3},
    {"steps": 4, "noise": 2.0},
    {"steps": 3, "momentum": 0.9},
    {"layers": True, "noise": 0.7, "clip": 2.0},
    {"normalize": True, "steps": 2},
    {"extra": 0.05},
    {"rate": 0.25, "noise": 0.8},
    {"rate": 0.1, "noise": 0.6, "steps": 2},
]
MORE_CORRECT = [
    {"noise": 2.0},
    {"clip": 5.0},
    {"steps": 2},
    {"layers": True},
    {"normalize": True},
    {"rate": 0.5},
    {"rate": 0.5, "steps": 3},
    {"noise": 0.7, "momentum": 0.5, "clip": 0.3},
]
"""Other values, or one alone of the settings above."""


def setting(scale=3.0, seed=0):
    """A small model with large weights, as the command has it; the client's other examples."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    source = stream(seed, "small")
    with torch.no_grad():
        for layer in (model[1], model[3]):
            for parameter in layer.parameters():
                bound = scale / math.sqrt(layer.in_features)
                parameter.copy_(bound * (2 * uniform(parameter.shape, source) - 1))
    base = Batch(uniform((7, 1, 4, 4), source), torch.arange(7) % 4)
    return model, base, Task.of(model, classes=4)


def audited(seed=0, count=300, claims=None, **changes):
    model, base, task = setting(seed=seed)
    client = DpClient(model, **changes)
    own = Claims(noise_multiplier=client.noise, sampling_rate=client.rate, steps=client.steps)
    return audit_many_runs(
        client, dict(model.state_dict()), base, task, claims or own, runs=count, seed=seed
    )


SETTINGS = {"no Poisson sampling": SAMPLED, "clip after averaging": {"count": 500}}
"""What a bug needs to be caught."""


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_that_no_accountant_sees_is_caught(bug):
    found = audited(bug=bug, **SETTINGS.get(bug, {}))
    assert found.code == 1
    assert found.sentence.startswith("the program leaks more than it claims")


@pytest.mark.parametrize(
    "changes",
    [*CORRECT, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE_CORRECT)],
    ids=str,
)
def test_a_correct_client_is_not_accused(changes):
    assert audited(**changes).code != 1


def tiny():
    """A model of four weights, one example, and what both need."""
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.3, -0.2], [0.1, 0.4]]))
    base = Batch(torch.tensor([[0.2, 0.7], [0.6, 0.1]]), torch.tensor([0, 1]))
    return dict(model.state_dict()), base, Task.of(model, classes=2)


@dataclass(frozen=True)
class Shown:
    """Sends whether there are three examples: under noise, or by randomized response."""

    noise: float = 0.0
    epsilon: float | None = None

    def __call__(self, weights, batch, seed):
        draws = torch.Generator().manual_seed(seed)
        held = float(batch.size == 3)
        if self.epsilon is not None:
            right = torch.rand((), generator=draws) < torch.tensor(self.epsilon).sigmoid()
            return held if right else 1 - held
        return held + self.noise * torch.randn((), generator=draws)


def above(true, claims, draws, trials=TRIALS, n=200):
    """How often each limit is above the true epsilon; draws gives scores with and without."""
    level, count = 1 - 0.05 / 4, [0, 0]
    for _ in range(trials):
        chosen, counted = (np.stack([draws(0, m), draws(1, m)])[..., None] for m in (n // 2, n))
        for place, (_, _, merit, epsilon) in enumerate(runs._tests(claims)):
            count[place] += epsilon(*runs._event(merit, chosen, counted, level)) > true
    return count


def test_the_limits_keep_their_level_for_gaussian_noise():
    source, claims = np.random.default_rng(5), Claims(delta=0.01, noise_multiplier=1.0)

    def draws(held, n, noise=1.0):
        return held + noise * source.standard_normal(n)

    assert max(above(claims.bounded, claims, draws)) <= ALLOWED
    assert above(claims.bounded, claims, lambda *a: draws(*a, noise=0.4), 50)[1] == 50


def test_clopper_pearson_keeps_its_level_for_randomized_response():
    source, claims = np.random.default_rng(6), Claims(delta=1e-5)

    def draws(held, n, epsilon=0.5):
        return np.abs(held - (source.random(n) > 1 / (1 + math.exp(-epsilon))))

    assert above(0.5, claims, draws)[0] <= ALLOWED
    assert above(0.5, claims, lambda *a: draws(*a, epsilon=3.0), 50)[0] == 50


SEVERAL = {
    "rounds": Claims(delta=1e-3, noise_multiplier=8.0, rounds=64),
    "sampled rounds": Claims(delta=1e-3, noise_multiplier=0.8, sampling_rate=0.5, rounds=4),
    "sampled steps": Claims(delta=1e-3, noise_multiplier=0.6, sampling_rate=0.2, steps=3, rounds=2),
    "replaced": Claims(delta=1e-3, noise_multiplier=4.0, rounds=4, replace=True),
    "sampled and replaced": Claims(
        delta=1e-3, noise_multiplier=1.5, sampling_rate=0.5, steps=2, rounds=2, replace=True
    ),
}


def by_dp_accounting(claims):
    """The epsilon of all rounds, rounded down."""
    accounting = pytest.importorskip("dp_accounting")
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    neighbors = "REPLACE_ONE" if claims.replace else "ADD_OR_REMOVE_ONE"
    one = pld.from_gaussian_mechanism(
        claims.noise_multiplier,
        sampling_prob=claims.sampling_rate,
        pessimistic_estimate=False,
        use_connect_dots=False,
        neighboring_relation=accounting.NeighboringRelation[neighbors],
    )
    return one.self_compose(claims.steps * claims.rounds).get_epsilon_for_delta(claims.delta)


@pytest.mark.parametrize("trials", [100, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SEVERAL)
def test_the_limits_keep_their_level_over_several_rounds(name, trials):
    """The canary's coordinate of all updates, summed: of the worst program that is correct."""
    source, claims = np.random.default_rng(8), SEVERAL[name]
    count = claims.steps * claims.rounds
    true = by_dp_accounting(claims)
    assert true <= claims.bounded <= true + 0.05

    def draws(held, n, noise=claims.noise_multiplier):
        moved = source.binomial(count, claims.sampling_rate, n)
        sign = 2 * held - 1 if claims.replace else held
        return sign * moved + noise * count**0.5 * source.standard_normal(n)

    assert sum(above(true, claims, draws, trials)) <= stats.binom.ppf(0.975, trials, 0.05)
    half, weak = claims.noise_multiplier / 2, trials // 8
    found = above(claims.bounded, claims, lambda *a: draws(*a, half), weak, 500)
    assert found[1] >= 0.9 * weak


def test_several_rounds_show_what_one_round_hides():
    claims, how = Claims(noise_multiplier=6.0), {"noise": 6.0, "bug": "half the noise"}
    assert audited(count=300, claims=claims, **how).code != 1
    assert audited(count=300, claims=replace(claims, rounds=9), **how).code == 1


@pytest.mark.parametrize(
    "claims",
    [
        Claims(noise_multiplier=2.0, rounds=4),
        Claims(noise_multiplier=1.0, sampling_rate=0.5, rounds=3),
        Claims(noise_multiplier=1.0, sampling_rate=0.5, steps=2, rounds=2, replace=True),
        Claims(noise_multiplier=2.0, rounds=2, replace=True),
    ],
    ids=str,
)
def test_a_correct_client_of_several_rounds_is_not_accused(claims):
    changes = {"rate": claims.sampling_rate, "steps": claims.steps}
    found = audited(0, 200, claims, noise=claims.noise_multiplier, **changes)
    assert found.code != 1, found.sentence


def test_a_run_is_all_rounds_and_no_audit_is_above_the_truth():
    """Whole audits of a client that shows its canary as clearly as it may."""
    claims, calls = Claims(delta=0.01, noise_multiplier=2.0, rounds=2), []
    true, private = by_dp_accounting(claims), Shown(noise=2.0)

    def client(weights, batch, seed):
        calls.append(seed)
        return private(weights, batch, seed)

    given, wrong = tiny(), 0
    for seed in range(AUDITS):
        found = audit_many_runs(client, *given, claims, runs=40, seed=seed)
        wrong += found.best.epsilon > true
    assert (found.runs, len(calls)) == (81, AUDITS * 81 * 2)
    assert len(set(calls)) > 0.99 * len(calls)  # new noise in every round
    assert wrong <= stats.binom.ppf(0.975, AUDITS, 0.05)


def test_no_audit_of_text_is_above_the_truth():
    """Whole audits of a client that sends the words of its texts, clipped and with noise."""
    claims = Claims(delta=0.01, noise_multiplier=1.0)
    model, base, task = texts("classifier")
    true, wrong = by_dp_accounting(claims), [0, 0]

    def client(weights, batch, seed, noise=1.0):
        words = nn.functional.one_hot(batch.inputs, 30).sum(1).double()
        sent = nn.functional.normalize(words).sum(0)
        return sent + noise * torch.randn(30, generator=torch.Generator().manual_seed(seed))

    given = dict(model.state_dict()), base, task, claims
    for seed in range(AUDITS):
        found = audit_many_runs(client, *given, runs=40, seed=seed)
        wrong[0] += found.best.epsilon > true
        wrong[1] += found.code == 1
    assert max(wrong) <= stats.binom.ppf(0.975, AUDITS, 0.05)
    assert audit_many_runs(partial(client, noise=0.4), *given, runs=300).code == 1


def test_rounds_that_differ_are_named():
    def client(weights, batch, seed):
        return torch.ones(1 + seed % 7)

    with pytest.raises(ValueError, match="its rounds send different tensors"):
        audit_many_runs(client, *tiny(), Claims(rounds=9), runs=40)


class Words(nn.Module):
    """A classifier of sequences of tokens."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(30, 8), nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(self.words(tokens).mean(1).tanh())


def texts(kind, seed=0):
    """A model of tokens with large weights, other examples, and its task."""
    source, domain = stream(seed, "texts"), TokenDomain(30, 6, padding=0)
    inputs = 1 + (29 * uniform((6, 6), source)).long()
    if kind == "decoder":
        model = decoder(input_shape=(6,), classes=30, generator=source, layers=1, width=8, heads=2)
        loss, labels = "next_token", inputs
    else:
        torch.manual_seed(seed)
        model, loss, labels = Words(), "cross_entropy", torch.arange(6) % 3
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    task = Task.of(model.eval(), loss=loss, classes=30 if labels is inputs else 3, domain=domain)
    return model, Batch(inputs, labels), task


@pytest.mark.parametrize("kind", ["decoder", "classifier"])
@pytest.mark.parametrize(("bug", "code"), [("half the noise", 1), ("", 0)])
def test_a_client_of_text(kind, bug, code):
    model, base, task = texts(kind)
    client = DpClient(model, bug=bug, loss=task.loss)
    claims = Claims(noise_multiplier=1.0)
    found = audit_many_runs(client, dict(model.state_dict()), base, task, claims, runs=300)
    assert found.code == code, found.sentence


@pytest.mark.parametrize("kind", ["decoder", "classifier"])
def test_canaries_of_text_are_tokens(kind):
    model, base, task = texts(kind)
    planted = runs._extremes(task, base, 500, stream(3, "text"))
    assert planted.dtype == torch.int64
    assert (int(planted.min()), int(planted.max())) == (0, 29)
    canary, other = runs._canary_pair(task, base, stream(4, "text"))
    for own in (canary, other):
        assert own.inputs.dtype == torch.int64
        assert bool((own.inputs > 0).any())  # not only padding
        if kind == "decoder":
            scored = own.inputs != 0
            assert torch.equal(own.labels[scored], own.inputs[scored])
            assert bool((own.labels[~scored] == -100).all())
    found = audit_one_run(
        DpClient(model, noise=0.05, loss=task.loss),
        *(dict(model.state_dict()), base, task, Claims(noise_multiplier=0.05)),
        canaries=64,
    )
    assert found.best.epsilon > 1


def test_a_canary_that_is_given_is_taken():
    model, base, task = texts("classifier")
    canary, seen = Batch(base.inputs[:1], base.labels[:1]), []  # none that stands out

    def client(weights, batch, seed):
        if batch.size == 7:
            seen.append((batch.inputs[-1].tolist(), int(batch.labels[-1])))
        return batch.inputs.sum()

    given = client, dict(model.state_dict()), base, task, Claims()
    audit_many_runs(*given, runs=40, canary=canary)
    assert set(map(str, seen)) == {str((base.inputs[0].tolist(), 0))}
    with pytest.raises(ValueError, match="canary holds 6 examples"):
        audit_many_runs(*given, runs=40, canary=base)


def test_only_the_second_half_of_the_runs_counts():
    """A client that shows the canary in the first half of its calls alone."""
    calls = []

    def client(weights, batch, seed):
        calls.append(batch.size)
        draws = torch.Generator().manual_seed(seed)
        return batch.size * (len(calls) <= 101) + torch.randn((), generator=draws) / 9

    found = audit_many_runs(client, *tiny(), Claims(), runs=100)
    assert (len(calls), found.best.epsilon) == (201, 0.0)
    assert audit_many_runs(Shown(noise=1 / 9), *tiny(), Claims(), runs=100).best.epsilon > 3


def test_a_canary_that_always_shows_gives_the_limits_of_the_confidence():
    found = audit_many_runs(Shown(noise=0.0), *tiny(), Claims(), runs=100, confidence=0.9)
    limit = stats.beta.ppf(1 - 0.1 / 4, 1, 50)  # 0 of the 50 that count; four limits together
    assert found.lower[0].epsilon == pytest.approx(math.log((1 - limit - 1e-5) / limit), rel=1e-9)
    mu = -2 * stats.norm.ppf(limit)
    assert found.lower[1].epsilon == pytest.approx(
        conversions.epsilon(1 / mu, delta=1e-5), rel=0.01
    )
    assert found.power == max(one.epsilon for one in found.lower)


def test_canaries_that_always_show_give_the_limit_of_one_run():
    model, base, task = setting()
    client, claims = DpClient(model, noise=0.0), Claims(delta=1e-15, noise_multiplier=1e-4)
    found = audit_one_run(client, dict(model.state_dict()), base, task, claims, canaries=32)
    right = (0.05 / 8) ** (1 / 16)  # 16 of 16 guesses, 8 ways to guess
    assert found.best.epsilon <= math.log(right / (1 - right)) + 1e-6
    assert found.power == pytest.approx(math.log(right / (1 - right)), rel=1e-6)


def test_the_gaussian_limit_is_wrong_for_what_is_not_gaussian():
    """Randomized response is 2-private; noise that explains its rates would not be."""
    found = audit_many_runs(Shown(epsilon=2.0), *tiny(), Claims(declared=2.0), runs=400)
    sure, gaussian = found.lower
    assert sure.epsilon <= 2.0 < gaussian.epsilon
    assert "nothing" in sure.assumes
    assert "Gaussian" in gaussian.assumes


def test_a_larger_delta_gives_a_smaller_limit():
    small, large = (
        audit_many_runs(Shown(epsilon=2.0), *tiny(), Claims(delta=d), runs=200).lower[0].epsilon
        for d in (1e-5, 0.3)
    )
    assert 0 < large < small


def test_what_the_exit_code_says():
    claims = Claims(noise_multiplier=1.0)
    assert audit_many_runs(Shown(noise=1.0), *tiny(), claims, runs=300).code == 0
    blind = audit_many_runs(lambda *_: 1.0, *tiny(), claims, runs=40)
    assert (blind.code, blind.best.epsilon) == (2, 0.0)
    assert "not seen" in blind.sentence
    assert audit_many_runs(Shown(noise=1.0), *tiny(), Claims(), runs=80).code == 2
    weak = audit_many_runs(Shown(noise=0.3), *tiny(), Claims(declared=30.0), runs=80)
    assert weak.code == 2
    assert "so many runs show" in weak.sentence
    told = audit_many_runs(Shown(noise=0.1), *tiny(), Claims(declared=1.0), runs=80)
    assert told.code == 1
    assert told.best.assumes in told.sentence


def test_a_replaced_example_counts_twice():
    claims = Claims(noise_multiplier=2.0, replace=True)
    assert claims.bounded == conversions.epsilon(1.0, delta=1e-5)
    seen = []

    def client(weights, batch, seed):
        seen.append(batch.size)
        return batch.inputs.sum(0)

    audit_many_runs(client, *tiny(), claims, runs=40)
    assert set(seen) == {3}


def test_one_run_finds_canaries_and_keeps_below_epsilon():
    model, base, task = setting()
    given = dict(model.state_dict()), base, task
    client, claims = DpClient(model, noise=0.05), Claims(noise_multiplier=0.05)
    loud = audit_one_run(client, *given, claims, canaries=100)
    assert (loud.runs, loud.code) == (1, 2)
    assert loud.lower[0].epsilon > 1
    false = Claims(noise_multiplier=0.05, declared=0.5)
    assert audit_one_run(client, *given, false, canaries=100).code == 1
    count = sum(
        audit_one_run(DpClient(model, noise=2.0), *given, Claims(declared=0.1), canaries=40, seed=s)
        .lower[0]
        .epsilon
        > conversions.epsilon(2.0, delta=1e-5)
        for s in range(20)
    )
    assert count == 0


def test_one_run_orders_canaries_by_what_the_update_holds():
    _, base, task = setting()
    source = stream(5, "matched")
    rows = Batch(uniform((12, 1, 4, 4), source), torch.arange(12) % 4)
    each = torch.nn.functional.normalize(
        runs.example_gradients(task, rows.inputs, rows.labels).double()
    )
    held = uniform((12,), source) < 0.5
    sent = each[held].sum(0) + 1e-6 * normal(each[0].shape, source).double()
    scores = runs._matched(-0.3 * sent, task, rows, base, 1e-6)
    assert scores[held].max() < scores[~held].min()


@pytest.mark.parametrize(
    ("client", "words"),
    [
        (lambda *_: 1 / 0, "raised ZeroDivisionError on"),
        (lambda w, b, s: torch.ones(b.size), "update holds 3 numbers, another one 2"),
        (lambda *_: "text", "holds a str"),
        (lambda *_: [], "holds 0 numbers"),
        (lambda *_: [float("nan")], "not finite"),
    ],
)
def test_an_update_that_cannot_be_audited_is_named(client, words):
    with pytest.raises(ValueError, match=words):
        audit_many_runs(client, *tiny(), Claims(), runs=40)


@pytest.mark.parametrize(
    "wrong",
    [
        {"delta": 0.0},
        {"declared": -1.0},
        {"noise_multiplier": 0.0},
        {"steps": 0},
        {"sampling_rate": 0.5},
        {"rounds": 0},
    ],
)
def test_wrong_claims_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Claims(**wrong)


def test_too_few_runs_or_canaries_are_refused():
    with pytest.raises(ValueError, match="runs is 39"):
        audit_many_runs(Shown(noise=1.0), *tiny(), Claims(), runs=39)
    with pytest.raises(ValueError, match="canaries is 31"):
        audit_one_run(Shown(noise=1.0), *tiny(), Claims(), canaries=31)
    with pytest.raises(ValueError, match="does not hold the model's parameters"):
        audit_one_run(Shown(noise=1.0), *tiny(), Claims(), canaries=32)


def test_a_buffer_that_leaves_without_noise_is_found():
    model, base, task = setting()
    private = DpClient(model)

    def client(weights, batch, seed):
        return {**private(weights, batch, seed), "mean": batch.inputs.mean()}

    found = audit_many_runs(
        client, dict(model.state_dict()), base, task, Claims(noise_multiplier=1.0), runs=100
    )
    assert found.code == 1


def _dp_training(noise):
    """A user's function with Opacus inside."""
    opacus = pytest.importorskip("opacus")

    def train(model, dataset):
        engine = opacus.PrivacyEngine()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(dataset, batch_size=len(dataset))
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=noise,
            max_grad_norm=1.0,
            poisson_sampling=False,
        )
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        return model

    return train


@pytest.mark.filterwarnings("ignore:Secure RNG", "ignore:Full backward hook")
@pytest.mark.parametrize(("noise", "leaks"), [(2.0, False), (0.5, True)])
def test_opacus(noise, leaks):
    model, base, task = setting()
    client = of_training(_dp_training(noise), model)
    claims = Claims(noise_multiplier=2.0, replace=True)
    found = audit_many_runs(client, dict(model.state_dict()), base, task, claims, runs=200)
    assert (found.code == 1) == leaks


@pytest.mark.parametrize(("bug", "code"), [("", 0), ("half the noise", 1)])
def test_flower(bug, code):
    flower = pytest.importorskip("flwr.client")
    model, base, task = setting()
    private, draws = DpClient(model, bug=bug), stream(7, "flower")
    names = list(model.state_dict())

    def build(batch):
        class Own(flower.NumPyClient):
            def fit(self, parameters, config):
                given = {n: torch.as_tensor(v) for n, v in zip(names, parameters, strict=True)}
                sent = private(given, batch, int(torch.randint(2**31, (), generator=draws)))
                return [(given[n] + sent[n]).numpy() for n in names], batch.size, {"who": "me"}

        return Own()

    found = audit_many_runs(
        of_flower(build),
        dict(model.state_dict()),
        base,
        task,
        Claims(noise_multiplier=1.0),
        runs=400,
    )
    assert found.code == code
