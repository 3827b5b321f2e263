"""Independent component analysis against scikit-learn's, closed forms and brute force."""

import math
import warnings

import mpmath
import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from skimage import data
from skimage.transform import resize
from sklearn.decomposition import FastICA

from leakbound.attacks.features.separation import (
    NotSeparable,
    Separation,
    contrasts,
    differences,
    gaussian_level,
    rotation,
    separate,
    whitener,
)
from leakbound.randomness import laplace, normal, stream, uniform
from leakbound_reproductions.attacks.published_separation import (
    PublishedSeparation,
    printed_contrasts,
)

WIDE = torch.zeros((), dtype=torch.float64)
SHAPE = (3, 32, 32)


def sources(law, count, columns=3072, seed=0):
    source = stream(seed, law, count)
    if law == "laplace":
        return laplace((count, columns), source, like=WIDE)
    if law == "uniform":
        return uniform((count, columns), source, like=WIDE)
    drawn = normal((count, columns), source, like=WIDE)
    if law == "relu":
        return drawn.relu() * (uniform((count, columns), source) < 0.6)
    return drawn


def mixed(rows, mixtures=256, seed=0):
    return normal((mixtures, len(rows)), stream(seed, "mixing"), like=WIDE) @ rows


def correlations(found, true):
    """Absolute correlation of each true source with its partner."""
    size = len(true)
    between = np.abs(np.corrcoef(np.asarray(found), np.asarray(true))[:size, size:])
    return between[linear_sum_assignment(-between)]


def fast_ica(mixtures, fitted_on=None):
    count = mixtures.shape[0]
    model = FastICA(count, whiten="unit-variance", random_state=0, max_iter=1000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit((mixtures if fitted_on is None else fitted_on).T.numpy())
    return model.components_ @ mixtures.numpy()


def compressed(mixtures, count):
    """The rows that scikit-learn is given: an orthonormal basis of the mixtures' row space."""
    u = np.linalg.svd(mixtures.numpy(), full_matrices=False)[0]
    return torch.from_numpy(u[:, :count].T) @ mixtures


@pytest.fixture(scope="module")
def photographs():
    """Eight photographs (8, 3, 32, 32) that scikit-image ships."""
    pictures = [
        data.astronaut(),
        data.coffee(),
        data.chelsea(),
        data.rocket(),
        data.hubble_deep_field(),
        data.immunohistochemistry(),
        data.retina(),
        data.stereo_motorcycle()[0],
    ]
    small = []
    for picture in pictures:
        side = min(picture.shape[:2])
        top, left = ((length - side) // 2 for length in picture.shape[:2])
        square = picture[top : top + side, left : left + side]
        small.append(resize(square, (32, 32), anti_aliasing=True).transpose(2, 0, 1))
    return torch.from_numpy(np.stack(small))


# the contrast


@pytest.mark.parametrize("slope", [1e-3, 0.3, 1.0, 2.0, 30.0, 1e4])
def test_level_of_a_gaussian(slope):
    def integrand(z):
        return 2 * mpmath.log(mpmath.cosh(slope * z)) * mpmath.npdf(z) / slope

    with mpmath.workdps(30):
        edges = sorted({0, *(min(k / slope, 40) for k in (1, 5, 20)), 1, 5, 10, 40})
        wanted = float(mpmath.quad(integrand, edges))
    assert gaussian_level(slope) == pytest.approx(wanted, rel=1e-10)


def test_levels_in_the_limits():
    assert gaussian_level(1.0) == pytest.approx(0.374567, abs=5e-7)
    assert gaussian_level(1e-5) == pytest.approx(0.5e-5, rel=1e-8)
    assert gaussian_level(1e6) == pytest.approx(math.sqrt(2 / math.pi), rel=1e-5)


@pytest.mark.parametrize("law", ["laplace", "uniform", "relu"])
def test_where_the_contrast_is_largest(law):
    """Of two sources turned by 0 to 45 degrees; as printed, heavy tails come out mixed."""
    rows = sources(law, 2, 200_000)
    white = rows - rows.mean(1, keepdim=True)
    white = white / white.square().mean(1, keepdim=True).sqrt()
    values = {False: [], True: []}
    for angle in range(0, 50, 5):
        c, s = math.cos(math.radians(angle)), math.sin(math.radians(angle))
        turned = torch.tensor([[c, -s], [s, c]], dtype=torch.float64) @ white
        for literal, found in values.items():
            measure = printed_contrasts if literal else contrasts
            found.append(float(measure(turned).mean()))
    assert np.argmax(values[False]) == 0
    assert np.argmax(values[True]) == (0 if law == "uniform" else 9)


def test_no_angle_of_a_fine_grid_beats_the_rotation_found():
    rows = torch.cat([sources("laplace", 1, 500), sources("uniform", 1, 500)])
    white = mixed(rows, 2)
    white = white - white.mean(1, keepdim=True)
    white = whitener(white) @ white
    reached = float(contrasts(rotation(white, stream(0), restarts=2) @ white).mean())
    best = 0.0
    for angle in np.linspace(0, math.pi, 5000):
        c, s = math.cos(angle), math.sin(angle)
        turned = torch.tensor([[c, -s], [s, c]], dtype=torch.float64) @ white
        best = max(best, float(contrasts(turned).mean()))
    assert reached == pytest.approx(best, rel=1e-5)


# what is separated


@pytest.mark.parametrize("law", ["laplace", "uniform", "relu"])
@pytest.mark.parametrize("seed", range(2))
def test_eight_sources_as_well_as_scikit_learn(law, seed):
    rows = sources(law, 8, seed=seed)
    mixtures = mixed(rows, seed=seed)
    ours = separate(mixtures, 8, stream(seed, "separate"))
    theirs = correlations(fast_ica(compressed(mixtures, 8)), rows).mean()
    found = correlations(ours.sources, rows).mean()
    print(f"\n{law}: {found:.4f}, scikit-learn {theirs:.4f}")
    assert ours.problem is None
    assert found >= 0.95
    assert found >= theirs - 0.01


def test_sources_of_different_laws():
    rows = torch.cat([sources(law, 3) for law in ("laplace", "uniform", "relu")])
    found = separate(mixed(rows), 9, stream(0))
    assert correlations(found.sources, rows).min() > 0.99


@pytest.mark.parametrize("count", [1, 2, 4, 16])
def test_few_and_many(count):
    rows = sources("laplace", count, 2000)
    found = separate(mixed(rows), count, stream(0))
    assert found.sources.shape == (count, 2000)
    assert found.problem is None
    wanted = correlations(found.sources, rows).min() if count > 1 else 1.0
    assert wanted > 0.98
    torch.testing.assert_close(found.mixing @ found.sources, mixed(rows))


@pytest.mark.parametrize("seed", range(1))
def test_eight_photographs(photographs, seed):
    rows = photographs.flatten(1)
    mixtures = mixed(rows, seed=seed)
    found = {}
    for kind, solver in (
        ("image", "contrast"),
        ("image", "likelihood"),
        ("nonnegative image", "likelihood"),
    ):
        how = Separation(solver=solver)
        separated = separate(mixtures, 8, stream(seed), how, kind=kind, shape=SHAPE)
        found[f"{kind} by {solver}"] = correlations(separated.sources, rows).mean()
    plain = compressed(mixtures, 8)
    found["FastICA on pixels"] = correlations(fast_ica(plain), rows).mean()
    found["FastICA on differences"] = correlations(
        fast_ica(plain, differences(plain, SHAPE)), rows
    ).mean()
    print("\n" + ", ".join(f"{name} {value:.4f}" for name, value in found.items()))
    assert found["image by contrast"] >= found["FastICA on differences"] - 0.01
    assert found["image by likelihood"] > found["image by contrast"]
    assert found["nonnegative image by likelihood"] > found["image by likelihood"]
    assert found["FastICA on pixels"] < 0.9


@pytest.mark.parametrize("count", [1, 4, 8])
def test_sparse_nonnegative_sources_are_exact(count):
    """Also where they share much of their values, which no uncorrelated answer can have."""
    own, shared = sources("relu", count, 300), sources("relu", 1, 300, seed=1)
    rows = (own + 2 * shared - 0.7).relu()
    found = separate(mixed(rows), count, stream(0), kind="nonnegative")
    cosine = torch.nn.functional.normalize(rows) @ torch.nn.functional.normalize(found.sources).T
    assert float(cosine.amax(1).min()) > 0.9999
    assert found.problem is None
    if count > 1:
        assert correlations(separate(mixed(rows), count, stream(0)).sources, rows).mean() < 0.9


# what stands in the way


def test_photographs_under_noise(photographs):
    rows = photographs.flatten(1)
    clean = mixed(rows)
    spread = 0.02 + 3 * uniform((256, 1), stream(0, "spread"), like=WIDE).pow(4)
    noisy = clean + spread * normal(clean.shape, stream(0, "noise"), like=WIDE)
    weights = (1 / spread).expand_as(noisy)

    def reached(weights):
        found = separate(noisy, 8, stream(0), kind="image", shape=SHAPE, weights=weights)
        return correlations(found.sources, rows).mean(), found

    best, found = reached(weights)
    assert best > 0.95
    assert best > reached(None)[0] + 0.01
    residual = found.sources - torch.linalg.lstsq(rows.T, found.sources.T).solution.T @ rows
    ratio = residual.square().mean(1).sqrt() / found.noise
    assert float(ratio.min()) > 0.4
    assert float(ratio.max()) < 1.2


def test_withheld_entries_change_nothing(photographs):
    rows = photographs.flatten(1)
    mixtures = mixed(rows, 64)
    largest = mixtures.abs() > mixtures.abs().flatten().quantile(0.6)
    found = separate(
        mixtures * largest, 8, stream(0), kind="image", shape=SHAPE, weights=largest.double()
    )
    assert correlations(found.sources, rows).mean() > 0.97
    blind = separate(mixtures * largest, 8, stream(0), kind="image", shape=SHAPE)
    assert correlations(blind.sources, rows).mean() < 0.95


@pytest.mark.parametrize(("count", "seed"), [(2, 0), (2, 1), (8, 2)])
def test_gaussian_sources_are_called_inseparable(count, seed):
    rows = sources("gaussian", count, seed=seed)
    assert "look Gaussian" in separate(mixed(rows), count, stream(seed)).problem
    rows[:-1] = sources("laplace", count, seed=seed)[:-1]
    found = separate(mixed(rows), count, stream(seed))
    assert found.problem is None  # one Gaussian is what the others leave
    assert correlations(found.sources, rows).min() > 0.98


def test_noise_alone_and_dense_sources_are_called_inseparable():
    noise = normal((256, 1000), stream(0, "noise"), like=WIDE)
    assert "0 of 4 sources stand out" in separate(noise, 4, stream(0)).problem
    dense = sources("uniform", 4, 200) + 0.5
    assert "too few" in separate(mixed(dense), 4, stream(0), kind="nonnegative").problem


def test_what_cannot_be_separated_is_refused():
    rows = sources("laplace", 4, 100)
    with pytest.raises(NotSeparable, match="4 sources need"):
        separate(mixed(rows, 3), 4, stream(0))
    with pytest.raises(NotSeparable, match="rank below 4"):
        separate(mixed(rows[[0, 1, 2, 2]]), 4, stream(0))
    with pytest.raises(ValueError, match="shape is None"):
        separate(mixed(rows), 4, stream(0), kind="image")
    with pytest.raises(ValueError, match="kind is 'picture'"):
        separate(mixed(rows), 4, stream(0), kind="picture")


# settings


def test_as_published_adam_maximizes_the_contrast():
    """Unless it is printed without c_a, or a penalty of weight 1 outweighs its thousandths."""
    rows = sources("laplace", 3, 1000)

    def reached(**settings):
        how = PublishedSeparation(steps=400, learning_rate=0.02, **settings)
        return correlations(how.sources(mixed(rows), 3), rows).mean()

    assert reached(decorrelation=1e-3) > 0.98
    assert reached(decorrelation=1e-3, literal=True) < 0.9
    assert reached(decorrelation=1.0) < 0.9


@pytest.mark.parametrize("prior", [{"negativity": 1.0}, {"sparsity": 1.0}])
def test_published_priors_act(prior):
    rows = sources("relu", 3, 1000)
    settings = PublishedSeparation(steps=150, learning_rate=0.02, **prior)
    without = PublishedSeparation(steps=150, learning_rate=0.02)

    def wrong(how):
        found = how.sources(mixed(rows), 3)
        scaled = found / found.norm(dim=1, keepdim=True)
        if "sparsity" in prior:
            return float(scaled.abs().mean())
        return float(torch.minimum((-scaled).relu().norm(), scaled.relu().norm()))

    assert wrong(settings) < wrong(without)


def test_a_stream_fixes_the_answer():
    mixtures = mixed(sources("laplace", 4, 500))
    first, again = (separate(mixtures, 4, stream(3)).sources for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"solver": "adam"}, "solver is 'adam'"),
        ({"slope": 0.0}, "slope is 0"),
        ({"restarts": 0}, "restarts is 0"),
    ],
)
def test_settings_are_checked(settings, words):
    with pytest.raises(ValueError, match=words):
        Separation(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"sparsity": -1.0}, "sparsity is -1"),
        ({"decorrelation": math.nan}, "decorrelation is nan"),
    ],
)
def test_published_settings_are_checked(settings, words):
    with pytest.raises(ValueError, match=words):
        PublishedSeparation(**settings)
