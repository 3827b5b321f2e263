"""What the optimizing attacks reach on real digits at initialization; `slow` has all figures."""

from statistics import median

import pytest

from leakbound.attacks import dlg, idlg, inverting_gradients
from leakbound.defenses import (
    DpSgd,
    GaussianNoise,
    LaplaceNoise,
    LocalAggregation,
    MagnitudePruning,
    SecureAggregation,
)


@pytest.mark.parametrize("attack", [dlg(), idlg()], ids=["dlg", "idlg"])
def test_lenet_batch_of_one(scene, attack):
    assert min(scene.attack(attack, "lenet", range(3))) >= 40


@pytest.mark.slow
@pytest.mark.parametrize("attack", [dlg(), idlg()], ids=["dlg", "idlg"])
def test_lenet_batch_of_one_in_full(scene, attack):
    found = scene.attack(attack, "lenet", range(10))
    print(f"\nPSNR {[round(x) for x in found]}")
    assert sum(x >= 40 for x in found) >= 9


def test_inverting_gradients_batch_of_one(scene):
    assert median(scene.attack(inverting_gradients(400), "simple_convnet", range(3))) >= 25


@pytest.mark.slow
def test_inverting_gradients_in_full(scene):
    one = scene.attack(inverting_gradients(1000), "simple_convnet", range(10))
    four = scene.attack(inverting_gradients(1000), "simple_convnet", range(10), size=4)
    print(f"\nbatch 1 {[round(x) for x in one]}, batch 4 {[round(x) for x in four]}")
    assert median(one) >= 40
    assert sum(x >= 25 for x in one) >= 8
    assert median(four) >= 25


@pytest.mark.parametrize(
    "defense",
    [LocalAggregation(3, 0.1), DpSgd(0.1, 1e-6), SecureAggregation(1)],
    ids=repr,
)
def test_a_known_deterministic_defense_protects_little(scene, defense):
    assert scene.attack(idlg(), "lenet", [0], defense=defense)[0] >= 40


@pytest.mark.slow
def test_a_known_mask_helps(scene):
    """70 % of every tensor withheld: without the mask, zeros look like zeros of the gradient."""
    for build, size in (("simple_convnet", 1), ("mlp", 1)):
        given = (inverting_gradients(400), build, range(6), size, MagnitudePruning(0.7))
        known = scene.attack(*given)
        unknown = scene.attack(*given, defense_known=False)
        print(f"\n{build}: known {median(known):.1f} dB, unknown {median(unknown):.1f} dB")
        assert median(known) >= median(unknown)
        assert sum(a >= b for a, b in zip(known, unknown, strict=True)) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("law", [GaussianNoise, LaplaceNoise])
@pytest.mark.parametrize("noise_std", [1e-3, 1e-2])
def test_more_total_variation_against_known_noise(scene, law, noise_std):
    """Seeds from 100 on took no part in the choice of the default 0.04.

    At 0.001 single differences are up to 30 dB, of both signs: 16 of 24 were gains, 1.4 dB on
    average (standard deviation 9.5).
    """
    given = ("simple_convnet", range(100, 116), 1, law(noise_std))
    plain = scene.attack(inverting_gradients(250, noise_variation=0), *given)
    aware = scene.attack(inverting_gradients(250), *given)
    print(f"\n{law.__name__}({noise_std}): {median(plain):.1f} dB -> {median(aware):.1f} dB")
    assert median(aware) > median(plain)
    gains = sum(a > b for a, b in zip(aware, plain, strict=True))
    assert gains >= (12 if noise_std == 1e-2 else 9)
