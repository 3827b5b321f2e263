"""Malicious layers through PyTorch's own optimizers, several steps, batch norm and bfloat16."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import leakbound
from leakbound import data
from leakbound._util import copies
from leakbound.attacks import Fishing, LinearTrap, Loki, RobbingTheFed, TrapWeights
from leakbound.attacks.held import hold, prepared
from leakbound.attacks.planted import in_front, layer_of
from leakbound.core import (
    Batch,
    LocalPlan,
    NotApplicable,
    Observation,
    Server,
    Task,
    ThreatModel,
    Unit,
    Update,
)
from leakbound.defenses import GaussianNoise, SecureAggregation, chain
from leakbound.inspection import inspect
from leakbound.pairing import squared_distances
from leakbound.protocol import play
from leakbound.randomness import stream

MALICIOUS = ThreatModel(server=Server.MALICIOUS, labels_known=False)
RULES = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": 1e-3, "weight_decay": 1e-2},
    "AdamW": {"lr": 1e-3, "weight_decay": 1e-2},
    "RMSprop": {"lr": 1e-3},
    "Adagrad": {"lr": 1e-2},
}
"""PyTorch's optimizers, with the settings that the client has."""


@pytest.fixture(scope="module")
def digits():
    """1000 public digits and 1000 private ones."""
    found = data.load("mnist5k")
    order = torch.randperm(5000, generator=stream(0, "local training"))
    split = (order[:1000], order[1000:2000])
    return [Batch(found.inputs[part], found.labels[part]) for part in split]


def net(norms=False):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8, track_running_stats=False) if norms else nn.Identity()
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2),
        norm,
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 14 * 14, 10),
    )


def perceptron():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(64, track_running_stats=False)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 64), norm, nn.ReLU(), nn.Linear(64, 10)
    )  # fmt: skip


def task_of(digits, name, steps, *, model=None, size=None, dtype=torch.float32):
    more = dict(RULES[name])
    rate = more.pop("lr")
    plan = LocalPlan(steps, rate, batch_size=size, optimizer=name.lower(), **more)
    public = Batch(digits[0].inputs.to(dtype), digits[0].labels)
    model = (model or net()).to(dtype)
    return Task.of(model, plan=plan, classes=10, public=public)


def trained(task, batch, name, *, autocast=None):
    """The weights that PyTorch's optimizer leaves, flat and in float32; `autocast` to a type."""
    model = copies.duplicate(task.model)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for key, value in task.tensors().items():
            tensors[key].data = value.clone()
    rule = getattr(torch.optim, name)(model.requires_grad_().parameters(), **RULES[name])
    size = task.plan.batch_size or batch.size
    for step in range(task.plan.steps):
        at = step * size % batch.size
        rule.zero_grad()
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            output = model(batch.inputs[at : at + size].to(task.parameters))
            loss = task.loss(output, batch.labels[at : at + size])
        loss.backward()
        rule.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).float()


def read(task, attack, batch, name, **how):
    """What the attack makes of the update, by the true images: PSNR (B,) of the nearest answer."""
    after = trained(task, batch, name, **how)
    row = (task.parameters.float() - after) / task.plan.learning_rate
    task = task.to("cpu", torch.float32)
    seen = Observation(
        Update(row[None], Unit.CLIENT, (batch.size,)),
        task,
        (batch.size,),
        (1, 28, 28),
        threat=MALICIOUS,
        auxiliary=task.public,
    )
    return psnr(batch.inputs, attack(seen, stream(0, "attack")).inputs)


def psnr(truth, answers):
    return -10 * squared_distances(truth, answers).amin(1).clamp_min(1e-14).log10()


def some(digits, size, at=0):
    return Batch(digits[1].inputs[at : at + size], digits[1].labels[at : at + size])


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("attack", [RobbingTheFed(bins=64), TrapWeights(rows=64)])
def test_several_steps_of_any_optimizer_leave_the_images(digits, name, attack):
    task = attack.plant(task_of(digits, name, 5))
    assert int((read(task, attack, some(digits, 4), name) >= 60).sum()) >= 3


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop"])
def test_images_of_several_batches(digits, name):
    attack = RobbingTheFed(bins=128)
    task = attack.plant(task_of(digits, name, 6, size=4))
    # A third of 12 images share one of 128 bins with probability below 1e-3.
    assert int((read(task, attack, some(digits, 12), name) >= 60).sum()) >= 8


def with_one(digits, label, size):
    """A batch whose first example alone is of a class."""
    labels = digits[1].labels
    own = (labels == label).nonzero()[:1, 0]
    others = (labels != label).nonzero()[: size - 1, 0]
    at = torch.cat([own, others])
    return Batch(digits[1].inputs[at], labels[at])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("steps", "size"), [(1, None), (5, None), (3, 4)])
@pytest.mark.parametrize("name", RULES)
def test_fishing_through_batch_norm_and_any_optimizer(digits, name, steps, size, dtype):
    attack = Fishing("linear_inversion", "class", label=3)
    task = attack.plant(task_of(digits, name, steps, model=perceptron(), size=size, dtype=dtype))
    assert not task.coupled
    batch = with_one(digits, 3, 12)
    # Weights in bfloat16 keep 8 bits of each change.
    sure = 60 if dtype == torch.float32 else 30
    right = read(task, attack, batch, name) >= sure
    assert right.tolist() == [True] + [False] * 11


def test_the_held_model_computes_what_the_agreed_one_does(digits):
    own = task_of(digits, "AdamW", 5)
    task = hold(prepared(own), own)
    inputs = some(digits, 8).inputs
    plain, held = (leakbound.client.forward(one, inputs) for one in (own, task))
    torch.testing.assert_close(held, plain)
    after = task.with_parameters(trained(task, some(digits, 8), "AdamW"))
    assert bool(after.parameters.any())
    assert torch.equal(leakbound.client.forward(after, inputs), held)
    assert not task.model.train().held.training


def test_a_sum_of_fished_clients(digits):
    attack = Fishing("linear_inversion", "class", label=3)
    task = task_of(digits, "AdamW", 5, model=perceptron())
    clients = [with_one(digits, 3, 8), some(digits, 8, 100), some(digits, 8, 200)]
    streams = [stream(0, "client", i) for i in range(4)]
    seen = play(task, clients, SecureAggregation(3), streams, threat=MALICIOUS, attack=attack)
    answers = attack(seen.observation, stream(0)).inputs
    assert float(psnr(clients[0].inputs[:1], answers)) >= 60


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_batch_norm_in_training_mode(digits, name):
    attack = RobbingTheFed(bins=64)
    task = attack.plant(task_of(digits, name, 10, model=net(norms=True)))
    assert task.coupled
    assert int((read(task, attack, some(digits, 4), name) >= 60).sum()) >= 3


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_mixed_precision_rounds_nothing_of_it(digits, name, kind):
    attack = RobbingTheFed(bins=64)
    task = attack.plant(task_of(digits, name, 3))
    assert int((read(task, attack, some(digits, 4), name, autocast=kind) >= 60).sum()) >= 3


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_weights_in_bfloat16(digits, name):
    attack = RobbingTheFed(bins=64)
    task = attack.plant(task_of(digits, name, 3, dtype=torch.bfloat16))
    assert task.parameters.dtype == torch.bfloat16
    assert int((read(task, attack, some(digits, 4), name) >= 35).sum()) >= 3


def test_the_units_stay_and_the_model_works(digits):
    own = task_of(digits, "AdamW", 10)
    task = RobbingTheFed(bins=64).plant(own)
    batch = some(digits, 8)
    after = task.with_parameters(trained(task, batch, "AdamW"))
    wide = torch.cat([digits[1].inputs.flatten(1), torch.ones(1000, 1)], 1).double()
    trained_part = task.model.part(after.parameters[None])[0].double()
    before = wide @ layer_of(task).T > 0
    assert torch.equal(before, wide @ (layer_of(task) + trained_part).T > 0)
    assert bool(trained_part.any())
    shifted, plain = (leakbound.client.forward(one, batch.inputs) for one in (task, own))
    assert torch.equal(shifted.argmax(1), plain.argmax(1))


def test_neither_a_large_gain_nor_a_trained_layer_survives_steps_of_adam(digits):
    """What the frozen layer and its gain are for."""
    batch = some(digits, 4)
    large = RobbingTheFed(bins=64, gain=1.0)
    task = large.plant(task_of(digits, "AdamW", 5))
    assert int((read(task, large, batch, "AdamW") >= 20).sum()) == 0
    attack = RobbingTheFed(bins=64)
    own = task_of(digits, "AdamW", 5)
    published = in_front(own, *attack._layer(own), 1e-4, "imprint")
    with pytest.raises(NotApplicable, match="5 steps of AdamW"):
        read(published, attack, batch, "AdamW")


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop"])
def test_linear_traps(digits, name):
    attack = LinearTrap(inside=True)
    task = attack.plant(task_of(digits, name, 5))
    assert float(read(task, attack, some(digits, 1), name)) >= 60


def test_lion_keeps_signs_alone(digits):
    task = task_of(digits, "AdamW", 1)
    task = replace(task, plan=LocalPlan(1, 1e-3, optimizer="lion"))
    for attack in (RobbingTheFed(bins=8), TrapWeights(rows=8), Fishing()):
        seen = play(
            task, [some(digits, 2)], chain(), [stream(0, i) for i in range(2)],
            threat=MALICIOUS, attack=attack,
        )  # fmt: skip
        with pytest.raises(NotApplicable, match="signs of gradients"):
            attack(seen.observation, stream(0))


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_sum_of_clients_through_local_steps(digits, name):
    task, attack = task_of(digits, name, 5), Loki(bins=64)
    clients = [some(digits, 4, at) for at in (0, 4, 8)]
    streams = [stream(0, "client", i) for i in range(4)]
    seen = play(task, clients, SecureAggregation(3), streams, threat=MALICIOUS, attack=attack)
    answers = attack(seen.observation, stream(0)).inputs
    assert int((psnr(some(digits, 12).inputs, answers) >= 60).sum()) >= 9


@pytest.mark.parametrize(
    "attack",
    [RobbingTheFed(bins=64), TrapWeights(rows=64), Loki(bins=64), Fishing()],
)
def test_marks_are_found(digits, attack):
    assert inspect(attack.plant(task_of(digits, "AdamW", 5)))
    assert not inspect(task_of(digits, "AdamW", 5))


def test_traps_are_tuned_for_what_all_steps_see(digits):
    """What the default of before, 8, and the rounding of float32 did not read."""
    found = {}
    for expected in (None, 8):
        attack = TrapWeights(rows=128, expected=expected)
        task = attack.plant(task_of(digits, "AdamW", 10, size=4, dtype=torch.bfloat16))
        batches = [some(digits, 40, at) for at in (0, 100, 200)]
        right = [(read(task, attack, one, "AdamW") >= 20).sum() for one in batches]
        found[expected] = int(sum(right))
    print(found)
    assert found[None] >= 2 * found[8]


@pytest.mark.parametrize("attack", [RobbingTheFed(bins=64), TrapWeights(rows=64)])
def test_neither_noise_nor_another_client_is_exposed(digits, attack):
    own = task_of(digits, "AdamW", 5)
    batch = some(digits, 4)
    more = {"attack": attack, "plan": own.plan, "public": digits[0], "threat": MALICIOUS}
    alone = leakbound.simulate(net(), batch, **more, classes=10)
    assert alone.verdict.startswith("exposed")
    noisy = leakbound.simulate(net(), batch, defense=GaussianNoise(1.0), **more, classes=10)
    assert not noisy.verdict.startswith("exposed")
    # The images of this client, with those of another one as the truth.
    answers = alone.reconstruction
    assert float(psnr(some(digits, 4, 100).inputs, answers).max()) < 20


@pytest.mark.parametrize("known", [True, False])
def test_the_server_plans_for_the_local_steps_that_a_defense_gives(digits, known):
    defense = "local_aggregation,steps=5,learning_rate=0.001,optimizer=adamw,weight_decay=0.01"
    found = leakbound.simulate(
        net(),
        some(digits, 4),
        attack=RobbingTheFed(bins=64),
        defense=defense,
        public=digits[0],
        threat=replace(MALICIOUS, defense_known=known),
        classes=10,
    )
    assert found.verdict.startswith("exposed") is known
