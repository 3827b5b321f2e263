"""Errors listed in docs/errata.md that no other test shows.

Each test holds the printed and the corrected statement against closed forms, counting or draws
from fixed streams, none of which share code with the library. It would fail if the printed one
were right.
"""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, special, stats


def draws(*seed):
    return np.random.default_rng([77, *seed])


# paper A


def test_weyl_needs_the_largest_eigenvalue():
    """Appendix A.1: "lambda_1 being the smallest" makes the bound larger than tr J_B^-1."""
    data, prior = np.eye(2) / 10, np.diag([1.0, 2.0])
    exact = np.trace(np.linalg.inv(data + prior))
    least, largest = (4 / (np.trace(data) + 2 * v) for v in np.linalg.eigvalsh(prior))
    assert largest <= exact < least


def test_the_loss_falls_along_the_gradient_in_the_parameters():
    """Equation 2: U1 is E of grad_Theta L . y; with grad_x it is not what the loss falls by."""
    source = draws(1)
    x, theta, y = source.standard_normal((3, 5))
    loss = lambda weights: (weights @ x - 1) ** 2 / 2  # noqa: E731
    step = 1e-6
    fall = (loss(theta + step * y) - loss(theta - step * y)) / (2 * step)
    residual = theta @ x - 1
    assert fall == pytest.approx(residual * x @ y, rel=1e-6)
    assert abs(fall - residual * theta @ y) > 0.1 * abs(fall)
    assert (residual * x) @ (residual * x) > 0  # what U1 is without a defense: a decrease


def test_each_coordinate_has_its_own_row_of_the_jacobian():
    """Equation 6: the sum of |grad g_i|^2 / Sigma_ii, not of |grad g|^2 / Sigma_ii."""
    source = draws(2)
    jacobian, variance = source.standard_normal((7, 3)), source.lognormal(size=7)
    # Fisher information is twice the divergence of the releases of x and x + h, over h squared
    by_divergence = sum(((jacobian @ h) ** 2 / variance).sum() for h in np.eye(3))
    rows = ((jacobian**2).sum(1) / variance).sum()
    printed = ((jacobian**2).sum() / variance).sum()
    assert rows == pytest.approx(by_divergence, rel=1e-12)
    assert printed > 2 * rows


def test_squared_directional_derivatives_are_chi_square():
    """Lemma 3.8: squares, an inner product and Chebyshev; the statement itself holds."""
    k, slope = 10, np.array([3.0, 4.0])
    z = draws(3).standard_normal((40_000, k, 2))
    inner = z @ slope / 5
    squares, lengths = (inner**2).sum(1), abs(inner).sum(1)
    assert stats.kstest(squares, stats.chi2(k).cdf).pvalue > 0.01
    assert stats.kstest(lengths, stats.chi2(k).cdf).pvalue < 1e-6
    elementwise = (np.linalg.norm(z * slope, axis=2) ** 2).sum(1) / 25
    assert stats.kstest(elementwise, stats.chi2(k).cdf).pvalue < 1e-6
    for epsilon in (0.5, 0.7, 1.0):  # "<= eps" is the complement of "|A - k| > k eps"
        beyond = stats.chi2.cdf(k * (1 - epsilon), k) + stats.chi2.sf(k * (1 + epsilon), k)
        assert np.mean(abs(squares - k) > k * epsilon) == pytest.approx(beyond, abs=0.01)
        assert beyond <= 2 / (k * epsilon**2)


def test_the_frobenius_norm_of_the_covariance_is_no_noise_scale():
    """Figure 8: equal noise of RMS 0.1 on SimpleConvNet's weights has a norm of 3.46."""
    counts = [288, 32, 18_432, 64, 100_352, 32, 320, 10]  # table 1
    assert sum(counts) == 119_530
    assert math.sqrt(sum(counts) * (0.1**2) ** 2) == pytest.approx(3.457, abs=1e-3)


def test_a_mask_chosen_by_the_record_escapes_the_mixed_bound():
    """Equation 14 needs A independent of x; eq. 11 chooses A by x, and A alone tells of it.

    g = (exp(x^2/4 + x/2), exp(x)), x standard normal, noise so large that values tell nothing.
    """
    for x in (-4.0, -1.0, 2.0):
        h, log_first = 1e-6, lambda v: v * v / 4 + v / 2
        ratio = abs(log_first(x + h) - log_first(x - h)) / (2 * h)  # |g_1'| / |g_1|; g_2's is 1
        assert (ratio > 1) == (x > 1 or x < -3)
    often = stats.norm.sf(1) + stats.norm.cdf(-3)
    mean = integrate.quad(lambda x: x * stats.norm.pdf(x), 1, np.inf)[0]
    mean += integrate.quad(lambda x: x * stats.norm.pdf(x), -np.inf, -3)[0]
    error = 1 - mean**2 / often - mean**2 / (1 - often)  # E Var(x | A)
    bound = 1 / (0 + 1)  # m^2 / (E tr J_F + m lambda_1(J_P))
    x = draws(14).standard_normal(400_000)
    seen = (x > 1) | (x < -3)
    drawn = seen.mean() * x[seen].var() + (~seen).mean() * x[~seen].var()
    assert error == pytest.approx(0.580, abs=5e-4)
    assert drawn == pytest.approx(error, abs=0.005)
    assert error < bound


def test_the_least_trace_is_not_the_largest_posterior_error():
    """Theorem 3.5 is of tr J_F: at U2 = -1 eq. 7 always has the least, and the larger
    posterior error than equal noise in most models, but not in all."""
    errors = []
    for seed in range(240):
        source = draws(8, seed)
        jacobian = source.standard_normal((15, 6)) * source.lognormal(0, 0.7, (15, 1))
        squares, g = (jacobian**2).sum(1), abs(source.standard_normal(15))
        noises = [shape / (g**2 @ shape) for shape in (squares**0.5 / g, np.ones(15))]
        assert (squares / noises[0]).sum() < (squares / noises[1]).sum()
        informed = [jacobian.T @ (jacobian / v[:, None]) + np.eye(6) for v in noises]
        errors.append([np.trace(np.linalg.inv(j)) / 6 for j in informed])
    seven, equal = np.transpose(errors)
    assert stats.ttest_rel(seven, equal, alternative="greater").pvalue < 1e-6
    assert np.sum(seven < equal) == 3


def _clamped(scale):
    """E |grad g_P|^2, E g^2 and E g_P^2 for g = w . x, x normal, |w| = `scale` and P = 1."""
    edge = 1 / scale
    inside = 2 * stats.norm.cdf(edge) - 1
    spread = scale**2
    return (
        spread * inside,
        spread,
        spread * (inside - 2 * edge * stats.norm.pdf(edge)) + 2 * stats.norm.sf(edge),
    )


def test_optimal_noise_after_a_clamp_divides_by_the_energy_of_its_budget():
    """Long version, theorem 3: its budget, eq. 11, holds E g_i^2; the printed Sigma divides by
    E g_P,i^2, which leaves more information at the same budget."""
    sample = 1.7 * draws(30).standard_normal(400_000)
    clamped = sample.clip(-1, 1)
    drawn = 1.7**2 * (abs(sample) < 1).mean(), (sample**2).mean(), (clamped**2).mean()
    assert _clamped(1.7) == pytest.approx(drawn, rel=0.01)
    ratios = []
    for seed in range(200):
        moved, energy, kept = _clamped(draws(31, seed).lognormal(sigma=1.0, size=50))
        information = []
        for below in (kept, energy):  # as printed, and as the budget wants
            noise = np.sqrt(moved / below)
            noise /= (energy * noise).sum()  # U2 = -1
            information.append((moved / noise).sum())
        ratios.append(information[0] / information[1])
    assert min(ratios) > 1.14
    assert max(ratios) == pytest.approx(3.99, abs=0.01)
    # without a clamp both are the same
    moved, energy, kept = _clamped(np.array([0.01, 0.02]))
    assert kept == pytest.approx(energy, rel=1e-6)


def test_a_clamp_by_coordinate_is_not_the_clip_of_dp_sgd():
    """Long version, below eq. 10: with Sigma = eps I it "reduces to standard DP-SGD"."""
    gradient, bound = np.array([3.0, 1.0]), 1.0
    clamped = gradient.clip(-bound, bound)
    clipped = gradient * min(1, bound / np.linalg.norm(gradient))
    along = [
        v @ gradient / np.linalg.norm(v) / np.linalg.norm(gradient) for v in (clamped, clipped)
    ]
    assert along == pytest.approx([4 / 20**0.5, 1.0])
    # DP-SGD bounds an example's norm by P, a clamp by sqrt(d) P: 346 times for 119,530 weights
    weights = 119_530
    far = np.full(weights, 2.0).clip(-bound, bound)
    assert np.linalg.norm(far) == pytest.approx(345.73, abs=0.01)
    # a mean of examples is clamped after one of them moved it by more than P / B
    one, rest = np.array([1e3]), np.zeros((9, 1))
    mean = np.concatenate([one[None], rest]).mean(0).clip(-bound, bound)
    assert mean == pytest.approx(bound)


def test_a_pruning_index_needs_the_size_of_the_gradient():
    """Long version, eq. 17: without the absolute value, the sign of g_i decides what is pruned."""
    losses = []
    for seed in range(100):
        source = draws(32, seed)
        gradient, slope = source.standard_normal(60), source.lognormal(size=60)
        left = []
        for index in (slope / abs(gradient), slope / gradient):
            order = np.argsort(index)  # keep the least, the last in part, at 80 % of U1
            energy = (gradient[order] ** 2).cumsum()
            told = (slope[order] ** 2).cumsum()
            left.append(float(np.interp(0.8 * energy[-1], [0, *energy], [0, *told])))
        losses.append(left[1] / left[0])
    assert min(losses) > 1.36
    assert np.median(losses) > 6.5


# paper B

TABLE_4 = {  # B = 8: ours, GradientInversion, Robbing the Fed, CPA
    "noise 0.1": (0.30, 0.31, 0.25, 0.24),
    "prune 0.99": (0.29, 0.30, 0.43, 0.33),
}


def test_the_strongest_attack_has_the_smallest_error():
    """Equation 3 prints max; a useless further attack would make every defense perfect."""
    for row in TABLE_4.values():
        assert min((*row, 0.99)) == min(row)
        assert max((*row, 0.99)) == 0.99
    weakest = {name: np.argmax(row) for name, row in TABLE_4.items()}
    assert weakest == {"noise 0.1": 1, "prune 0.99": 2}  # not what section 5.2 calls strongest


def test_tensor_moments_err_as_one_over_the_root_of_the_width():
    """Proofs of C.1 and C.2 print B^(5/2) / m where Lemma B.5 has B^(5/2) / sqrt(m)."""
    x, errors = np.array([0.6, 0.0, 0.8]), []
    for width, repeats in ((500, 200), (8000, 50)):
        found = []
        for seed in range(repeats):
            w = draws(width, seed).standard_normal((width, 3))
            response = (w @ x) ** 3
            cube = np.einsum("j,ja,jb,jc->abc", response, w, w, w) / width
            first = (response[:, None] * w).mean(0)
            trace = np.einsum("a,bc->abc", first, np.eye(3))
            trace = trace + trace.transpose(1, 0, 2) + trace.transpose(1, 2, 0)
            found.append(((cube - trace - 6 * np.einsum("a,b,c", x, x, x)) ** 2).sum())
        errors.append(math.sqrt(np.mean(found)))
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.25)  # 16 times the width


def test_the_third_hermite_polynomial_has_a_minus():
    """C.12 and C.13 print w^3 + w (x) I; B.4 has the minus that Stein's lemma needs."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    weights = weights / weights.sum()
    assert weights @ (nodes**3 * (nodes**3 - 3 * nodes)) == pytest.approx(6)  # E (w^3)'''
    assert weights @ (nodes**3 * (nodes**3 + 3 * nodes)) == pytest.approx(24)


def test_cauchy_gives_at_least_d_squared():
    """Lemma D.2's proof prints <=; the lemma is right."""
    for seed in range(20):
        root = draws(seed).standard_normal((5, 9))
        matrix = root @ root.T
        assert np.trace(matrix) * np.trace(np.linalg.inv(matrix)) > 25


@pytest.fixture(scope="module")
def orthogonal():
    """Four records of three numbers, read by least squares from y = J^T x + noise: error."""
    source, noise = draws(4), 0.7
    rows = np.linalg.qr(source.standard_normal((40, 12)))[0].T
    guesses = noise * source.standard_normal((20_000, 40)) @ rows.T
    return rows, noise, (guesses**2).sum(1).mean() / 4  # d(S, guess) = mean over records


def test_a_batch_needs_the_factor_one_over_b(orthogonal):
    """Equation 27 lacks it: an unbiased estimator errs a quarter of what it says for B = 4."""
    rows, noise, error = orthogonal
    printed = np.trace(np.linalg.inv(rows @ rows.T)) * noise**2
    assert error == pytest.approx(printed / 4, rel=0.02)
    assert error < printed / 2


def test_two_batches_hold_twice_as_many_records(orthogonal):
    """Proof of E.2: (2B)^2, not B^2, over 2B; the printed floor is four times too small."""
    rows, noise, error = orthogonal
    size, count = (rows**2).sum(), 2  # two batches of B = 2
    assert error == pytest.approx((2 * count) ** 2 * 9 / (2 * count * size) * noise**2, rel=0.02)
    assert count**2 * 9 / (2 * count * size) * noise**2 < 0.3 * error


def test_the_order_of_a_set_is_matched_inside_the_expectation():
    """Equation 1: the right set in random order has error 0, not 1/2."""
    truth, answers = np.array([0.0, 1.0]), [np.array([0.0, 1.0]), np.array([1.0, 0.0])]
    orders = ([0, 1], [1, 0])
    error = [[((truth - a[order]) ** 2).mean() for a in answers] for order in orders]
    assert np.mean(np.min(error, axis=0)) == 0
    assert np.min(np.mean(error, axis=1)) == 0.5


def _delta(noise, epsilon):
    """The exact delta of the Gaussian mechanism of sensitivity 1 (Balle and Wang 2018)."""
    a, b = 1 / (2 * noise) - epsilon * noise, -1 / (2 * noise) - epsilon * noise
    return stats.norm.cdf(a) - math.exp(epsilon) * stats.norm.cdf(b)


def test_noise_for_small_epsilon_grows_as_its_inverse_square():
    """Propositions 2.1 and A.1: variance ~ log(1/delta) / epsilon holds for epsilon >= 1 only."""
    needed = {
        eps: optimize.brentq(lambda s, e=eps: _delta(s, e) - 1e-5, 0.05, 1e4) ** 2
        for eps in (0.01, 0.1, 1.0)
    }
    assert needed[1.0] == pytest.approx(13.9, rel=0.01)
    assert needed[0.01] == pytest.approx(59_431, rel=0.01)
    assert needed[0.1] * 0.1 > 5 * needed[1.0]
    assert needed[0.01] * 0.01 > 5 * needed[0.1] * 0.1
    assert needed[0.01] * 1e-4 == pytest.approx(needed[1.0], rel=0.6)
    enough = math.sqrt(needed[1.0] / 0.01)  # the printed rule, its constant right at epsilon = 1
    assert _delta(enough, 0.01) > 100 * 1e-5


def test_a_tail_is_the_exponential_of_the_log_moment():
    """Lemma A.2 prints delta = min(alpha - lambda eps), which is negative."""
    noise, epsilon, orders = 2.0, 2.0, np.linspace(0, 50, 5001)
    printed = (orders * (orders + 1) / (2 * noise**2) - orders * epsilon).min()
    assert printed < 0
    assert _delta(noise, epsilon) <= math.exp(printed)


def test_weights_join_by_rows_and_output_weights_by_columns():
    """Appendix F: W = [W1; W2] and A = [A1, A2]; as printed they do not fit A s(W x)."""
    source = draws(5)
    inner, outer = source.standard_normal((2, 6, 4)), source.standard_normal((2, 3, 6))
    x = source.standard_normal(4)
    both = np.hstack(outer) @ np.tanh(np.vstack(inner) @ x)
    np.testing.assert_allclose(
        both, sum(a @ np.tanh(w @ x) for a, w in zip(outer, inner, strict=True))
    )
    with pytest.raises(ValueError, match="mismatch"):
        np.vstack(outer) @ np.tanh(np.hstack(inner) @ x)


def test_a_linear_model_sends_inputs_times_their_residuals():
    """Footnote 2: the sum of r_i x_i; it is that of x_i where residuals are equal."""
    source = draws(6)
    x, y, w = source.standard_normal((3, 4)), source.standard_normal(3), source.standard_normal(4)
    weights = torch.tensor(w, requires_grad=True)
    loss = ((torch.from_numpy(x) @ weights - torch.from_numpy(y)) ** 2).sum() / 2
    sent = torch.autograd.grad(loss, weights)[0].numpy()
    np.testing.assert_allclose(sent, (x @ w - y) @ x)
    cosine = sent @ x.sum(0) / np.linalg.norm(sent) / np.linalg.norm(x.sum(0))
    assert abs(cosine) < 0.99


# paper C


def _unbiased(eta, noise, norm, dim):
    return special.gammainc(dim / 2, dim * eta / (2 * noise**2 * norm**2))


def test_a_ratio_of_normals_that_are_not_centered_is_no_cauchy():
    """Equation 13: heavy tails remain, but quartiles do not give them; entries are dependent."""
    top, bottom = draws(7).standard_normal((2, 200_000)), draws(8).standard_normal(200_000)
    ratios = (10 + top) / (10 + bottom) - 1  # s = 10 noise deviations, x = (1, 1)
    spread = np.quantile(ratios[0], 0.999) / np.quantile(ratios[0], 0.75)
    assert spread < 20
    assert stats.cauchy.ppf(0.999) / stats.cauchy.ppf(0.75) > 300
    same = np.mean((ratios[0] > 0) == (ratios[1] > 0))
    assert same == pytest.approx(0.5 + math.asin(0.5) / math.pi, abs=0.005)  # 1/2 if independent


def test_unequal_rows_want_the_matched_filter():
    """Equation 14 divides row by row; with unequal scales that doubles the variance here."""
    scales, noise = np.linspace(0.3, 2, 5), draws(15).standard_normal((5, 100_000))
    plain = ((scales[:, None] + noise) / scales[:, None]).mean(0)
    matched = scales @ (scales[:, None] + noise) / (scales @ scales)
    assert [plain.mean(), matched.mean()] == pytest.approx([1, 1], abs=0.01)
    assert plain.var() > 2 * matched.var()
    assert matched.var() == pytest.approx(1 / (scales @ scales), rel=0.02)


def test_the_gradient_grows_as_the_root_of_the_rows():
    """Proof of Proposition A.2: |G| is "linearly increasing in M"; its square is."""
    lengths = [np.linalg.norm(np.ones((rows, 3))) for rows in (1, 4, 16)]
    assert lengths == pytest.approx([3**0.5, 2 * 3**0.5, 4 * 3**0.5])


def test_with_endless_noise_the_blind_guess_is_left():
    """Section V-A: "approaches zero"; a fixed guess on the circle hits a quarter at e = 1/2."""
    angle = draws(9).uniform(-math.pi, math.pi, 400_000)
    points = np.stack([np.cos(angle), np.sin(angle)])
    guess = np.array([[math.sqrt(0.5)], [0.0]])  # r cos(theta), sin^2(theta) = e
    hit = np.mean(((points - guess) ** 2).sum(0) <= 0.5)
    assert hit == pytest.approx(0.25, abs=0.004)
    assert _unbiased(0.25, 1e6, 1.0, 2) < 1e-12


def test_replacing_a_record_moves_the_normalized_one_by_two():
    """Equation 19 has sensitivity 1 against the empty input only."""
    x = np.array([0.6, -0.8])
    assert np.linalg.norm(x / np.linalg.norm(x) - np.zeros(2)) == pytest.approx(1)
    assert np.linalg.norm(x / np.linalg.norm(x) - -x / np.linalg.norm(-x)) == pytest.approx(2)


def test_mu_is_one_over_the_noise_multiplier():
    """Section II-B.2 prints Delta / sigma, sigma a multiplier (definition II.2)."""
    sensitivity, multiplier, level = 3.0, 0.5, 0.05
    spread = sensitivity * multiplier
    power = stats.norm.sf(stats.norm.isf(level) * spread, sensitivity, spread)
    of_mu = lambda mu: stats.norm.cdf(stats.norm.ppf(level) + mu)  # noqa: E731
    assert power == pytest.approx(of_mu(1 / multiplier))
    assert abs(power - of_mu(sensitivity / multiplier)) > 0.1


def test_a_clip_norm_for_the_least_norm_is_valid_and_looser():
    """Corollary IV.9, last remark."""
    assert _unbiased(0.02, 0.3, 0.5, 8) > _unbiased(0.02, 0.3, 1.0, 8)


def test_a_gray_image_reaches_one_half_always():
    """Section VI's example eta = 0.5: for pixels in [0, 1] no noise can exclude it."""
    images = (draws(10).random((1000, 64)) < 0.5).astype(float)  # the worst: black and white
    assert ((images - 0.5) ** 2).mean(1).max() <= 0.25


def test_another_gradient_map_tells_more_than_the_linear_one():
    """Theorem IV.1 is best among linear layers; N = 2, noise 0.1, e = 0.003, same norm 1."""
    source, noise, width = draws(11), 0.1, math.asin(math.sqrt(0.003))
    t = source.uniform(-math.pi, math.pi, 1500)
    plain = np.stack([np.cos(t), np.sin(t)]) + noise * source.standard_normal((2, 1500))
    wrapped = lambda a: abs((a + math.pi) % (2 * math.pi) - math.pi)  # noqa: E731
    linear = np.mean(wrapped(np.arctan2(plain[1], plain[0]) - t) <= width)
    grid = np.linspace(-math.pi, math.pi, 4096, endpoint=False)
    curve = lambda a: np.stack([f(k * a) for k in (1, 7) for f in (np.cos, np.sin)]) / 2**0.5  # noqa: E731
    seen = curve(t) + noise * source.standard_normal((4, 1500))
    guess = grid[np.argmax(curve(grid).T @ seen, axis=0)]
    assert linear == pytest.approx(0.416, abs=0.05)
    assert np.mean(wrapped(guess - t) <= width) > 0.95


# paper C's repository


def test_a_correlation_takes_deviations_where_the_helper_takes_variances():
    """fmte/ncc.py, exact_ncc: s v / sqrt((s v)^2 + ...) with v the variance; right for v = 1."""
    source, deviation, noise = draws(12), 0.2, 0.3
    x = deviation * source.standard_normal(400_000)
    found = np.corrcoef(x, x + noise * source.standard_normal(400_000))[0, 1]
    assert found == pytest.approx(deviation / math.hypot(deviation, noise), abs=0.005)
    assert abs(found - deviation**2 / math.hypot(deviation**2, noise)) > 0.3


def test_the_least_norm_is_the_conservative_one():
    """experiments/exp09: the largest norm promises the least risk and the largest error."""
    assert _unbiased(0.02, 0.1, 1.0, 8) > _unbiased(0.02, 0.1, 3.0, 8)


def test_a_norm_sink_belongs_into_the_scale():
    """figures.py undoes the trap's own clipping, max(1, |X| sqrt(M) / C), not the whole one."""
    norm, rest, clip = 1.01, 5.0, 1.0
    sent = norm * min(1.0, clip / math.hypot(norm, rest))  # length of the trap's row
    assert sent * max(1, norm / clip) < 0.3 * norm
    assert sent * max(1, math.hypot(norm, rest) / clip) == pytest.approx(norm)


def test_a_range_of_one_flatters_images_of_norm_one():
    """Definition IV.7 takes each image's own range; images of norm 1.01 have far less than 1."""
    image = draws(13).random(3072)
    image = 1.01 * image / np.linalg.norm(image)
    assert 20 * math.log10(1 / np.ptp(image)) > 25  # dB too many


# paper D


def test_the_hard_sample_is_a_sample():
    """Section 5.2: stopgrad(y_soft) + y_soft is 2 y_soft; with y_hard - y_soft it is 0 or 1."""
    soft = torch.tensor([0.2, 0.7], requires_grad=True)
    hard = (soft > 0.5).float()
    printed, straight = soft.detach() + soft, (hard - soft).detach() + soft
    assert printed.tolist() == pytest.approx([0.4, 1.4])
    assert straight.tolist() == [0.0, 1.0]
    assert torch.autograd.grad(straight.sum(), soft)[0].tolist() == [1.0, 1.0]


def test_a_fresh_mask_meets_weights_that_were_not_kept():
    """Algorithm 3: line 13 keeps w where the last mask withheld, line 6 draws another mask."""
    w, last, fresh = np.array([1.0, 2, 3, 4]), np.array([1, 1, 0, 0]), np.array([1, 0, 1, 0])
    kept = w * (1 - last)
    server = np.full(4, 9.0)
    start = np.where(fresh == 1, server, kept)
    assert start.tolist() == [9, 0, 9, 4]  # the second was shared, so its own value is lost
    assert np.where(last == 1, server, kept).tolist() == [9, 9, 3, 4]  # section 5.2's mask
