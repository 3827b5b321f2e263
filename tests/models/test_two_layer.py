"""The two-layer network: its law of weights, and that its gradient is the one the theory has."""

import pytest
import torch
from scipy import stats

from leakbound.client import example_gradients, gradient
from leakbound.core import Task
from leakbound.models import two_layer
from leakbound_reproductions.systematic_evaluation import two_layer as theory

SHAPE = (1, 4, 5)


def _model(classes=1, width=600, activation="relu", seed=0):
    source = torch.Generator().manual_seed(seed)
    return two_layer(
        input_shape=SHAPE, classes=classes, generator=source, width=width, activation=activation
    )


def test_shapes_and_no_biases():
    model = _model(classes=3)
    assert [p.shape for p in model.parameters()] == [(600, 20), (3, 600)]
    assert model(torch.zeros(2, *SHAPE)).shape == (2, 3)
    assert not any(module.training for module in model.modules())


def test_the_law_of_the_weights():
    model = _model(classes=4)
    for weights, spread in ((model.inner.weight, 1.0), (model.outer.weight, 1 / 600)):
        draws = weights.detach().double().ravel().numpy() / spread
        assert stats.kstest(draws, "norm").pvalue > 1e-3
        assert stats.kstest(draws, stats.norm(0, 1.3).cdf).pvalue < 1e-3


def test_weights_come_from_the_generator_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, again, other = _model(), _model(), _model(seed=1)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first.inner.weight, again.inner.weight)
    assert not torch.equal(first.inner.weight, other.inner.weight)


@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu"])
def test_its_gradient_is_the_closed_form(activation):
    task = Task.of(
        _model(width=30, activation=activation),
        loss=lambda out, y: (y - out[:, 0]).square().sum(),
    ).to("cpu", torch.float64)
    inputs = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(2)).double()
    targets = torch.tensor([1.0, -1.0, 1.0]).double()
    found = task.unflatten(gradient(task, inputs, targets))
    named = task.unflatten(task.parameters)
    network = theory.TwoLayer(
        named["inner.weight"].numpy(), named["outer.weight"][0].numpy(), activation
    )
    closed = torch.from_numpy(theory.gradient(network, inputs.flatten(1).numpy(), targets.numpy()))
    torch.testing.assert_close(found["outer.weight"][0], closed[:, 0])
    torch.testing.assert_close(found["inner.weight"], closed[:, 1:])


def test_example_gradients_are_vectorized():
    task = Task.of(_model(classes=3, width=16)).to("cpu", torch.float64)
    inputs = torch.rand(3, *SHAPE, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2])
    rows = example_gradients(task, inputs, labels)
    alone = gradient(task, inputs[1:2], labels[1:2])
    torch.testing.assert_close(rows[1], alone)


@pytest.mark.parametrize(
    "wrong", [{"width": 0}, {"activation": "cubic"}, {"classes": 0}, {"width": 2.0}]
)
def test_refuses(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        _model(**wrong)
