"""Both bounds of correlated noise against printed values, simulation and independent searches."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from leakbound import correlation
from leakbound.bounds import conversions, correlated
from leakbound.bounds.composition import subsampled, visible
from leakbound.bounds.correlated import (
    Factor,
    Scheme,
    balls_in_bins,
    squared_sensitivity,
)
from leakbound.bounds.from_scratch import exact
from leakbound.bounds.identification import gaussian, log_kappa_sphere

T, P = 16, (0, 4, 8, 12)
EVERY = ("none", "root", "tree", "tree_prefixes", "band:4", "bisr:4", "blt:0.9,0.5/0.1,0.2")


def own_rounds(factor, pattern):
    """The noise of a mean over the unit's own releases, over sigma: weaker than 1 / |C p|."""
    return float(np.linalg.norm(factor.inverse[list(pattern)].sum(0))) / len(pattern)


def final_model(factor, pattern):
    """The noise of the sum of all releases, over sigma and the unit's number of rounds."""
    return float(np.linalg.norm(factor.inverse.sum(0))) / len(pattern)


def close(value, printed):
    """Equal to the printed digits."""
    digits = len(printed.partition(".")[2])
    return abs(value - float(printed)) <= 0.50001 * 10.0**-digits


@pytest.mark.parametrize(
    ("name", "column", "together", "best", "own", "final"),
    [
        ("band:4", "1.219951", "2.439903", ".409852", ".651926", ".506017"),
        ("root", "1.394231", "3.715221", ".269163", ".536373", ".348558"),
        ("bisr:4", "1.273641", "3.109413", ".321604", ".548213", ".407750"),
        ("tree", "2.236068", "6.000000", ".166667", None, None),
        ("tree_prefixes", "2.236068", None, None, None, None),
    ],
)
def test_printed_factors(name, column, together, best, own, final):
    factor = Factor.parse(name, T)
    assert close(factor.sensitivity(Scheme(most=1)), column)
    if together:
        assert close(factor.sensitivity(P), together)
        assert close(factor.attained(P), together)
        assert close(1 / factor.attained(P), best)
    if own:
        assert close(own_rounds(factor, P), own)
        assert close(final_model(factor, P), final)
        assert own_rounds(factor, P) > 1 / np.sqrt(len(P))  # worse than white noise


def test_prefix_sums_and_the_tree():
    sums = Factor(np.tri(T))
    assert close(sums.sensitivity(Scheme(most=1)), "4.000000")
    assert close(sums.attained(P), "10.954451")
    assert Factor.parse("tree", T).attained(P) ** 2 == 36
    seen = np.diag(Factor.parse("tree_prefixes", T).gram)
    assert seen.tolist() == [1 + format(j, "04b").count("0") for j in range(T)]
    assert np.diag(Factor.parse("tree", T).gram).tolist() == [5.0] * T
    # rounds that are no power of two: all nodes over them
    assert np.allclose(Factor.parse("tree", 11).gram, Factor.parse("tree", 16).gram[:11, :11])
    assert Factor.parse("tree", 1).matrix.tolist() == [[1.0]]


@pytest.mark.parametrize(
    ("name", "noise", "dim", "how", "printed"),
    [
        ("band:4", 0.6, 32, "best", ".11651"),
        ("band:4", 0.6, 32, "own", ".00722"),
        ("band:4", 0.6, 32, "final", ".03344"),
        ("tree", 1.5, 32, "best", ".10610"),
        ("tree", 1.5, 32, "final", ".06866"),
        ("bisr:4", 0.8, 32, "best", ".08994"),
        ("bisr:4", 0.8, 32, "final", ".02158"),
        ("band:4", 0.0875, 784, "best", ".47148"),
        ("band:4", 0.0875, 784, "own", ".00000"),
        ("tree", 0.215, 784, "best", ".47876"),
    ],
)
def test_printed_success(name, noise, dim, how, printed):
    factor = Factor.parse(name, T)
    level = {"dim": dim, "eta": 0.5 / dim}
    if how == "best":
        assert close(exact(noise / factor.attained(P), **level), printed)
    share = {"own": own_rounds(factor, P), "final": final_model(factor, P)}.get(how)
    if share:
        assert close(exact(noise * share, **level), printed)
        assert share >= 1 / factor.attained(P)


def success(factor, sigma, weights, dim, draws, seed):
    """How often the best estimator meets e = 0.5 from the weighted sum of Y over rounds, simulated
    from Y = C G + sigma Z.
    """
    draw = np.random.default_rng(seed)
    truth = np.zeros(dim)
    truth[0] = 1
    signal = factor.matrix[:, list(P)].sum(1)
    found = 0
    for _ in range(draws // 1000):
        white = draw.standard_normal((1000, len(signal), dim))
        seen = np.einsum("n,bnd->bd", weights, signal[:, None] * truth + sigma * white)
        cosine = seen[:, 0] / np.linalg.norm(seen, axis=1)
        found += int((cosine >= np.sqrt(0.5)).sum())
    return found / draws


@pytest.mark.parametrize("name", EVERY)
def test_the_lower_bound_is_attained(name):
    factor, dim, draws = Factor.parse(name, T), 8, 20_000
    sigma = 0.4 * factor.attained(P)
    best = factor.matrix[:, list(P)].sum(1) / factor.attained(P) ** 2
    value = exact(sigma / factor.attained(P), dim=dim, eta=0.5 / dim)
    found = success(factor, sigma, best, dim, draws, seed=3)
    assert abs(found - value) < 4 * np.sqrt(value * (1 - value) / draws)
    own = exact(sigma * own_rounds(factor, P), dim=dim, eta=0.5 / dim)
    assert own <= value


def test_weights_on_releases_have_the_least_noise():
    for name in EVERY:
        factor = Factor.parse(name, T)
        weights = factor.weights(P)
        assert np.isclose(weights[list(P)].sum(), 1)
        noise = np.linalg.norm(factor.inverse.T @ weights)
        assert np.isclose(noise, 1 / factor.attained(P))
        other = weights.copy()
        other[[0, 4]] += 0.01, -0.01
        assert np.linalg.norm(factor.inverse.T @ other) > noise


def test_counterexamples_of_signed_factors():
    plane = np.array([[1, -0.5, -0.5], [0, 3**0.5 / 2, -(3**0.5) / 2]])
    gram = plane.T @ plane
    signs = max(np.array(s) @ gram @ np.array(s) for s in itertools.product((1, -1), repeat=3))
    assert np.isclose(np.sqrt(abs(gram.sum())), 0, atol=1e-7)
    assert np.isclose(np.sqrt(signs), 2)
    assert close(np.sqrt(squared_sensitivity(gram)), "2.12132")
    assert close(np.sqrt(np.abs(gram).sum()), "2.44949")
    signed = Factor(np.eye(6) + np.diag([-0.5] * 5, -1))
    two = Scheme(most=2)
    assert close(signed.sensitivity(two), "1.87083")
    assert close(signed.attained(signed.worst(two)), "1.58114")
    inverse = np.linalg.inv(Factor.parse("bisr:4", T).matrix)
    assert inverse[3, 0] < 0 <= Factor.parse("bisr:4", T).matrix.min()  # signed C^-1, C >= 0


def matrices(draw, rounds, signed):
    own = draw.standard_normal((rounds, rounds)) if signed else draw.random((rounds, rounds))
    return np.tril(own) + np.eye(rounds) * (3 if signed else 0.5)


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(2, 7), st.booleans())
def test_sensitivity_is_above_all_vectors_and_attained_by_some(seed, rounds, signed):
    draw = np.random.default_rng(seed)
    factor = Factor(matrices(draw, rounds, signed))
    pattern = np.flatnonzero(draw.random(rounds) < 0.7)
    pattern = pattern if len(pattern) else np.array([0])
    limit = factor.sensitivity(pattern)
    part = factor.matrix[:, pattern]
    most = factor.attained(pattern)
    for _ in range(200):  # random unit vectors, each then improved one vector at a time
        own = draw.standard_normal((len(pattern), len(pattern) + 1))
        own /= np.linalg.norm(own, axis=1, keepdims=True)
        assert np.linalg.norm(part @ own) <= limit * (1 + 1e-9)
    for _ in range(2000):
        at = draw.integers(len(pattern))
        pull = part[:, at] @ part @ own - (part[:, at] @ part[:, at]) * own[at]
        own[at] = pull / max(np.linalg.norm(pull), 1e-300) if pull.any() else own[at]
    found = max(most, np.linalg.norm(part @ own))
    assert found <= limit * (1 + 1e-9)
    assert limit <= found * (1 + 1e-4)
    assert limit <= np.sqrt(np.abs(factor.gram[np.ix_(pattern, pattern)]).sum()) * (1 + 1e-12)


def test_the_certificate_holds_without_convergence(monkeypatch):
    gram = Factor(matrices(np.random.default_rng(1), 12, True)).gram
    tight = squared_sensitivity(gram)
    monkeypatch.setattr(correlation, "SWEEPS", 2)
    assert tight <= squared_sensitivity(gram) <= np.abs(gram).sum()


def all_patterns(rounds, most, apart):
    for size in range(1, rounds + 1):
        for pattern in itertools.combinations(range(rounds), size):
            gaps = np.diff(pattern)
            if size <= (most or rounds) and (size == 1 or gaps.min() >= apart):
                yield pattern


@pytest.mark.parametrize("most", [None, 1, 2, 3])
@pytest.mark.parametrize("apart", [1, 2, 3, 8])
def test_schemes(most, apart, monkeypatch):
    scheme, rounds = Scheme(most, apart), 7
    every = list(all_patterns(rounds, most, apart))
    listed = list(scheme.patterns(rounds))
    assert {*listed} <= {*every}
    assert len({*listed}) == len(listed)
    assert all(any({*p} <= {*q} for q in listed) for p in every)
    assert max(map(len, every)) == scheme.most_of(rounds)
    draw = np.random.default_rng(0)
    factors = [Factor.parse(name, rounds) for name in (*EVERY, "band:2")]
    factors += [Factor(matrices(draw, rounds, signed)) for signed in (False, True)]
    for factor in factors:
        true = max(factor.sensitivity(p) for p in every)
        limit = factor.sensitivity(scheme)
        assert true * (1 - 1e-12) <= limit
        assert limit <= true * (1 + 1e-9), factor.name
        assert factor.attained(factor.worst(scheme)) <= limit * (1 + 1e-12)
        if factor.gram.min() >= 0:
            assert np.isclose(factor.attained(factor.worst(scheme)), true)
        assert np.sqrt(factor._rows_bound(scheme)) >= true * (1 - 1e-12)
    monkeypatch.setattr(correlation, "FEW", 0)
    for factor in factors:
        assert factor.sensitivity(scheme) >= max(factor.sensitivity(p) for p in every) - 1e-9
        assert factor.attained(factor.worst(scheme)) <= factor.sensitivity(scheme) * (1 + 1e-12)


def test_disjoint_columns_have_any_sign():
    signed = Factor(np.eye(16) + np.diag([-0.5] * 15, -1))
    expected = np.sqrt(sum(signed.gram[i, i] for i in (0, 2, 4, 6, 8, 10, 12, 14)))
    assert np.isclose(signed.sensitivity(Scheme(separation=2)), expected)
    assert np.isclose(signed.sensitivity(Scheme(3, 2)), np.sqrt(3 * 1.25))


def test_many_rounds_are_quick():
    long = Factor.parse("tree", 1024)
    assert long.sensitivity(Scheme(separation=64)) >= long.attained(
        long.worst(Scheme(separation=64))
    )
    assert Factor.parse("band:8", 2000).sensitivity(Scheme(10, 8)) > 0


@settings(max_examples=200)
@given(
    st.integers(0, 10**6),
    st.sampled_from([*EVERY, "random", "signed"]),
    st.integers(1, 12),
    st.floats(0.05, 20),
    st.sampled_from([2, 3, 16, 100, 784]),
    st.floats(0.01, 0.99),
)
def test_the_lower_bound_is_below_the_upper(seed, name, rounds, sigma, dim, e):
    draw = np.random.default_rng(seed)
    if name in ("random", "signed"):
        factor = Factor(matrices(draw, rounds, name == "signed"))
    else:
        factor = Factor.parse(name, rounds)
    pattern = draw.permutation(rounds)[: draw.integers(1, rounds + 1)]
    level = {"dim": dim, "eta": e / dim}
    low = exact(sigma / factor.attained(pattern), **level)
    log_kappa = log_kappa_sphere(**level)
    high = gaussian(sigma / factor.sensitivity(pattern), log_kappa=log_kappa)
    every = gaussian(sigma / factor.sensitivity(Scheme()), log_kappa=log_kappa)
    assert np.exp(log_kappa) * (1 - 1e-9) <= low <= high * (1 + 1e-9) <= every * (1 + 1e-6)


def test_an_adaptive_unit_stays_below():
    """Each u follows the last output: the likelihood-ratio test still stays below."""
    factor, mu, count = Factor.parse("root", 6), 1.5, 200_000
    sigma = factor.sensitivity(Scheme()) / mu
    draw = np.random.default_rng(5)
    powers = {}
    scores = []
    for present in (False, True):
        past = [np.zeros((count, 2))]
        units, score = [], np.zeros(count)
        for t in range(6):
            last = past[-1] + [1e-9, 0]
            units.append(last / np.linalg.norm(last, axis=1, keepdims=True))
            shift = sum(factor.matrix[t, s] * units[s] for s in range(t + 1))
            seen = present * shift + sigma * draw.standard_normal((count, 2))
            score += (seen * shift).sum(1) / sigma**2 - (shift**2).sum(1) / (2 * sigma**2)
            past.append(seen)
        scores.append(score)
    for kappa in (1e-2, 1e-3):
        powers[kappa] = float((scores[1] > np.quantile(scores[0], 1 - kappa)).mean())
        limit = gaussian(sigma / factor.sensitivity(Scheme()), kappa=kappa)
        error = 4 * np.sqrt(limit / count) + 8 * np.sqrt(kappa / count)
        assert kappa < powers[kappa] < limit + error
    assert close(gaussian(1 / mu, kappa=1e-2), ".2043")
    assert close(gaussian(1 / mu, kappa=1e-3), ".0559")


@pytest.mark.parametrize(
    ("bins", "mu", "kappa", "printed"),
    [(10, 1, 1e-3, ".004333"), (10, 2, 1e-3, ".04377"), (100, 2, 1e-3, ".01280")],
)
def test_printed_balls_in_bins(bins, mu, kappa, printed):
    value = balls_in_bins(1 / mu, factor=Factor.parse("none", bins), bins=bins, kappa=kappa)
    assert close(value, printed)
    epochs = balls_in_bins(3 / mu, factor=Factor.parse("none", 9 * bins), bins=bins, kappa=kappa)
    assert np.isclose(epochs, value)  # 9 epochs at three times the noise


def power(means, kappa, sigma=1.0, other=None, count=300_000, seed=0):
    """Power of the best test of the mean over normals at `means` (b, n) against `other`.

    From draws of P: Q(L > t) = E_P 1 / L over L > t. Also its standard error.
    """
    draw = np.random.default_rng(seed)
    means, other = means / sigma, (np.zeros_like(means[:1]) if other is None else other / sigma)
    x = means[draw.integers(len(means), size=count)] + draw.standard_normal((count, means.shape[1]))

    def log_density(centers):
        own = x @ centers.T - (centers**2).sum(1) / 2
        return special.logsumexp(own, axis=1) - np.log(len(centers))

    ratio = log_density(means) - log_density(other)
    order = np.argsort(-ratio)
    below = np.cumsum(np.exp(-ratio[order])) / count
    found = int(np.searchsorted(below, kappa)) / count
    return found, np.sqrt(found * (1 - found) / count) * 2


@pytest.mark.parametrize(("bins", "mu", "kappa"), [(10, 1, 1e-3), (3, 0.5, 1e-2), (5, 4, 1e-4)])
def test_balls_in_bins_are_simulated(bins, mu, kappa):
    value = balls_in_bins(1 / mu, factor=Factor.parse("none", bins), bins=bins, kappa=kappa)
    found, error = power(mu * np.eye(bins), kappa)
    assert abs(found - value) < 4 * error
    assert kappa <= value <= gaussian(1 / mu, kappa=kappa)


def test_balls_in_bins_err_upwards(monkeypatch):
    cases = [(10, 1.0, 1e-3), (100, 2.0, 1e-6), (7, 5.0, 1e-3), (4, 0.01, 0.3), (1000, 3.0, 1e-4)]
    values = [correlated._on_axes(mu, bins, kappa) for bins, mu, kappa in cases]
    monkeypatch.setattr(correlated, "CELLS", 2**17)
    finer = [correlated._on_axes(mu, bins, kappa) for bins, mu, kappa in cases]
    for coarse, fine in zip(values, finer, strict=True):
        assert fine * (1 - 1e-7) <= coarse <= fine * (1 + 1e-3)
    assert correlated._on_axes(1.0, 1, 1e-3) == pytest.approx(gaussian(1.0, kappa=1e-3), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "printed"), [("band:4", 0.0906), ("root", 0.0933), ("tree", 0.1117)]
)
def test_bins_of_correlated_factors(name, printed):
    factor = Factor.parse(name, T)
    means = np.array([factor.matrix[:, j::4].sum(1) for j in range(4)])
    longest = np.linalg.norm(means, axis=1).max()
    found, error = power(means, 1e-3, sigma=longest / 2)
    assert abs(found - printed) < 0.001 + 4 * error
    value = balls_in_bins(longest / 2, factor=factor, bins=4, kappa=1e-3)
    assert found - 4 * error < value <= gaussian(0.5, kappa=1e-3)
    assert close(gaussian(0.5, kappa=1e-3), ".137805")


def test_printed_cyclic_poisson():
    """Groups of b = 2 in turn, each by Poisson sampling of rate 0.2: 4 turns of 8 rounds."""
    for factor in (Factor.parse("none", 8), Factor.parse("band:2", 8)):
        sigma = np.sqrt(factor.gram.max())
        noise, run = sigma / np.sqrt(np.diag(factor.gram).max()), {"sampling_rate": 0.2, "steps": 4}
        assert close(subsampled(noise, kappa=1e-2, **run), ".04324")
        assert close(subsampled(noise, kappa=1e-3, **run), ".00814")


def test_printed_shuffled():
    assert close(gaussian(1.0, steps=10, kappa=1e-3), ".528717")
    assert close(conversions.epsilon(1.0, delta=1e-5, steps=10), "17.8566")
    assert close(visible(1.0, sampling_rate=0.01, steps=1000, kappa=1e-3), ".512164")
    own, bins = 3 * np.eye(100), 1e-3
    found, error = power(2 * own, bins, other=own)
    assert abs(found - 0.468) < 0.006 + 4 * error
    assert found - 4 * error < gaussian(1 / 3, kappa=1e-3)


def test_words_and_files(tmp_path):
    for name in EVERY:
        assert Factor.parse(name, 8).name == name
    assert np.allclose(Factor.parse("band:1", 8).matrix, np.eye(8))
    assert np.allclose(Factor.parse("band:9", 8).matrix, Factor.parse("root", 8).matrix)
    assert Factor.parse("root", T).matrix @ Factor.parse("root", T).matrix == pytest.approx(
        np.tri(T)
    )
    path = tmp_path / "C.npy"
    np.save(path, Factor.parse("root", 9).matrix)
    assert np.allclose(Factor.parse(str(path), 5).matrix, Factor.parse("root", 5).matrix)
    with pytest.raises(ValueError, match="give one of 12 or more"):
        Factor.parse(str(path), 12)


@pytest.mark.parametrize(
    "text", ["", "bend:4", "band", "band:0", "band:x", "tree:2", "blt:1", "blt:1/1,2"]
)
def test_unknown_words(text):
    with pytest.raises(ValueError, match="give none, root, tree"):
        Factor.parse(text, 8)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (np.ones(3), "shape"),
        (np.ones((2, 3)), "shape"),
        (np.zeros((0, 0)), "shape"),
        (np.diag([1.0, np.nan]), "not finite"),
        (np.diag([1.0, 1e200]), "not finite"),
        (np.diag([1.0, 0.0]), "rank"),
        (np.array([["a"]]), "numbers"),
        (np.array([{}]), "pickle"),
    ],
)
def test_bad_files(value, complaint, tmp_path):
    np.save(tmp_path / "C.npy", value)
    with pytest.raises(ValueError, match=complaint):
        Factor.of_file(tmp_path / "C.npy")


def test_files_that_are_none_or_too_large(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"give a \.npy file"):
        Factor.of_file(tmp_path / "none.npy")
    (tmp_path / "text.npy").write_text("no array")
    with pytest.raises(ValueError, match=r"give a \.npy file"):
        Factor.of_file(tmp_path / "text.npy")
    np.save(tmp_path / "C.npy", np.eye(9))
    monkeypatch.setattr(correlation, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match="more than 100"):
        Factor.of_file(tmp_path / "C.npy")


def test_bad_arguments():
    band = Factor.parse("band:4", 8)
    for pattern in ([], [0, 0], [8], [-1]):
        with pytest.raises(ValueError, match="different rounds from 0 to 7"):
            band.sensitivity(pattern)
    for bad in ({"most": 0}, {"separation": 0}):
        with pytest.raises(ValueError):
            Scheme(**bad)
    with pytest.raises(ValueError, match="at most 2048"):
        Factor.parse("none", 4096)
    with pytest.raises(ValueError, match="symmetric"):
        squared_sensitivity([[1, 2], [0, 1]])
    for numbers in ("2/0.1", "0.9/inf", "0,0.5/1e999,1", "0.9,0.5/1e308,1e308", "nan/1"):
        with pytest.raises(ValueError, match=re.escape(f"mechanism is 'blt:{numbers}'; give none")):
            Factor.parse(f"blt:{numbers}", 4)
