"""Real digits, initialized models and rounds between them."""

import statistics

import pytest
import torch

from leakbound import data, models
from leakbound.core import Batch, Task, ThreatModel
from leakbound.defenses import NoDefense, SecureAggregation, chain
from leakbound.metrics import psnr
from leakbound.pairing import pair
from leakbound.protocol import play
from leakbound.randomness import stream


class Scene:
    """A round on real digits; everything is named by its seed."""

    def __init__(self):
        self.data = data.load("mnist5k")

    def task(self, build, seed=0, **settings):
        generator = stream(seed, "model")
        given = {"input_shape": (1, 28, 28), "classes": 10, "generator": generator}
        return Task.of(getattr(models, build)(**given, **settings), classes=10)

    def batch(self, seed, size=1):
        order = torch.randperm(len(self.data.inputs), generator=stream(seed, "batch"))[:size]
        return Batch(self.data.inputs[order], self.data.labels[order])

    def play(self, task, batch, defense=None, seed=0, **threat):
        defense = chain(defense) if defense else NoDefense()
        share = batch.size // defense.cohort_size
        clients = [
            Batch(batch.inputs[a : a + share], batch.labels[a : a + share])
            for a in range(0, batch.size, share)
        ]
        sources = [stream(seed, "defense", i) for i in range(len(clients) + 1)]
        return play(task, clients, defense, sources, threat=ThreatModel(**threat))

    def decibels(self, played, answer):
        return psnr(pair(played.truth, answer), data_range=1.0)

    def attack(self, attack, build, seeds, size=1, defense=None, settings=None, **threat):
        """Mean PSNR of each round."""
        found = []
        for seed in seeds:
            task = self.task(build, seed, **(settings or {}))
            played = self.play(task, self.batch(seed, size), defense, seed, **threat)
            answer = attack(played.observation, stream(seed, "attack"))
            found.append(statistics.mean(self.decibels(played, answer)))
        return found

    def aggregation(self, clients):
        return SecureAggregation(clients)


@pytest.fixture(scope="session")
def scene():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Scene()
    torch.set_num_threads(threads)
