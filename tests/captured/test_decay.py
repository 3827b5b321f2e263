"""Weight decay adds a multiple of the known weights to an update: it is found and subtracted."""

import pytest
import torch
from torch import nn

from leakbound import captured, tensors
from leakbound.captured import decay, proofs
from leakbound.core import Task
from leakbound.randomness import normal, stream, uniform

from .flat import attack_update

SHAPE, RATE = (1, 10, 10), 0.1


def mlp(act=nn.ReLU):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(100, 40), act(), nn.Linear(40, 10))


def images(count=1):
    return uniform((count, *SHAPE), stream(0, "decay"))


def trained(own, weight_decay=0.0, *, count=1, steps=1, optimizer=torch.optim.SGD, **more):
    """The weights before and after."""
    before = {k: v.clone() for k, v in own.state_dict().items()}
    given = {"lr": RATE, "weight_decay": weight_decay, **more}
    with_optimizer = optimizer(own.parameters(), **given)
    labels = torch.arange(count) % 10
    for _ in range(steps):
        with_optimizer.zero_grad()
        nn.functional.cross_entropy(own(images(count)), labels).backward()
        with_optimizer.step()
    return before, {k: v.clone() for k, v in own.state_dict().items()}


def found(own, before, after):
    """What is detected in the change of the weights."""
    own.load_state_dict(before)
    task = Task.of(own)
    row = task.parameters - tensors.flat(task, after, what="after")
    capture = captured.load(after, before, kind="weights")
    return decay.detected(task, row, proofs.spread(capture, task, None))


def attacked(after, before, own=mlp, **given):
    return attack_update(
        *(after, own()),
        **{"before": before, "input_shape": SHAPE, "attacks": "linear_inversion", **given},
    )


@pytest.mark.parametrize("act", [nn.ReLU, nn.Sigmoid, nn.Tanh])
@pytest.mark.parametrize("weight_decay", [1e-4, 1e-2, 0.1])
def test_a_decay_hides_no_example(weight_decay, act):
    before, after = trained(mlp(act), weight_decay)
    got = attacked(after, before, lambda: mlp(act), examples=1)
    (record,) = got.records
    assert record.verdict == "exposed (certified)"
    assert "weight decay" in record.certificate
    assert (got.best.inputs - images()).abs().max() < 1e-4
    share = RATE * weight_decay
    assert float(got.inferred[0].decay.split()[0]) == pytest.approx(share, rel=2e-3)


def test_a_change_of_the_weights_shows_it():
    before, after = trained(mlp(), 1e-2)
    update = {k: after[k] - before[k] for k in after}
    got = attacked(update, before, kind="delta", examples=1)
    assert got.records[0].verdict == "exposed (certified)"


def test_a_gradient_with_the_decays_part_shows_it():
    own = mlp()
    nn.functional.cross_entropy(own(images()), torch.tensor([3])).backward()
    update = {k: p.grad + 1e-2 * p.detach() for k, p in own.named_parameters()}
    got = attacked(update, own.state_dict(), kind="gradient", examples=1)
    assert got.records[0].verdict == "exposed (certified)"


def test_a_given_decay_is_subtracted_at_its_rate_and_steps():
    before, after = trained(mlp(), 1e-2, steps=3)
    got = attacked(after, before, weight_decay=1e-2, learning_rate=RATE, steps=3, examples=1)
    assert got.inferred[0].decay == "0.01"
    assert (got.best.inputs - images()).abs().max() < 1e-4
    without = attacked(after, before, weight_decay=0, learning_rate=RATE, steps=3, examples=1)
    assert without.inferred[0].decay is None
    assert without.records[0].certificate is None


@pytest.mark.parametrize(
    ("count", "steps", "more"),
    [(8, 1, {}), (1, 5, {}), (1, 4, {"momentum": 0.9}), (12, 1, {})],
)
def test_the_multiple_is_found_for_batches_and_several_steps(count, steps, more):
    before, after = trained(mlp(), 1e-3, count=count, steps=steps, **more)
    share = 1 - (1 - RATE * 1e-3) ** steps
    got = found(mlp(), before, after)
    assert got.common == pytest.approx(share, rel=1e-2) or (more and got.common > share)


def test_decoupled_decay_is_found():
    before, after = trained(mlp(), 1e-2, optimizer=torch.optim.AdamW)
    assert found(mlp(), before, after).common == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("act", [nn.ReLU, nn.Sigmoid])
@pytest.mark.parametrize("count", [1, 4, 32])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_without_decay_none_is_found(act, count, optimizer):
    before, after = trained(mlp(act), count=count, optimizer=optimizer)
    assert found(mlp(act), before, after) is None


@pytest.mark.parametrize("share", [-1e-2, -9e-7, 1e-7])
def test_weights_that_grew_or_were_only_rounded_show_no_decay(share):
    before, _ = trained(mlp())
    after = {name: value * (1 - share) for name, value in before.items()}
    assert found(mlp(), before, after) is None


def test_groups_without_decay_keep_their_tensors():
    own = mlp()
    before = {k: v.clone() for k, v in own.state_dict().items()}
    weights = [p for p in own.parameters() if p.ndim > 1]
    others = [p for p in own.parameters() if p.ndim == 1]
    groups = [{"params": weights, "weight_decay": 1e-2}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=RATE)
    nn.functional.cross_entropy(own(images()), torch.tensor([3])).backward()
    optimizer.step()
    got = found(own, before, {k: v.clone() for k, v in own.state_dict().items()})
    assert sorted({**got.found, **got.assumed}) == ["1.weight", "3.weight"]


def test_each_tensor_may_have_its_own_multiple():
    """As LAMB does."""
    before, after = trained(mlp(), 0.0)
    for name, share in (("1.weight", 1e-3), ("3.weight", 5e-3), ("3.bias", 2e-3)):
        after[name] = after[name] - share * before[name]
    got = found(mlp(), before, after)
    assert got.common is None
    assert got.found["1.weight"] == pytest.approx(1e-3, rel=1e-2)
    assert got.found["3.weight"] == pytest.approx(5e-3, rel=1e-2)
    assert not got.assumed


def test_what_no_input_touched_does_not_look_touched():
    """Rounding that is left beside a decay is no gradient."""
    own = mlp()
    image = images()
    image[..., :4] = 0
    before = {k: v.clone() for k, v in own.state_dict().items()}
    optimizer = torch.optim.SGD(own.parameters(), lr=RATE, weight_decay=1e-2)
    nn.functional.cross_entropy(own(image), torch.tensor([3])).backward()
    optimizer.step()
    got = attacked({k: v.clone() for k, v in own.state_dict().items()}, before, examples=1)
    seen = got.inferred[0].observation
    columns = (seen.task.unflatten(seen.update.rows[0])["1.weight"] != 0).any(0)
    assert torch.equal(columns, image.flatten() != 0)
    assert "zero values" not in {fact.kind for fact in got.records[0].facts}


def test_a_decay_needs_the_rate_if_the_update_does_not_show_it():
    before, after = trained(mlp())
    with pytest.raises(ValueError, match="give learning_rate too"):
        attacked(after, before, weight_decay=0.1)
    with pytest.raises(ValueError, match="weight_decay is -1"):
        attacked(after, before, weight_decay=-1)


@pytest.mark.parametrize("outputs", [24, 96])
def test_a_matrix_with_its_outputs_in_columns_is_read(outputs):
    """GPT-2's own layers hold (inputs, outputs): their bias is as long as a row."""

    class Columns(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(normal((24, outputs), stream(0, "columns")))
            self.bias = nn.Parameter(normal((outputs,), stream(1, "columns")))

        def forward(self, inputs):
            return inputs @ self.weight + self.bias

    task = Task.of(nn.Sequential(Columns(), nn.ReLU(), nn.Linear(outputs, 3)))
    slope, inputs = normal((outputs,), stream(2, "columns")), normal((24,), stream(3, "columns"))
    own = {"0.weight": torch.outer(inputs, slope), "0.bias": slope}
    own |= {key: torch.zeros_like(value) for key, value in task.tensors().items() if key[0] == "2"}
    row = torch.cat([own[key].flatten() for key in task.tensors()]) + 0.01 * task.parameters
    found = decay.detected(task, row.detach(), torch.full_like(row, 1e-7))
    assert found.found["0.weight"] == pytest.approx(0.01, rel=1e-4)
    assert found.found["0.bias"] == pytest.approx(0.01, rel=1e-4)
