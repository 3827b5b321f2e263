"""Structured covariances against dense algebra and against the noise that they color."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from leakbound.covariance import Kronecker, LowRank, Structured
from leakbound.randomness import normal, stream

close = torch.testing.assert_close
DRAWS = 40_000


def _draw(shape, name, dtype=torch.float64):
    return normal(shape, stream(0, "covariance", name), like=torch.zeros((), dtype=dtype))


def _spd(size, name):
    half = _draw((size, size + 2), name)
    return half @ half.T / size + 0.2 * torch.eye(size, dtype=torch.float64)


def _scale(size):
    return torch.linspace(0.3, 2.1, size, dtype=torch.float64)


def _low_rank():
    """Two blocks with a gap before, between and after them; the dense matrix by hand."""
    diagonal, first, second = _scale(14), _draw((4, 2), "u"), 3 * _draw((5, 1), "v")
    dense = torch.diag(diagonal)
    dense[1:5, 1:5] += first @ first.T
    dense[7:12, 7:12] += second @ second.T
    return Structured.of(diagonal, [(1, 5, first), (7, 12, second)]), dense


def _whole():
    """One block over everything, of more columns than rank."""
    diagonal, factor = _scale(7), _draw((7, 2), "whole")
    factor = torch.cat([factor, factor @ _draw((2, 3), "mix")], 1)
    return Structured.of(diagonal, [(0, 7, factor)]), torch.diag(diagonal) + factor @ factor.T


def _kronecker(left, right, at=2, size=18):
    def full(side):
        return torch.diag(side) if side.ndim == 1 else side

    scale, root = _scale(size), torch.eye(size, dtype=torch.float64)
    stop = at + len(left) * len(right)
    root[at:stop, at:stop] = torch.from_numpy(np.kron(full(left).numpy(), full(right).numpy()))
    dense = scale[:, None] * root * scale
    return Structured(scale, (Kronecker.of(at, left, right),)), dense


def _mixed():
    """A Kronecker block and a low-rank one, side by side without a gap."""
    one, dense = _kronecker(_spd(2, "l"), _spd(3, "r"), at=0, size=10)
    factor = _draw((4, 2), "w")
    low = Structured.of(torch.ones(4).double(), [(0, 4, factor)]).blocks[0]
    moved = LowRank(6, 10, low.basis, low.gain)
    inner = torch.eye(4, dtype=torch.float64) + factor @ factor.T
    dense[6:, 6:] = one.scale[6:, None] * inner * one.scale[6:]
    return Structured(one.scale, (*one.blocks, moved)), dense


LEFT, RIGHT = torch.tensor([0.5, 1.0, 3.0]).double(), torch.tensor([2.0, 0.1, 1.0, 0.7]).double()
CASES = {
    "plain": lambda: (Structured.of(_scale(6)), torch.diag(_scale(6))),
    "low_rank": _low_rank,
    "whole": _whole,
    "kronecker": lambda: _kronecker(_spd(3, "a"), _spd(4, "b")),
    "left_vector": lambda: _kronecker(LEFT, _spd(4, "b")),
    "right_vector": lambda: _kronecker(_spd(3, "a"), RIGHT),
    "both_vectors": lambda: _kronecker(LEFT, RIGHT),
    "mixed": _mixed,
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]()


def test_dense_and_diagonal_are_what_they_say(case):
    shape, dense = case
    close(shape.dense(), dense)
    close(shape.diagonal, dense.diagonal())
    assert not torch.allclose((shape * 1.01).dense(), dense, rtol=1e-4)


def test_whiten_undoes_color(case):
    shape, dense = case
    rows = _draw((5, len(dense)), "rows")
    close(shape.whiten(shape.color(rows)), rows)
    close(shape.color(shape.whiten(rows)), rows)
    if not torch.equal(dense, torch.diag(dense.diagonal())):
        assert not torch.allclose(shape.color(rows), rows * dense.diagonal().sqrt(), rtol=0.01)


def test_whitened_lengths_are_those_of_the_precision(case):
    shape, dense = case
    rows = _draw((5, len(dense)), "rows")
    distance = (shape.whiten(rows) ** 2).sum(1)
    close(distance, torch.einsum("ri,ij,rj->r", rows, torch.linalg.inv(dense), rows))


def _white_chance(draws, dense):
    """How likely draws are for N(0, dense), by their energy and correlations after a Cholesky."""
    root = np.linalg.cholesky(dense.numpy())
    white = np.linalg.solve(root, draws.T.numpy())
    count, size = white.shape[1], len(white)
    moment = white @ white.T / count - np.eye(size)
    # entries are independent to first order: variance 2/n on the diagonal, 1/n beside it
    z = moment[np.triu_indices(size)] * math.sqrt(count)
    z[np.cumsum([0, *range(size, 1, -1)])] /= math.sqrt(2)
    return stats.chi2.sf((z**2).sum(), len(z))


def test_colored_noise_has_the_covariance(case):
    shape, dense = case
    draws = shape.color(_draw((DRAWS, len(dense)), "noise"))
    assert _white_chance(draws, dense) > 1e-4
    assert _white_chance(1.03 * draws, dense) < 1e-6
    if not torch.equal(dense, torch.diag(dense.diagonal())):
        assert _white_chance(draws, torch.diag(dense.diagonal())) < 1e-6
    uncolored = _draw((DRAWS, len(dense)), "noise") * dense.diagonal().sqrt()
    whitened = shape.whiten(draws)
    assert _white_chance(whitened, torch.eye(len(dense), dtype=torch.float64)) > 1e-4
    assert not torch.allclose(whitened, uncolored)


def test_a_factor_scales_the_covariance(case):
    shape, dense = case
    close((shape * 2.5).dense(), 2.5 * dense)
    close((shape * 2.5).diagonal, 2.5 * dense.diagonal())
    close(shape.dense(), dense)  # the first is as it was


def test_it_moves_to_another_type(case):
    shape, dense = case
    single = shape.to(torch.zeros((), dtype=torch.float32))
    rows = _draw((3, len(dense)), "rows")
    assert single.scale.dtype == single.color(rows.float()).dtype == torch.float32
    close(single.dense(), dense.float(), rtol=1e-4, atol=1e-4)
    assert shape.color(rows.float()).dtype == torch.float32  # a double root takes single rows
    close(shape.color(rows.float()), shape.color(rows).float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_a_bad_diagonal_is_refused(bad):
    with pytest.raises(ValueError, match="finite and above zero"):
        Structured.of(torch.tensor([1.0, bad]))


@pytest.mark.parametrize("left", [True, False])
def test_a_factor_that_is_not_positive_definite_is_refused(left):
    good, bad = torch.eye(2), torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    with pytest.raises(ValueError, match=r"eigenvalue -1\.0"):
        Kronecker.of(0, *((bad, good) if left else (good, bad)))
    with pytest.raises(ValueError, match=r"eigenvalue 0\.0"):
        Kronecker.of(0, good, torch.tensor([1.0, 0.0]))


@pytest.mark.parametrize("factor", [0.0, -2.0, math.nan])
def test_only_a_positive_number_scales(factor):
    with pytest.raises(ValueError, match="factor is"):
        Structured.of(torch.ones(2)) * factor


def test_a_factor_of_zeros_or_without_columns_adds_nothing():
    for factor in (torch.zeros(2, 3), torch.zeros(2, 0)):
        close(Structured.of(torch.ones(3), [(0, 2, factor)]).dense(), torch.eye(3))


def test_equality_is_by_value():
    for make in (_low_rank, _whole, _mixed):
        one, other = make()[0], make()[0]
        assert one is not other
        assert one.equals(other)
        assert not one.equals(other * 2.0)
        assert not one.equals(Structured(one.scale))
        assert not one.equals(one.to(torch.zeros((), dtype=torch.float32)))
