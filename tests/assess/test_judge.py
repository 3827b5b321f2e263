"""One judge: an audit, a captured update, the meter and Opacus say the same of one update."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from leakbound import captured, data, models, simulate
from leakbound.assess.judge import CONTRADICTED, Contradiction, Evidence, RiskSettings, judge
from leakbound.assess.record import CERTIFIED, ESTIMATE, GUESSABLE
from leakbound.attacks import LinearInversion, inverting_gradients, matching_over_rounds
from leakbound.bounds.counting import PublicSample
from leakbound.core import Batch, Reconstruction, Task, ThreatModel
from leakbound.meter import Policy, measure
from leakbound.opacus import risk
from leakbound.protocol import send
from leakbound.randomness import stream
from leakbound.registry import parse

ATTACK = "linear_inversion"
PUBLIC = 600
WEAK = "gaussian_noise,noise_std=1e-4"
STRONG = "gaussian_noise,noise_std=1"
MODEL = "protected under a model"
WORDS = {
    (None, 1): ("exposed", "exposed", "exposed (certified)"),
    (None, 4): ("exposed", "exposed", "facts exposed"),
    (WEAK, 1): ("exposed", "exposed", "undecided"),
    (WEAK, 4): ("exposed", "exposed", "undecided"),
    (STRONG, 1): ("undecided", "undecided", "undecided"),
    (STRONG, 4): ("undecided", "undecided", "undecided"),
    ("dp_sgd", 1): ("undecided", MODEL, MODEL),
    ("dp_sgd", 4): ("undecided", MODEL, MODEL),
}
"""By defense and batch size: the verdicts at 20 dB, at 30 dB, and at 30 dB without the truth."""


class Routes:
    """One update by every route: `audit`, `captured` and `meter` are assessments of it."""

    def __init__(self, folder, *, defense, size, psnr, truth=True, wrong=False):
        digits = data.load("digits")
        public = digits.batch(torch.arange(PUBLIC))
        path = folder / "public.npz"
        np.savez(path, inputs=public.inputs.numpy(), labels=public.labels.numpy())
        model = models.mlp(input_shape=(1, 8, 8), classes=10, generator=stream(0, "model"))
        batch = digits.batch(torch.arange(PUBLIC, PUBLIC + size))
        simulated = simulate(
            *(model, batch),
            defense=defense,
            attack=ATTACK,
            public=public,
            psnr=psnr,
            classes=10,
            error_bound="sample",
        )
        self.audit = simulated.assessment
        self.batch = batch
        self.public = public
        self.round = simulated.round
        task = Task.of(model, classes=10, public=public)
        given = Batch(public.inputs[:size], batch.labels) if wrong else batch
        given = given if truth else None
        parts = task.unflatten(self.round.update.rows[0])
        state = {name: value.clone() for name, value in model.state_dict().items()}
        (self.captured,) = captured.attack_update(
            captured.load(parts, state, kind="gradient"),
            model,
            captured.Settings(
                (1, 8, 8), classes=10, attacks=ATTACK, public=f"npz:{path}", psnr=psnr
            ),
            captured.TrainingInfo(
                examples=size,
                labels=batch.labels,
                defense=None if defense is None else parse("defense", defense),
            ),
            truth=given,
        ).records
        self.reading = measure(
            *(task, self.round.update),
            source=stream(0, "attack", ATTACK),
            batch=given,
            input_shape=(1, 8, 8),
            defense=self.round.defense,
            policy=Policy(psnr=psnr, threat=ThreatModel()),
        )
        attacked = (one for one in self.reading.assessments if one.attack.name == "LinearInversion")
        self.meter = next(attacked)


def numbers(record):
    """What an assessment says in words and numbers; estimates prove nothing and may be left out."""
    bounds = tuple(bound for bound in record.bounds if bound.covers != ESTIMATE)
    decided = record.verdict, record.attained, bounds, record.facts
    return *decided, record.matched, record.baseline, record.scores, record.chance


@pytest.mark.parametrize("psnr", [20.0, 30.0])
@pytest.mark.parametrize(("defense", "size"), WORDS)
def test_every_route_says_the_same_of_an_update(tmp_path, defense, size, psnr):
    routes = Routes(tmp_path, defense=defense, size=size, psnr=psnr)
    assert numbers(routes.captured) == numbers(routes.audit)
    assert numbers(routes.meter) == numbers(routes.audit)
    assert routes.reading.verdict == routes.audit.verdict
    at_20, at_30, _ = WORDS[defense, size]
    assert routes.audit.verdict == (at_20 if psnr == 20.0 else at_30)
    assert (routes.meter.certificate is not None) == (defense is None and size == 1)


@pytest.mark.parametrize(("defense", "size"), WORDS)
def test_without_the_truth_they_say_the_same(tmp_path, defense, size):
    routes = Routes(tmp_path, defense=defense, size=size, psnr=30.0, truth=False)
    assert numbers(routes.meter) == numbers(routes.captured)
    assert routes.reading.verdict == routes.captured.verdict
    assert routes.captured.attained == routes.audit.attained
    assert routes.meter.verdict == WORDS[defense, size][2]


def test_a_guess_that_is_good_enough_is_told_by_every_route(tmp_path):
    """At 15 dB one digit matches many others, whatever the noise."""
    routes = Routes(tmp_path, defense="gaussian_noise,noise_std=1", size=1, psnr=15.0)
    for record in (routes.audit, routes.captured, routes.meter):
        assert record.verdict == GUESSABLE


@pytest.mark.parametrize("noise", [1.0, 4.0])
def test_opacus_states_the_bound_of_the_others(tmp_path, noise):
    """A training of one step on one example is one release."""
    routes = Routes(tmp_path, defense=f"dp_sgd,noise_multiplier={noise}", size=1, psnr=20.0)
    prior = PublicSample(
        routes.public.inputs.flatten(1).double().numpy(),
        labels=routes.public.labels.numpy(),
        classes=10,
    )
    stated = risk([(noise, 1.0, 1)], dim=64, norm=1.0, psnr=20.0, prior=prior)
    (bound,) = (own for own in routes.audit.bounds if own.basis == "sample" and not own.on_error)
    assert 1e-4 < stated.bound < 0.9  # a bound of 0 or 1 would agree with anything
    assert bound.probability == pytest.approx(stated.bound, rel=1e-8)


def test_a_wrong_truth_costs_no_verdict_by_either_route(tmp_path):
    """A proof stands: both judge without the truth, as if none were given, and warn."""
    routes = Routes(tmp_path, defense=None, size=1, psnr=20.0, wrong=True)
    assert numbers(routes.meter) == numbers(routes.captured)
    for record in (routes.meter, routes.captured):
        assert record.verdict == CERTIFIED
        assert record.certificate is not None
        assert not record.scores
    assert CONTRADICTED in routes.captured.capture.notes
    assert not routes.captured.truth_known
    assert CONTRADICTED in "; ".join(routes.reading.decision.reasons)
    assert routes.reading.verdict == CERTIFIED


def test_a_proof_against_the_truth_is_an_error(tmp_path):
    routes = Routes(tmp_path, defense=None, size=1, psnr=20.0)
    other = Batch(routes.public.inputs[:1], routes.public.labels[:1])
    seen = routes.round.observation
    from leakbound.audit.experiment import released

    evidence = Evidence(
        routes.audit,
        seen,
        released(routes.round, _criterion(seen), seen.threat, routes.public),
        LinearInversion(),
        LinearInversion()(seen, stream(0)),
        truth=other,
        certain={"batch size", "local steps"},
    )
    with pytest.raises(Contradiction, match="one is wrong"):
        judge(evidence, RiskSettings())


def test_no_bound_of_one_update_stands_beside_an_attack_on_several_rounds():
    """What several rounds show may be more than a bound of one of them allows."""
    from leakbound.audit.experiment import released

    digits = data.load("digits")
    public = digits.batch(torch.arange(PUBLIC))
    model = models.mlp(input_shape=(1, 8, 8), classes=10, generator=stream(0, "model"))
    one = digits.batch(torch.arange(PUBLIC, PUBLIC + 1))
    found = simulate(model, one, defense="dp_sgd", attack=ATTACK, public=public, classes=10)
    seen = found.round.observation
    release = released(found.round, _criterion(seen), seen.threat, public)
    answer = Reconstruction(public.inputs[:1])
    together = matching_over_rounds()
    alone = inverting_gradients()
    both = replace(seen, history=(seen,))
    for observation, attack in ((seen, together), (both, alone), (both, together)):
        evidence = Evidence(found.assessment, observation, release, attack, answer)
        record, _ = judge(evidence, RiskSettings())
        assert bool(record.bounds) == (observation is seen or attack is alone)
    assert "the attack may use earlier rounds" in record.bounds_note
    assert record.verdict == "undecided"


def test_a_truth_that_a_fixed_candidate_meets_takes_no_proof_back():
    """A gray image is no match, but the update proves it, with the truth or without."""
    digits = data.load("digits")
    public = digits.batch(torch.arange(PUBLIC))
    model = models.mlp(input_shape=(1, 8, 8), classes=10, generator=stream(0, "model"))
    task = Task.of(model, classes=10, public=public)
    batch = Batch(torch.full((1, 1, 8, 8), 0.5), torch.tensor([3]))
    update = send(task, batch, parse("defense", "none"), stream(0))
    for truth in ({"batch": batch}, {"input_shape": (1, 8, 8)}):
        reading = measure(task, update, source=stream(0), policy=Policy(psnr=20.0), **truth)
        assert reading.verdict == CERTIFIED
        assert reading.decision.action == "warn"
    simulated = simulate(
        model, batch, attack=ATTACK, public=public, psnr=20.0, classes=10, error_bound="none"
    )
    assert simulated.verdict == CERTIFIED


def _criterion(seen):
    from leakbound.assess.criterion import Criterion

    return Criterion.of(seen.task.domain, psnr=20.0)
