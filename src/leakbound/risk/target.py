"""An accepted risk as text: "psnr>=20 with probability<=0.001"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from leakbound._util.decibels import EXTREME, mse_of_psnr
from leakbound.bounds.law import between, positive, probability, single

FORM = 'write it as in "psnr>=20 with probability<=0.001" or "mse<=0.01 with probability<=1e-3"'
_NUMBER = r"([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)\s*(%?)"
_LEAST, _MOST = "(?:>=|≥)", "(?:<=|≤)"
_PATTERN = re.compile(
    rf"\s*(psnr\s*{_LEAST}|mse\s*{_MOST})\s*{_NUMBER}\s*(db)?\s+"
    rf"with\s+probability\s*{_MOST}\s*{_NUMBER}\s*",
    re.I,
)
_RANGES = (1e-100, 1e100)


@dataclass(frozen=True)
class Target:
    """An example is reconstructed (MSE at most `eta`) with probability at most `gamma`.

    Attributes:
        eta: mean squared error over the example's values, input units squared.
        gamma: the accepted probability, in (0, 1).
        psnr: the same threshold in dB, if it was given as one.
    """

    eta: float
    gamma: float
    psnr: float | None = None

    def __post_init__(self) -> None:
        single("eta", positive("eta", self.eta))
        single("gamma", probability("gamma", self.gamma))

    @staticmethod
    def of_psnr(psnr: float, gamma: float, *, input_range: float = 1.0) -> Target:
        """From a PSNR in dB: eta = range^2 / 10^(psnr / 10)."""
        if not -EXTREME < psnr < EXTREME:
            raise ValueError(f"psnr is {psnr:g}; give decibels, such as 20")
        wide = float(between("input_range", input_range, *_RANGES))
        return Target(mse_of_psnr(psnr, wide), gamma, psnr)

    @staticmethod
    def parse(text: str, *, input_range: float = 1.0) -> Target:
        """Parse text; the PSNR's range is `input_range`.

        Raises:
            ValueError: the text does not have this form, or numbers are out of range.

        Example:
            >>> Target.parse("psnr >= 20 dB with probability <= 0.1 %")
            Target(eta=0.01, gamma=0.001, psnr=20.0)
        """
        wrong = ValueError(f"target is {text[:200]!r}; {FORM}")
        found = _PATTERN.fullmatch(text)
        if found is None:
            raise wrong
        kind, level, percent, decibels, chance, per_cent = found.groups()
        is_psnr = kind.lower().startswith("psnr")
        if percent or (decibels and not is_psnr):
            raise ValueError(f"target is {text[:200]!r}; an MSE or PSNR has no {decibels or '%'}")
        try:
            threshold, gamma = float(level), float(chance) / (100 if per_cent else 1)
        except ValueError:  # 1.2.3
            raise wrong from None
        if not 0 < gamma < 1:
            raise ValueError(
                f"target is {text[:200]!r}; the probability is {gamma:g}; give a number strictly "
                "between 0 and 1"
            )
        if is_psnr:
            return Target.of_psnr(threshold, gamma, input_range=input_range)
        return Target(threshold, gamma)

    def __str__(self) -> str:
        what = f"MSE <= {self.eta:.6g}" if self.psnr is None else f"PSNR >= {self.psnr:g} dB"
        return f"{what} with probability <= {self.gamma:g}"
