"""What a client's update is divided by in Flower, and who learns how many examples it has."""

import json
import logging

import pytest
import torch
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from torch import nn

from leakbound.captured.observe import TrainingInfo, observe
from leakbound.client import gradient
from leakbound.core import Task
from leakbound.defenses import Clip, DpSgd, GaussianNoise, TopK, chain
from leakbound.flower import DefenseMod, LeakMeter, Setup, tap
from leakbound.meter import Policy

from . import test_secagg as secagg

SEED = 7
"""Of both neighbors' noise: what is left of their difference is no noise."""


def cut(batches, count):
    """Each client's one batch, cut to so many examples."""

    def of(who, round):
        inputs, labels = batches(who, round)[0]
        return [(inputs[:count], labels[:count])]

    return of


def row(flower, setup, defense, given):
    """What a client sends, in gradient units, and its reply; `defense` None is none."""
    mods = [] if defense is None else [DefenseMod(defense, setup, seed=SEED)]
    reply = flower.ask(flower.client_app(mods, batches=given))
    assert not reply.has_error(), reply.error.reason
    start = torch.cat([v.reshape(-1) for v in flower.Net().state_dict().values()])
    return (start - flower.weights(reply.content["arrays"])).double() / flower.RATE, reply


def test_an_edited_update_is_divided_by_the_learning_rate_alone(flower, setup, batches):
    """Two clients' data that differ by one example: the same noise, whatever their sizes."""
    defense = chain(Clip(0.5), GaussianNoise(0.3))
    noise = []
    for count in (4, 3, 1):
        given = cut(batches, count)
        clipped, _ = row(flower, setup, Clip(0.5), given)
        noise.append(row(flower, setup, defense, given)[0] - clipped)
    assert float(noise[0].norm()) > 1
    assert float((noise[0] - noise[1]).abs().max()) < 1e-5  # the rounding of float32 weights
    assert float((noise[0] - noise[2]).abs().max()) < 1e-5


def test_dp_sgd_divides_by_the_number_of_examples_and_that_number_is_sent(flower, setup, batches):
    """The noise times the number is one draw: its level shows the number, and so does the reply."""
    defense, sums = DpSgd(clip_norm=0.5, noise_multiplier=1.0), {}
    for count in (4, 3):
        sent, reply = row(flower, setup, defense, cut(batches, count))
        sums[count] = sent * count
        (metrics,) = reply.content.metric_records.values()
        assert metrics["num-examples"] == count
    task = Task.of(flower.Net(), classes=10)
    inputs, labels = batches(0, 1)[0]
    alone = gradient(task, inputs[3:4], labels[3:4]).double()
    alone *= min(1.0, 0.5 / float(alone.norm()))
    assert float((sums[4] - sums[3] - alone).abs().max()) < 1e-5
    assert float(sums[3].norm()) > 5 * float(alone.norm())


def test_a_reading_says_that_the_number_of_examples_is_taken_as_public(
    flower, setup, batches, caplog, tmp_path
):
    policy = Policy(psnr=25.0, probability=0.05)
    lines = {}
    for name, defense in {"dp_sgd": DpSgd(1.0, 5.0), "edited": GaussianNoise(5.0)}.items():
        path = tmp_path / f"{name}.jsonl"
        mods = [LeakMeter(setup, policy, path=path), DefenseMod(defense, setup)]
        with caplog.at_level(logging.INFO, "leakbound.meter"):
            assert not flower.ask(flower.client_app(mods, batches=cut(batches, 1))).has_error()
        lines[name] = json.loads(path.read_text())
    said = [note for note in lines["dp_sgd"]["notes"] if "number of examples as public" in note]
    assert lines["dp_sgd"]["assessments"][0]["bounds"]
    assert len(said) == 1
    assert not any("as public" in note for note in lines["edited"]["notes"])


def weighted(flower, batches, mods):
    """An app whose client k has k + 1 examples, by which SecAgg+ weighs it."""

    class Client(NumPyClient):
        def __init__(self, who):
            self.who = int(who)

        def fit(self, parameters, config):
            net = flower.Net()
            pairs = zip(net.state_dict(), parameters, strict=True)
            net.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in pairs})
            inputs, labels = (part[: self.who + 1] for part in batches(self.who, 1)[0])
            tap(inputs, labels)
            nn.functional.cross_entropy(net(inputs), labels).backward()
            torch.optim.SGD(net.parameters(), lr=secagg.RATE).step()
            return secagg.numbers(net), len(labels), {}

    return ClientApp(lambda context: Client(context.node_config["partition-id"]).to_client(), mods)


def test_noise_of_a_weighted_average_has_no_declared_level(flower, batches, monkeypatch):
    """Three clients add noise of 0.3; weighed 1 : 2 : 3, their average has 0.3 · √14 / 6 of it."""
    monkeypatch.setattr(secagg, "client_app", weighted)
    noise = GaussianNoise(0.3)
    setup = Setup(flower.Net, learning_rate=secagg.RATE)
    bare, _ = secagg.secure_run(flower, batches, [])
    capture, _ = secagg.secure_run(flower, batches, [DefenseMod(noise, setup)])
    added = (secagg.whole(capture.update) - secagg.whole(bare.update)).double() / secagg.RATE
    level = float(added.square().mean().sqrt())
    assert level == pytest.approx(0.3 * 14**0.5 / 6, rel=0.1)
    assert abs(level - 0.3) > 0.1
    task = Task.of(flower.Net(), classes=10)
    assert observe(capture, task, input_shape=(1, 8, 8)).cohort == (6,)
    topk = TrainingInfo(defense=TopK(0.5))
    observe(capture, task, input_shape=(1, 8, 8), training=topk)  # declares no noise
    for declared in (noise, DpSgd(1.0, 1.0)):
        with pytest.raises(ValueError, match="the average of 3 clients, weighted by their numbers"):
            observe(capture, task, input_shape=(1, 8, 8), training=TrainingInfo(defense=declared))
