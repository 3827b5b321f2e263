"""One round: what the server sees, and what is refused before anything is sent."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from leakbound.attacks import Attack
from leakbound.client import gradient, respond
from leakbound.core import Batch, Gaussian, Server, Task, ThreatModel, Unit
from leakbound.defenses import (
    Clip,
    ClipExamples,
    DpSgd,
    GaussianNoise,
    NoDefense,
    SecureAggregation,
    chain,
)
from leakbound.engines.sensitivity import example_gradients
from leakbound.protocol import play, send
from leakbound.randomness import normal, secure, stream


def _task(classes=3):
    generator = stream(0, "model")
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(normal(parameter.shape, generator))
    return Task.of(model, classes=classes)


def _batch(size, seed=0):
    generator = stream(seed, "batch")
    inputs = torch.rand(size, 1, 4, 4, generator=generator)
    return Batch(inputs, torch.randint(3, (size,), generator=generator))


def _sources(count):
    return [stream(0, "defense", i) for i in range(count)]


def _play(task, clients, defense=None, **more):
    return play(task, clients, defense or NoDefense(), _sources(len(clients) + 1), **more)


def test_no_defense_shows_the_gradient_itself():
    task, batch = _task(), _batch(3)
    played = _play(task, [batch])
    wanted = gradient(task, batch.inputs, batch.labels)
    assert torch.equal(played.observation.update.rows, wanted[None])
    assert not played.observation.update.rows.requires_grad
    assert played.observation.cohort == (3,)
    assert played.observation.batch_shape == (3, 1, 4, 4)
    assert played.truth.inputs is not played.observation.update.rows


def test_noise_is_the_named_draw():
    task, batch = _task(), _batch(2)
    seen = _play(task, [batch], GaussianNoise(0.5)).observation
    plain = gradient(task, batch.inputs, batch.labels)[None]
    wanted = plain + 0.5 * normal(plain.shape, stream(0, "defense", 0))
    torch.testing.assert_close(seen.update.rows, wanted)
    assert seen.update.law.covariance == 0.25


def test_secure_noise_is_new_each_time():
    task, batch = _task(), _batch(1)
    first, second = (send(task, batch, GaussianNoise(0.1), secure()) for _ in range(2))
    assert not torch.equal(first.rows, second.rows)


def test_the_server_of_secure_aggregation_sees_the_sum():
    task, clients = _task(), [_batch(size, size) for size in (1, 3, 2)]
    played = _play(task, clients, chain(Clip(0.1), SecureAggregation(3)))
    single = [_play(task, [batch], Clip(0.1)).observation.update.rows for batch in clients]
    torch.testing.assert_close(played.observation.update.rows, sum(single))
    assert played.observation.update.unit is Unit.COHORT
    assert played.observation.cohort == (1, 3, 2)
    assert played.truth.size == 6
    assert torch.equal(played.truth.inputs[1:4], clients[1].inputs)


def test_send_declares_what_a_client_releases():
    update = send(_task(), _batch(4), DpSgd(1.0, 2.0), stream(0))
    assert (update.unit, update.examples) == (Unit.CLIENT, (4,))
    assert isinstance(update.law, Gaussian)
    assert update.law.covariance == pytest.approx((2.0 * 1.0 / 4) ** 2)
    rows = send(_task(), _batch(4), ClipExamples(1.0), stream(0))
    assert rows.rows.shape[0] == 4
    assert rows.examples == (1, 1, 1, 1)


@pytest.mark.parametrize("known", [True, False])
def test_labels_are_given_or_withheld(known):
    played = _play(_task(), [_batch(2)], threat=ThreatModel(labels_known=known))
    labels = played.observation.labels
    if not known:
        assert labels is None
        return
    assert torch.equal(labels, played.truth.labels)
    labels.add_(1)  # an attack's scribbling does not reach the truth
    assert not torch.equal(labels, played.truth.labels)


def test_a_withheld_defense_leaves_nothing_to_simulate():
    noise = chain(GaussianNoise(0.1))
    seen = _play(_task(), [_batch(2)], noise, threat=ThreatModel(defense_known=False)).observation
    assert seen.defense is None
    assert seen.weights is None
    assert seen.noise_share == 0
    known = _play(_task(), [_batch(2)], noise).observation
    assert known.defense == noise


def test_auxiliary_data_is_handed_on():
    public = _batch(5, seed=9)
    assert _play(_task(), [_batch(1)], auxiliary=public).observation.auxiliary is public


def _refusal(call):
    with pytest.raises(ValueError) as error:
        call()
    message = str(error.value)
    assert "\n" not in message
    return message


def test_inputs_that_are_not_finite_are_refused():
    batch = _batch(2)
    batch.inputs[0, 0, 0, 0] = float("nan")
    message = _refusal(lambda: _play(_task(), [batch]))
    assert message.startswith("inputs holds 1 of 32 entries that are NaN or infinite")


def test_a_gradient_that_is_not_finite_is_refused():
    task = _task()
    huge = task.with_parameters(task.parameters * 1e38)
    message = _refusal(lambda: _play(huge, [_batch(2)]))
    assert message.startswith("the client's gradient holds ")


def test_labels_out_of_range_are_refused():
    batch = Batch(_batch(2).inputs, torch.tensor([0, 3]))
    message = _refusal(lambda: _play(_task(), [batch]))
    assert message == "labels run from 0 to 3, but the model has 3 classes; give labels in 0..2"


def test_wrong_numbers_of_clients_and_sources_are_refused():
    batch = _batch(1)
    message = _refusal(lambda: _play(_task(), [batch], SecureAggregation(2)))
    assert message == "clients holds 1 batches, but SecureAggregation(clients=2) runs on 2"
    message = _refusal(lambda: _play(_task(), [batch, batch]))
    assert message == "clients holds 2 batches, but none runs on 1"
    message = _refusal(lambda: play(_task(), [batch], NoDefense(), _sources(1)))
    assert message == "sources holds 1; give one a client and one for the cohort"


@dataclass(frozen=True)
class Planter(Attack):
    def plant(self, task):
        return task.with_parameters(task.parameters * 0)


@pytest.mark.parametrize("server", Server)
def test_only_a_malicious_server_plants(server):
    task = _task()
    seen = _play(task, [_batch(1)], threat=ThreatModel(server=server), attack=Planter()).observation
    assert bool(seen.task.parameters.any()) == (server is Server.HONEST)
    wanted = gradient(seen.task, *(lambda b: (b.inputs, b.labels))(_batch(1)))
    assert torch.equal(seen.update.rows[0], wanted)
    assert torch.equal(task.parameters, _task().parameters)


def test_the_clients_quick_gradients_are_the_plain_ones():
    task, defense = _task().to("cpu", torch.float64), DpSgd(5.0, 0.01)
    batch = Batch(_batch(3).inputs.double(), _batch(3).labels)
    quick = send(task, batch, defense, stream(0, "noise")).rows
    plain = respond(task, batch, defense, stream(0, "noise"))[0].rows.mean(0, keepdim=True)
    torch.testing.assert_close(quick, plain, rtol=1e-10, atol=1e-12)
    doubled = respond(task, batch, defense, stream(0, "noise"), each=_twice)[0].rows
    assert not torch.allclose(doubled, plain)


def _twice(task, inputs, labels):
    return 2 * example_gradients(task, inputs, labels)
