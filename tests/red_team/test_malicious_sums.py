"""Servers that read sums, against what is stated of noise: none is above it, and all read without.

DP-SGD at a multiplier z on each of 4 clients adds noise of 2 z to their sum, in units of what one
example adds at most. What the public examples state at this noise holds for any server.
"""

import pytest
import torch

from leakbound import models
from leakbound.attacks import Fishing, Loki, RobbingTheFed
from leakbound.core import Batch, Server, Task, ThreatModel
from leakbound.defenses import DpSgd, SecureAggregation, chain
from leakbound.pairing import squared_distances
from leakbound.protocol import play
from leakbound.randomness import stream

from . import domains, matrix

CLIENTS, EACH, ROUNDS, PSNR = 4, 8, 6, 20.0
SERVERS = {
    "fishing": (Fishing("linear_inversion", "class", label=1), 1),
    "fishing one": (Fishing("linear_inversion", expected=EACH), 1),
    "loki": (Loki(bins=64), 30),
    "robbing_the_fed": (RobbingTheFed(bins=64), 30),
}


def read(attack, noise):
    """How many of how many images are within 20 dB of any answer: more than the attack may claim"""
    domain = domains.mnist()
    public = torch.from_numpy(domain.rows).float().view(-1, 1, 28, 28)
    known = Batch(public, torch.from_numpy(domain.labels).long())
    order = torch.randperm(len(domain.held_rows), generator=stream(0, "sums"))
    hits = 0
    for seed in range(ROUNDS):
        net = models.mlp(
            input_shape=(1, 28, 28), classes=10, generator=stream(seed, "model"), hidden=(64,)
        )
        task, batches = Task.of(net, classes=10, public=known), []
        for part in order[seed * CLIENTS * EACH :][: CLIENTS * EACH].split(EACH):
            images = torch.from_numpy(domain.held_rows[part]).float().view(-1, 1, 28, 28)
            batches.append(Batch(images, torch.from_numpy(domain.held_labels[part]).long()))
        defense = chain(DpSgd(10.0, noise), SecureAggregation(CLIENTS))
        sources = [stream(seed, "noise", i) for i in range(CLIENTS + 1)]
        threat = ThreatModel(server=Server.MALICIOUS)
        seen = play(task, batches, defense, sources, threat=threat, attack=attack)
        answer = attack(seen.observation, stream(seed, "attack"))
        away = squared_distances(seen.truth.inputs, answer.inputs).amin(1)
        hits += int((away <= matrix.eta_of(PSNR)).sum())
    return hits, ROUNDS * CLIENTS * EACH


@pytest.mark.parametrize("name", SERVERS)
def test_no_server_is_above_a_statement_on_a_sum(name):
    attack, least = SERVERS[name]
    quiet, _ = read(attack, 1e-6)
    assert quiet >= least
    domain = domains.mnist()
    for noise in (0.15, 0.5):
        value = float(domain.stated[False].success_bound(2 * noise, matrix.eta_of(PSNR))[0][0])
        assert value < matrix.OPEN
        found, n = read(attack, noise)
        one = matrix.Statement(domain, False, PSNR, 2 * noise, value)
        assert not matrix.Pair(one, name, found, n).beaten, (found, n, value)
