"""Risks in words: what is understood, and that what is not is refused in one line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leakbound.risk.target import Target


@pytest.mark.parametrize(
    ("words", "eta", "gamma"),
    [
        ("psnr>=20 with probability<=0.001", 0.01, 0.001),
        ("PSNR >= 20 dB with probability <= 0.1 %", 0.01, 0.001),
        ("psnr>=20db  with  probability<=0.1%", 0.01, 0.001),
        ("  psnr ≥ 2e1 with probability ≤ 1e-3 ", 0.01, 0.001),
        ("Psnr>=-10 with Probability<=.5", 10.0, 0.5),
        ("psnr>=+30 with probability<=9%", 0.001, 0.09),
        ("mse<=0.01 with probability<=1E-3", 0.01, 0.001),
        ("MSE <= 1e-2 WITH PROBABILITY <= 99.9%", 0.01, 0.999),
    ],
)
def test_spellings(words, eta, gamma):
    found = Target.parse(words)
    assert (found.eta, found.gamma) == pytest.approx((eta, gamma), rel=1e-12)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "psnr>=20",
        "psnr<=20 with probability<=0.001",
        "mse>=0.01 with probability<=0.001",
        "psnr>20 with probability<=0.001",
        "ssim>=0.9 with probability<=0.001",
        "psnr>=twenty with probability<=0.001",
        "psnr>=1.2.3 with probability<=0.001",
        "psnr>=. with probability<=0.001",
        "psnr>=nan with probability<=0.001",
        "psnr>=20 with probability<=0.001 or so",
        "psnr>=20 with probability>=0.001",
        "psnr>=20% with probability<=0.001",
        "mse<=0.01 db with probability<=0.001",
        "psnr>=20 with probability<=0",
        "psnr>=20 with probability<=1",
        "psnr>=20 with probability<=150%",
        "psnr>=20 with probability<=-0.1",
        "psnr>=20 with probability<=1e-400",
        "psnr>=1e400 with probability<=0.001",
        "psnr>=-4000 with probability<=0.001",
        "mse<=0 with probability<=0.001",
        "mse<=-1 with probability<=0.001",
        "mse<=1e999 with probability<=0.001",
        "psnr>=20 with probability<=0.001\n" + "x" * 10_000,
    ],
)
def test_refused(words):
    with pytest.raises(ValueError) as caught:
        Target.parse(words)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 420
    assert text.split(" is ")[0] in ("target", "psnr", "eta", "gamma")


@given(st.floats(-200, 200), st.floats(1e-12, 1 - 1e-12), st.floats(1e-3, 1e3))
def test_psnr_is_relative_to_the_range(psnr, gamma, wide):
    found = Target.of_psnr(psnr, gamma, input_range=wide)
    assert found.eta == pytest.approx(wide**2 * 10 ** (-psnr / 10), rel=1e-9)
    again = Target.parse(f"psnr>={psnr!r} with probability<={gamma!r}", input_range=wide)
    assert (again.eta, again.gamma) == (found.eta, found.gamma)


@pytest.mark.parametrize("wide", [0.0, -1.0, float("nan"), float("inf"), 1e200])
def test_ranges(wide):
    with pytest.raises(ValueError, match="input_range is"):
        Target.of_psnr(20.0, 0.1, input_range=wide)


def test_words_back():
    assert str(Target.of_psnr(20.0, 0.001)) == "PSNR >= 20 dB with probability <= 0.001"
    assert str(Target(0.01, 0.001)) == "MSE <= 0.01 with probability <= 0.001"
    for wrong in ({"eta": [0.1]}, {"eta": True}, {"gamma": "0.1"}):
        with pytest.raises(ValueError):
            Target(**({"eta": 0.1, "gamma": 0.1} | wrong))
