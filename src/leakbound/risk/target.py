"""An accepted risk as text: "psnr>=20 with probability<=0.001", "ncc>=0.9 with ...", "columns>=0.9
with ...", "gain<=0.1" or "words<=0.1 at fpr<=0.01".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from leakbound._util.decibels import EXTREME, mse_of_psnr
from leakbound.assess.criterion import Criterion
from leakbound.bounds.counting import Lift
from leakbound.bounds.knowledge import largest_gain
from leakbound.bounds.law import between, non_negative, positive, probability, single
from leakbound.domains import Domain

FORM = (
    'write it as in "psnr>=20 with probability<=0.001", "mse<=0.01 with probability<=1e-3" or '
    '"ncc>=0.9 with probability<=0.01", or for tables "columns>=0.9 with probability<=0.01"; or '
    '"gain<=0.1"'
)
_NUMBER = r"([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)\s*(%?)"
_LEAST = "(?:>=|≥)"
_MOST = "(?:<=|≤)"
_PATTERN = re.compile(
    rf"\s*(p?snr\s*{_LEAST}|mse\s*{_MOST}|(?:columns|tokens|ncc|ssim)\s*{_LEAST})\s*{_NUMBER}\s*(db)?\s+"
    rf"with\s+probability\s*{_MOST}\s*{_NUMBER}\s*",
    re.I,
)
_GAIN = re.compile(rf"\s*gain\s*{_MOST}\s*{_NUMBER}(?:\s+for\s+(\S.*?))?\s*", re.I)
_WORDS = re.compile(
    rf"\s*words\s*{_MOST}\s*{_NUMBER}(?:\s+at\s+fpr\s*{_MOST}\s*{_NUMBER})?\s*", re.I
)
NO_SSIM = (
    "no law limits how many examples one image resembles by SSIM (the mean of two unlike images "
    'has about 0.67 with both); write "ncc>=0.9 ..." or "psnr>=20 ..."'
)
FALSELY = 0.01
"""How often a word may be named falsely if the target does not say it: as `adapter_words` may."""
LEAST_GAIN = 1e-4
"""Smallest gain that a target may accept: it is computed to a part of that."""
_RANGES = (1e-100, 1e100)  # their squares are still floats


@dataclass(frozen=True)
class Target:
    """An example is reconstructed (MSE at most `eta`) with probability at most `gamma`.

    Attributes:
        eta: mean squared error over the example's values, input units squared. With a `goal`, the
            largest distance of the domain: the number of columns that may differ.
        gamma: the accepted probability, in (0, 1).
        psnr: the same threshold in dB, if it was given as one.
        goal: what reaches it, if that is not a mean squared error: "18 of 20 columns".
        ncc: the normalized cross-correlation that reaches it; `eta` is then 1 - ncc^2, of
            standardized examples (`risk.correlation`).
    """

    eta: float
    gamma: float
    psnr: float | None = None
    goal: str | None = None
    ncc: float | None = None

    def __post_init__(self) -> None:
        single(positive if self.goal is None else non_negative, eta=self.eta)
        single(probability, gamma=self.gamma)

    @staticmethod
    def of_psnr(
        psnr: float,
        gamma: float,
        *,
        input_range: float = 1.0,
    ) -> Target:
        """From a PSNR in dB: eta = range^2 / 10^(psnr / 10)."""
        if not -EXTREME < psnr < EXTREME:
            raise ValueError(f"psnr is {psnr:g}; give decibels, such as 20")
        wide = float(between("input_range", input_range, *_RANGES))
        return Target(mse_of_psnr(psnr, wide), gamma, psnr)

    @staticmethod
    def of_ncc(ncc: float, gamma: float) -> Target:
        """From a normalized cross-correlation in (0, 1).

        The best multiple of a candidate at an angle theta to a standardized example has a mean
        squared error of sin^2 theta.

        Example:
            >>> round(Target.of_ncc(0.8, 0.01).eta, 2)
            0.36
        """
        if not 0 < ncc < 1:
            raise ValueError(f"ncc is {ncc:g}; give a correlation above 0 and below 1, such as 0.9")
        return Target((1 - ncc) * (1 + ncc), gamma, ncc=ncc)

    @staticmethod
    def of_criterion(criterion: Criterion, gamma: float) -> Target:
        """From what counts as reconstructed, for a table or a series."""
        return Target(criterion.within, gamma, goal=criterion.info.goal)

    @staticmethod
    def parse(
        text: str,
        *,
        input_range: float = 1.0,
        domain: Domain | None = None,
    ) -> Target:
        """Parse text; the PSNR's range is `input_range`.

        Args:
            text: such as "psnr>=20 with probability<=0.001".
            input_range: width of the range of an input.
            domain: of the examples, if their distance is not the root mean squared error: a share
                of the columns of a table, or the PSNR of a series.

        Raises:
            ValueError: the text does not have this form, does not fit the domain, or numbers are
                out of range.

        Example:
            >>> Target.parse("psnr >= 20 dB with probability <= 0.1 %")
            Target(eta=0.01, gamma=0.001, psnr=20.0, goal=None, ncc=None)
        """
        wrong = ValueError(f"target is {text[:200]!r}; {FORM}")
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise wrong
        # Each number may have a percent sign of its own.
        kind, level, percent, decibels, chance, per_cent = match.groups()
        kind = re.split(r"\W", kind.lower())[0]
        if kind == "ssim":
            raise ValueError(f"target is {text[:200]!r}; {NO_SSIM}")
        is_psnr = kind in ("psnr", "snr")
        is_share = kind in ("columns", "tokens")
        if (percent and not is_share) or (decibels and not is_psnr):
            raise ValueError(f"target is {text[:200]!r}; {kind} has no {decibels or '%'}")
        try:
            threshold, gamma = (
                float(value) / (100 if sign == "%" else 1)
                for value, sign in ((level, percent), (chance, per_cent))
            )
        except ValueError:  # 1.2.3
            raise wrong from None
        if not 0 < gamma < 1:
            raise ValueError(
                f"target is {text[:200]!r}; the probability is {gamma:g}; give a number strictly "
                "between 0 and 1"
            )
        parts = domain is not None and domain.parts is not None
        fits = kind == domain.metric if parts and domain is not None else not is_share
        # Decibels of a series are over its own scale: reports name them snr.
        strange = kind == "snr" and (domain is None or domain.distance_is_rmse)
        if not fits or strange or (kind in ("mse", "ncc") and domain is not None):
            what = "count by mean squared error"
            form = "psnr>=20"
            if domain is not None and parts:
                what = f"are {domain.noun}s, which count by {domain.metric}"
                form = f"{domain.metric}>=0.9"
            raise ValueError(
                f'target is {text[:200]!r}, but the data {what}; write it as "{form} ..."'
            )
        if domain is not None:
            level = {"psnr": 20.0, "share": 0.9, "share" if parts else "psnr": threshold}
            criterion = Criterion.of(domain, psnr=level["psnr"], share=level["share"])
            return Target.of_criterion(criterion, gamma)
        if is_psnr:
            return Target.of_psnr(threshold, gamma, input_range=input_range)
        if kind == "ncc":
            return Target.of_ncc(threshold, gamma)
        return Target(threshold, gamma)

    @property
    def harder(self) -> str:
        """What to ask for if no noise meets the target."""
        for what in ("columns", "tokens"):
            if self.goal is not None and self.goal.endswith(what):
                return f"ask for more {what}"
        return "ask for a smaller error" if self.ncc is None else "ask for a larger NCC"

    def __str__(self) -> str:
        what = f"MSE <= {self.eta:.6g}" if self.psnr is None else f"PSNR >= {self.psnr:g} dB"
        what = what if self.ncc is None else f"NCC >= {self.ncc:g}"
        what = what if self.goal is None else f"{self.goal} or more"
        return f"{what} with probability <= {self.gamma:g}"


@dataclass(frozen=True)
class GainTarget:
    """A training adds at most `most` to an attacker's probability to reach any goal.

    Whatever the attacker knows already: the success rises from q to at most q + `most`. With `at`,
    a success of `at` becomes at most `most`. That limits the claim that a word occurs, as any other
    claim about an example: who makes it with probability `at` if the example takes no part makes it
    with probability `most` or less if it does.

    Attributes:
        most: the accepted gain, from 0.0001 to below 1; with `at`, the accepted success.
        column: the goal is one sensitive column (or "the label") of a person whose other columns
            are known. None: any goal.
        at: the success without the training; None: the one at which it adds the most.
    """

    most: float
    column: str | None = None
    at: float | None = None

    def __post_init__(self) -> None:
        if not single(probability, gain=self.most) >= LEAST_GAIN:
            raise ValueError(f"gain is {self.most:g}; give at least {LEAST_GAIN:g}")
        if self.at is not None and not single(probability, fpr=self.at) < self.most:
            raise ValueError(
                f"words is {self.most:g} and fpr {self.at:g}: without any update one names a word "
                "that often; give a larger words or a smaller fpr"
            )

    @staticmethod
    def parse(text: str) -> GainTarget | None:
        """From text; None if it names no gain and no words.

        Raises:
            ValueError: it names them in another form, or out of range.

        Example:
            >>> GainTarget.parse("gain<=0.1 for diagnosis")
            GainTarget(most=0.1, column='diagnosis', at=None)
            >>> GainTarget.parse("words<=20 %")
            GainTarget(most=0.2, column=None, at=0.01)
        """
        if text.lower().lstrip().startswith("words"):
            return GainTarget._of_words(text)
        if not text.lower().lstrip().startswith("gain"):
            return None
        match = _GAIN.fullmatch(text)
        wrong = ValueError(
            f'target is {text[:200]!r}; write a gain as "gain<=0.1" or "gain<=0.1 for COLUMN"'
        )
        if match is None:
            raise wrong
        number, percent, column = match.groups()
        try:
            return GainTarget(float(number) / (100 if percent else 1), column)
        except ValueError as error:
            raise wrong from error

    @staticmethod
    def _of_words(text: str) -> GainTarget:
        match = _WORDS.fullmatch(text)
        wrong = ValueError(
            f'target is {text[:200]!r}; write it as "words<=0.1" or "words<=0.1 at fpr<=0.01", '
            "with more words than false ones"
        )
        if match is None:
            raise wrong
        words, percent, falsely, per_cent = match.groups()
        try:
            most = float(words) / (100 if percent else 1)
            at = FALSELY if falsely is None else float(falsely) / (100 if per_cent else 1)
            return GainTarget(most, at=at)
        except ValueError as error:
            raise wrong from error

    def limited(self, law: Lift) -> tuple[float, float]:
        """What is to be at most `most`, and the success without the training at which it is so."""
        if self.at is None:
            return largest_gain(law)
        return min(1.0, float(law(np.log([self.at]))[0])), self.at

    def __str__(self) -> str:
        if self.at is not None:
            return f"words <= {self.most:g} at fpr <= {self.at:g}"
        return f"gain <= {self.most:g}" + ("" if self.column is None else f" for {self.column}")
