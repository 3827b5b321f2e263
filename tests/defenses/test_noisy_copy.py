"""One noisy copy of each example: the same in all rounds, of the declared law, leaks no more."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from leakbound.attacks import LinearInversion, LinearTrap, dlg
from leakbound.bounds import from_scratch
from leakbound.client import gradient
from leakbound.core import (
    Batch,
    ClientContext,
    Gaussian,
    Guarantee,
    Observation,
    Server,
    Task,
    ThreatModel,
    Unit,
    Unknown,
    Update,
)
from leakbound.defenses import (
    Clip,
    ClipExamples,
    DpSgd,
    GaussianNoise,
    GradientDropout,
    HiddenDropout,
    LocalAggregation,
    LocalOptimalNoise,
    LocalOptimalPruning,
    Mean,
    NoDefense,
    NoisyCopy,
    SecureAggregation,
    Sign,
    chain,
)
from leakbound.protocol import play, resolve, send, step
from leakbound.randomness import normal, secure, stream

WIDE = (-1000.0, 1000.0)


@pytest.fixture
def wide(task):
    return replace(task, input_range=WIDE)


def rounds(task, batch, defense, count, *, keep=True):
    """The updates of several rounds of one client, whose state is kept or lost in between."""
    ready, state, found = resolve(defense, task, batch.size), None, []
    for i in range(count):
        update, state = step(task, batch, ready, stream(i, "round"), state if keep else None)
        found.append(update)
    return found


def copies_of(task, batch, defense, source, state=None):
    return defense.copies(batch, task, state, source)[0]


def test_the_gradient_is_that_of_the_copies(wide, mlp, batch):
    defense = NoisyCopy(0.3)
    copies = copies_of(wide, batch, defense, stream(0))
    sent = send(wide, batch, defense, stream(0))
    mlp.zero_grad()
    nn.functional.cross_entropy(mlp(copies), batch.labels).backward()
    wanted = torch.cat([p.grad.reshape(-1) for p in mlp.parameters()])
    torch.testing.assert_close(sent.rows[0], wanted)
    assert isinstance(sent.law, Unknown)
    assert not torch.allclose(sent.rows[0], gradient(wide, batch.inputs, batch.labels), rtol=0.01)


def test_the_copy_is_the_same_in_all_rounds(task, batch):
    first, *rest = rounds(task, batch, NoisyCopy(0.3), 4)
    assert all(torch.equal(first.rows, later.rows) for later in rest)
    lost = rounds(task, batch, NoisyCopy(0.3), 2, keep=False)
    assert not torch.allclose(lost[0].rows, lost[1].rows, rtol=1e-3)


def test_a_record_keeps_its_copy_in_other_company(wide, batch):
    defense = NoisyCopy(0.3)
    first, state = defense.copies(batch, wide, None, stream(0))
    order = torch.tensor([4, 0, 4])
    again = Batch(batch.inputs[order], torch.tensor([2, 2, 1]))  # twice in one batch, other labels
    second, later = defense.copies(again, wide, state, stream(1))
    assert torch.equal(second, first[order])
    assert set(later) == set(state)
    assert len(state) == 6
    narrow = Batch(batch.inputs.float(), batch.labels)
    third, more = defense.copies(narrow, wide, state, stream(2))
    assert third.dtype == torch.float32
    assert len(more) == 12  # other values, so other examples
    back = Batch(narrow.inputs.double(), batch.labels)
    assert torch.equal(defense.copies(back, wide, more, stream(3))[0].float(), third)


def test_what_was_kept_is_never_written_to(wide, batch):
    defense = NoisyCopy(0.3)
    _, state = defense.copies(Batch(batch.inputs[:2], batch.labels[:2]), wide, None, stream(0))
    before = {name: value.clone() for name, value in state.items()}
    defense.copies(batch, wide, state, stream(1))
    assert set(state) == set(before)
    assert all(torch.equal(state[name], before[name]) for name in before)


@pytest.mark.parametrize("source", [stream(0), secure()], ids=["seeded", "secure"])
def test_the_law_of_the_copies(task, source):
    batch = Batch(torch.rand(400, 1, 3, 4, dtype=torch.float64), torch.zeros(400).long())
    wide = replace(task, input_range=WIDE)
    noise = (copies_of(wide, batch, NoisyCopy(0.2), source) - batch.inputs).flatten(1) / 0.2
    assert stats.kstest(noise.flatten().numpy(), stats.norm.cdf).pvalue > 1e-6
    assert float(noise.std()) == pytest.approx(1.0, abs=5 / math.sqrt(2 * noise.numel()))
    correlation = np.corrcoef(noise.numpy().T) - np.eye(12)
    assert np.abs(correlation).max() < 5 / math.sqrt(400)
    neighbors = (noise[1:] * noise[:-1]).mean()
    assert abs(float(neighbors)) < 5 / math.sqrt(noise[1:].numel())


def test_two_secure_copies_differ(task, batch):
    one, two = (copies_of(task, batch, NoisyCopy(0.2), secure()) for _ in range(2))
    assert not torch.allclose(one, two, atol=1e-3)


def test_copies_lie_in_the_input_range(task, batch):
    copies = copies_of(task, batch, NoisyCopy(0.5), stream(0))
    free = copies_of(replace(task, input_range=WIDE), batch, NoisyCopy(0.5), stream(0))
    assert torch.equal(copies, free.clamp(0, 1))
    assert float((free != copies).double().mean()) > 0.2


# the risk


def one_record(seed, radius=3.0):
    raw = normal((1, 1, 4, 4), stream(seed, "record"), like=torch.zeros((), dtype=torch.float64))
    return Batch(radius * raw / raw.norm(), torch.tensor([0]))


def trap_task():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    return Task.of(model, input_range=WIDE).to("cpu", torch.float64)


def mean_of_sightings(attack, batch, defense, count, *, keep, seed):
    """The mean of the attack's estimates over all rounds."""
    task = attack.plant(trap_task())
    ready, state, found = resolve(defense, task, 1), None, []
    for i in range(count):
        source = stream(seed, "sighting", i)
        update, state = step(task, batch, ready, source, state if keep else None)
        threat = ThreatModel(server=Server.MALICIOUS)
        seen = Observation(update.seen(), task, (1,), (1, 4, 4), threat, defense=ready)
        found.append(attack.estimate(seen)[0])
    return torch.stack(found).mean(0)


@pytest.mark.parametrize(
    ("defense", "keep", "falls"),
    [
        (NoisyCopy(0.3), True, False),
        (NoisyCopy(0.3), False, True),
        (chain(GaussianNoise(0.3)), True, True),
    ],
    ids=["one copy", "fresh copies", "fresh noise on updates"],
)
def test_the_risk_over_rounds(defense, keep, falls):
    attack, means = LinearTrap("unbiased", rows=1, norm=3.0, features=16), []
    for count in (1, 8):
        errors = []
        for seed in range(30):
            batch = one_record(seed)
            guess = mean_of_sightings(attack, batch, defense, count, keep=keep, seed=seed)
            errors.append(float((guess - batch.inputs.flatten()).square().mean()))
        means.append(np.mean(errors))
    spread = math.sqrt(2 / (16 * 30))  # relative standard error of the mean
    assert means[0] == pytest.approx(0.3**2, rel=4 * spread)
    wanted = means[0] / 8 if falls else means[0]
    assert means[1] == pytest.approx(wanted, rel=6 * spread if falls else 1e-9)


def test_the_bound_on_all_attackers_is_reached_in_any_round():
    radius, noise, count, eta = 3.0, 0.9, 150, 0.3
    attack = LinearTrap("gamma", rows=1, norm=radius, eta=eta, features=16)
    hits = 0
    for seed in range(count):
        batch = one_record(seed, radius)
        guess = mean_of_sightings(attack, batch, NoisyCopy(noise), 3, keep=True, seed=seed)
        hits += float((guess - batch.inputs.flatten()).square().mean()) <= eta
    wanted = from_scratch.exact(noise / radius, dim=16, eta=eta, norm=radius)
    assert 0.1 < wanted < 0.9
    assert hits / count == pytest.approx(wanted, abs=3 * math.sqrt(wanted * (1 - wanted) / count))


# attackers who know it


def test_closed_form_inversion_finds_the_copy(task, batch):
    one = Batch(batch.inputs[:1], batch.labels[:1])
    sources = [stream(0, "a"), stream(0, "b")]
    seen = play(task, [one], NoisyCopy(0.2), sources).observation
    copy = copies_of(task, one, NoisyCopy(0.2), stream(0, "a"))
    found = LinearInversion()(seen, stream(0)).inputs
    torch.testing.assert_close(found, copy, atol=1e-6, rtol=1e-6)
    assert not torch.allclose(found, one.inputs, atol=0.05)


def test_matching_finds_the_copy(task, batch):
    one = Batch(batch.inputs[:1], batch.labels[:1])
    sources = [stream(0, "a"), stream(0, "b")]
    seen = play(task, [one], NoisyCopy(0.2), sources).observation
    copy = copies_of(task, one, NoisyCopy(0.2), stream(0, "a"))
    answer = dlg(steps=60, restarts=3)(seen, stream(0))
    assert float((answer.inputs - copy).abs().max()) < 1e-2
    assert answer.problem is None


# chains


def test_it_goes_before_dp_sgd(wide, batch):
    defense = chain(NoisyCopy(0.3), DpSgd(0.1, 1e-9))
    sent = send(wide, batch, defense, stream(0))
    copies = copies_of(wide, batch, NoisyCopy(0.3), stream(0))
    clean = send(wide, Batch(copies, batch.labels), DpSgd(0.1, 1e-9), stream(1))
    torch.testing.assert_close(sent.rows, clean.rows, atol=1e-8, rtol=0)
    assert isinstance(sent.law, Unknown)
    assert defense.guarantee is Guarantee.NONE


@pytest.mark.parametrize("before", [LocalAggregation(3, 0.2), HiddenDropout(0.5)])
@pytest.mark.parametrize("first", [True, False])
def test_it_goes_with_changed_local_training(wide, batch, before, first):
    links = [before, NoisyCopy(0.3)] if first else [NoisyCopy(0.3), before]
    sent = send(wide, batch, chain(*links), stream(0))
    source = stream(0)
    prepared = before.prepare(wide, source)
    copies = copies_of(wide, batch, NoisyCopy(0.3), source)
    wanted = send(prepared, Batch(copies, batch.labels), NoDefense(), stream(1))
    torch.testing.assert_close(sent.rows, wanted.rows)
    assert isinstance(sent.law, Unknown)


def test_clients_of_a_sum_have_their_own_copies(wide, batch):
    defense = chain(NoisyCopy(0.3), SecureAggregation(2))
    sources = [stream(0, i) for i in range(3)]
    played = play(wide, [batch, batch], defense, sources)
    parts = [send(wide, batch, NoisyCopy(0.3), stream(0, i)).rows for i in range(2)]
    torch.testing.assert_close(played.update.rows, parts[0] + parts[1])
    assert not torch.allclose(parts[0], parts[1], rtol=1e-2)


@pytest.mark.parametrize(
    "before", [ClipExamples(1.0), GaussianNoise(0.1), GradientDropout(0.5), Clip(1.0), Sign()]
)
def test_what_it_would_undo_is_refused(before):
    with pytest.raises(ValueError, match=r"put NoisyCopy\(noise_std=0.3\) first"):
        chain(before, NoisyCopy(0.3))


@pytest.mark.parametrize("after", [LocalOptimalNoise(0.1), LocalOptimalPruning(0.5)])
def test_links_that_read_the_examples_are_refused(after):
    with pytest.raises(ValueError, match="reads the client's examples"):
        chain(NoisyCopy(0.3), after)


def test_a_bound_does_not_pass_through_it():
    with pytest.raises(ValueError, match="NoisyCopy"):
        chain(ClipExamples(1.0), NoisyCopy(0.3), Mean(), *DpSgd().links[2:])


def test_the_server_cannot_run_it(wide, batch):
    update = Update(torch.zeros(1, len(wide.parameters)), Unit.CLIENT, (6,), Gaussian(1.0))
    with pytest.raises(ValueError, match="run it on the client"):
        NoisyCopy(0.3).transform(update, {}, None, stream(0))
    with pytest.raises(ValueError, match="first"):
        NoisyCopy(0.3).transform(update, {}, ClientContext(wide, batch), stream(0))


@pytest.mark.parametrize("noise_std", [0.0, -1.0, math.nan, math.inf])
def test_settings_are_checked(noise_std):
    with pytest.raises(ValueError, match="noise_std is"):
        NoisyCopy(noise_std)
