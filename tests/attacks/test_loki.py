"""LOKI on real digits: a sum of clients holds each client's images apart, by the law of bins."""

import numpy as np
import pytest
import torch

from leakbound.attacks import BestOf, ByNoise, Loki, RobbingTheFed
from leakbound.client import forward, gradient
from leakbound.core import NotApplicable, Task, ThreatModel
from leakbound.defenses import GradientDropout, NoDefense, SecureAggregation, chain
from leakbound.randomness import stream

from .test_imprint import EXACT, bins_of, digits, drawn, nearest, played, task_of

__all__ = ["digits"]
SUM = SecureAggregation(4)


@pytest.mark.parametrize("build", ["mlp", "lenet"])
def test_images_alone_in_the_bin_of_their_client_are_exact(digits, build):
    task, attack, batch = task_of(digits, build=build), Loki(bins=64), drawn(digits, 0, 32)
    answer = attack(played(task, batch, attack, SUM).observation, stream(0))
    exact = nearest(batch, answer.inputs) >= EXACT
    alone = []
    for images in batch.inputs.split(8):
        bins = bins_of(images, digits[0], 64)
        alone += (np.bincount(bins, minlength=64)[bins] == 1).tolist()
    assert exact.tolist() == alone
    assert sum(alone) > 24


def test_one_model_for_all_clients_reads_fewer(digits):
    task, batch = task_of(digits), drawn(digits, 1, 64)
    read = []
    for attack in (Loki(bins=64), RobbingTheFed(bins=64)):
        answer = attack(played(task, batch, attack, SUM).observation, stream(0))
        read.append(int((nearest(batch, answer.inputs) >= EXACT).sum()))
    assert read[0] > 1.5 * read[1]


def test_a_client_s_gradient_stays_in_its_own_columns(digits):
    task, batch = task_of(digits), drawn(digits, 2, 5)
    for client, planted in enumerate(Loki(bins=16).plant_each(task, 3)):
        slope = gradient(planted, batch.inputs, batch.labels)
        sizes = planted.model.part(slope[None]).flatten(1).norm(dim=1)
        assert [i for i, size in enumerate(sizes) if size > 0] == [client]
        weight, bias = RobbingTheFed(bins=16)._layer(task)
        lit = (batch.inputs.flatten(1).double() @ weight.T + bias).relu().mean(1)
        shifted = (batch.inputs.double() + lit.view(-1, 1, 1, 1)).float()
        torch.testing.assert_close(
            forward(planted, batch.inputs), forward(task, shifted), rtol=1e-3, atol=1e-4
        )


def test_pruned_models_and_withheld_values(digits):
    task = task_of(digits)
    kept = torch.rand(len(task.parameters), generator=stream(0, "kept")) < 0.5
    attack, batch = Loki(bins=64), drawn(digits, 3, 8)
    for own, defense in (
        (task.pruned(kept), SecureAggregation(2)),
        (task, chain(GradientDropout(0.3))),
    ):
        seen = played(own, batch, attack, defense)
        answer = attack(seen.observation, stream(0))
        assert float(nearest(batch, answer.inputs).median()) > (20 if own is task else EXACT)


def test_other_attacks_pass_it_on(digits):
    task, one = task_of(digits), Loki(bins=8)
    for wrapped in (BestOf(one), ByNoise(one, Honest())):
        planted = wrapped.plant_each(task, 2)
        assert not torch.equal(planted[0].parameters, planted[1].parameters)


class Honest(RobbingTheFed):
    """Plants nothing."""

    def plant(self, task):
        return task


def test_it_needs_public_images_and_a_malicious_server(digits):
    batch = drawn(digits, 0, 4)
    task = task_of(digits, public=None)
    assert Loki().plant_each(task, 2) == [task, task]
    with pytest.raises(NotApplicable, match="no loki"):
        Loki()(played(task, batch, Loki()).observation, stream(0))
    honest = played(task_of(digits), batch, Loki(), NoDefense(), threat=ThreatModel())
    with pytest.raises(NotApplicable, match="honest"):
        Loki()(honest.observation, stream(0))
    assert isinstance(honest.observation.task, Task)
