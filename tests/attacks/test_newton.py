"""Gauss-Newton: derivatives, the linear solution, and what it reconstructs."""

from __future__ import annotations

import pytest
import torch

import leakbound as lb
from leakbound.attacks import GaussNewton, inverting_gradients
from leakbound.attacks.matching.newton import Linearized, PublicGaussian, _LeastSquares
from leakbound.randomness import normal, stream


def test_linearized_equals_the_whole_jacobian():
    weights = normal((5, 4), stream(0, "w")).double()

    def function(x):
        return torch.tanh(x @ weights.T) * x.sum()

    x = normal((4,), stream(0, "x")).double()
    whole = torch.autograd.functional.jacobian(function, x)
    at = Linearized(function, x)
    v, u = normal((4,), stream(0, "v")).double(), normal((5,), stream(0, "u")).double()
    torch.testing.assert_close(at.value, function(x))
    torch.testing.assert_close(at.push(v), whole @ v)
    torch.testing.assert_close(at.pull(u), whole.T @ u)


def test_linearized_of_a_function_without_a_slope_is_zero():
    at = Linearized(lambda x: (0 * x).sum().expand(3), torch.ones(2))
    assert not at.push(torch.ones(2)).any()
    assert not at.pull(torch.ones(3)).any()


def prior_of(n=40, m=6, wide=2):
    few = normal((n, wide), stream(0, "few")) @ normal((wide, m), stream(0, "mix"))
    public = few + 0.1 * normal((n, m), stream(0, "noise"))
    basis, size, _ = torch.linalg.svd((public - public.mean(0)).T.double() / n**0.5)
    return PublicGaussian(
        public.mean(0).expand(3, m), basis[:, :wide].float(), size[:wide].float(), 0.1
    )


def test_precision_inverts_the_covariance_and_draws_have_it():
    prior = prior_of()
    x = normal((3, 6), stream(1, "x"))
    torch.testing.assert_close(prior.precision(prior.covariance(x)), x, rtol=1e-4, atol=1e-4)
    source = stream(0, "draws")
    drawn = torch.cat([prior.draw(source) - prior.mean for _ in range(4000)]).double()
    covariance = torch.stack([prior.covariance(e.expand(3, 6))[0] for e in torch.eye(6)]).double()
    error = (drawn.T @ drawn / len(drawn) - covariance).norm() / covariance.norm()
    assert error < 0.05


def test_a_linear_problem_has_the_posterior_mean_in_closed_form():
    prior = prior_of()
    one = PublicGaussian(prior.mean[:1], prior.basis, prior.extra, prior.rest)
    a = normal((4, 6), stream(0, "a"))
    seen, weight = normal((4,), stream(0, "seen")), 0.3
    problem = _LeastSquares(lambda x: x[0] @ a.T, seen, one, weight, (-100.0, 100.0), (one,))
    found, _ = problem.solve(one.mean.clone(), one, GaussNewton(steps=30))
    covariance = torch.stack([one.covariance(e[None])[0] for e in torch.eye(6)]).double()
    inverse = torch.linalg.inv(covariance) * weight
    matrix = a.double().T @ a.double() + inverse
    wanted = torch.linalg.solve(
        matrix, a.double().T @ seen.double() + inverse @ one.mean[0].double()
    )
    torch.testing.assert_close(found[0].double(), wanted, rtol=1e-3, atol=1e-3)


def test_bounds_hold_and_the_rest_is_solved_within_them():
    flat = PublicGaussian(torch.full((1, 2), 0.5), torch.empty(2, 0), torch.empty(0), 1.0)
    seen = torch.tensor([2.0, 0.5])
    problem = _LeastSquares(lambda x: x[0], seen, flat, 0.0, (0.0, 1.0), (flat,))
    found, _ = problem.solve(flat.mean.clone(), flat, GaussNewton(steps=20))
    torch.testing.assert_close(found[0], torch.tensor([1.0, 0.5]), atol=1e-4, rtol=0)


def scene(batch_size, model="lenet", seed=0):
    digits = lb.data.load("digits")
    net = getattr(lb.models, model)(
        input_shape=(1, 8, 8), classes=10, generator=stream(seed, "model")
    )
    return net, digits.batch(torch.arange(1000, 1000 + batch_size)), digits.batch(torch.arange(900))


def quick(net, batch, attack, public, **more):
    return lb.simulate(
        net, batch, attack=attack, public=public, error_bound="none", probability=None, **more
    )


def test_a_batch_that_gradient_matching_misses():
    net, batch, public = scene(4)
    missed = quick(net, batch, inverting_gradients(steps=300), public)
    found = quick(net, batch, GaussNewton(), public)
    assert sorted(missed.scores)[1] < 20
    assert sorted(found.scores)[1] > 30


def test_known_noise_is_weighed_against_the_prior():
    net, batch, public = scene(1, "mlp")
    noise = "gaussian_noise,noise_std=0.1"
    with_prior = quick(net, batch, GaussNewton(), public, defense=noise)
    without = quick(net, batch, GaussNewton(prior="none"), public, defense=noise)
    assert with_prior.scores[0] > without.scores[0] + 1


def test_an_update_of_unknown_length_is_reconstructed():
    net, batch, public = scene(1, "mlp")
    threat = lb.ThreatModel(defense_known=False)
    found = quick(net, batch, GaussNewton(), public, defense="clip,clip_norm=0.1", threat=threat)
    assert found.scores[0] > 30


def test_labels_that_cannot_be_inferred_are_refused():
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 1, bias=False))
    batch = torch.rand(1, 1, 2, 2, generator=stream(0, "x")), torch.tensor([0.3])
    threat = lb.ThreatModel(labels_known=False)
    with pytest.raises(lb.NotApplicable, match="cannot be inferred"):
        quick(net, batch, GaussNewton(), None, threat=threat, loss="mse")
