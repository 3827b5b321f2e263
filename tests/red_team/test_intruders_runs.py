"""Whole runs with known parts: no intruder is above what a run says, and noise exposes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from torch import nn

from leakbound import data, models, simulate
from leakbound.assess.criterion import Criterion
from leakbound.assess.record import INTRUDERS
from leakbound.audit.simulate import Simulation
from leakbound.core import ThreatModel
from leakbound.randomness import permutation, stream

from .intruders import Population, Reached, attacked

loaded = cache(data.load)
TWO = "personal_status_and_sex,foreign_worker"
FOURTEEN = ",".join(column.name for column in loaded("german").domain.columns[:14])
NOISES = (0.1, 1.0, 5.0, 30.0, 1000.0)
NOTHING = 1000.0
"""A noise multiplier at which the update says nothing."""
SHARE = 0.9
"""Of the unknown columns or words that have to be right; images need 20 dB."""


@dataclass(frozen=True)
class Scene:
    """Examples of which a part is known.

    Attributes:
        exact, noisy: attacks on an update without and with noise.
        accepted: the probability of a reconstruction that is accepted.
    """

    data: str
    known: str
    exact: str
    noisy: str
    accepted: float

    @property
    def population(self) -> Population:
        found = loaded(self.data)
        criterion = Criterion.of(found.domain, share=SHARE, known=self.known)
        labels = None if self.data == "topics" else found.labels.numpy()
        copies = np.ones(len(found.inputs), int)
        return Population(self.data, found.inputs, criterion, copies, labels)


ROWS = "span_decoding", "candidate_likelihood"
IMAGES = "linear_inversion", "candidate_likelihood"
TEXTS = "token_rows", "token_rows"
COARSE = {
    "german, two columns": Scene("german", TWO, *ROWS, 0.2),
    "digits, left edge": Scene("digits", "region:0-7,0-0", *IMAGES, 0.3),
    "topics, first word": Scene("topics", "prefix:1", *TEXTS, 0.5),
}
"""Many examples share the known part, so a limit says something."""
SCENES = COARSE | {
    "german, 14 columns": Scene("german", FOURTEEN, *ROWS, 0.5),
    "digits, upper half": Scene("digits", "region:top", *IMAGES, 0.5),
    "topics, eight words": Scene("topics", "prefix:8", *TEXTS, 0.9),
}


def played(name: str, attack: str, noise: float, seed: int = 0) -> Simulation:
    """A run on one example; a random half of the others is public. No noise: a plain update."""
    scene = SCENES[name]
    found = loaded(scene.data)
    order = permutation(len(found.inputs), stream(seed, "intruders' runs", scene.data))
    private, public = order[:1], order[1 : len(order) // 2]
    text = scene.data == "topics"
    return simulate(
        model_for(scene, seed),
        found.batch(private),
        defense=f"dp_sgd,clip_norm=1,noise_multiplier={noise}" if noise else None,
        attack=attack,
        seed=seed,
        public=found.batch(public),
        share=SHARE,
        threat=ThreatModel(known=scene.known, labels_known=not text),
        domain=found.domain,
        loss="next_token" if text else "cross_entropy",
        error_bound="none",
        probability=scene.accepted,
    )


def model_for(scene: Scene, seed: int) -> nn.Module:
    found = loaded(scene.data)
    source = stream(seed, "model")
    if scene.data != "topics":
        return models.mlp(
            input_shape=found.domain.shape, classes=found.classes, hidden=(64,), generator=source
        )
    return models.decoder(
        input_shape=found.domain.shape,
        classes=found.domain.vocabulary,
        width=16,
        layers=1,
        heads=2,
        generator=source,
    )


@cache
def reached(name: str, noise: float) -> Reached:
    """What intruders reach who know the population."""
    return attacked(SCENES[name].population, noise, np.random.default_rng(7))


def check_words(name: str, noise: float) -> None:
    """No intruder is above what a run says."""
    scene = SCENES[name]
    run = played(name, scene.noisy, noise)
    attack = reached(name, noise)
    _, intruder, anyone = run.assessment.attackers
    assert not attack.exceeds(intruder.bound)
    assert not attack.exceeds(attack.prior + min(intruder.gain, anyone.gain))
    if run.verdict.startswith("protected"):
        # Nothing is said of attackers who know less than this one.
        assert run.verdict == INTRUDERS
        assert not attack.exceeds(scene.accepted)
    if noise == NOTHING:
        assert (run.verdict == INTRUDERS) == (name in COARSE)
        assert "exposed" not in run.verdict


@pytest.mark.parametrize("name", ["german, two columns", "digits, left edge", "topics, first word"])
def test_a_run_of_each_domain(name):
    check_words(name, 5.0)


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("name", SCENES)
def test_no_intruder_is_above_what_a_run_says(name, noise):
    check_words(name, noise)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
def test_without_noise_the_rest_is_reconstructed(name):
    """So that no test above passes for runs that find nothing."""
    run = played(name, SCENES[name].exact, 0.0)
    assert run.scores[0] >= run.assessment.criterion.value
    assert not run.verdict.startswith("protected")


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
def test_what_was_known_is_never_exposed(name):
    """Noise leaves nothing of the update: only completions of the known part match."""
    for attack in (SCENES[name].noisy, "mean_image"):
        for seed in range(3):
            assert "exposed" not in played(name, attack, NOTHING, seed).verdict
