"""The interface of a domain; images (C, H, W), and inputs that are only numbers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from leakbound._util.decibels import (
    capped_psnr,
    mse_of_psnr,
    psnr_of_mse,
    psnr_of_root,
    root_of_psnr,
)
from leakbound._util.results import ColumnResult, SequenceResult
from leakbound.randomness import uniform

Score = Literal["psnr", "snr", "columns", "tokens"]
_SHOWN = 8
_VALUES = 100
"""Number of examples whose values are shown, and number of values of each."""
PAIRS = 20_000_000
"""Most codes that are compared at once, so that memory stays below a gigabyte."""


@dataclass(frozen=True)
class Fields:
    """What a report shows of reconstructed examples; the domain decides which fields it fills.

    `pictures` are images (N, C, H, W) by name. `columns` has one entry per column. `values` are the
    first numbers of the first examples, `sequences` the first sequences of tokens.
    """

    pictures: dict[str, Tensor] | None = None
    columns: tuple[ColumnResult, ...] | None = None
    values: tuple[tuple[float, ...], ...] | None = None
    sequences: tuple[SequenceResult, ...] | None = None


@runtime_checkable
class Domain(Protocol):
    """The form of one example: what is valid, what is close, and the prior-only baseline."""

    @property
    def name(self) -> str:
        """The name in records, such as "images"."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example in the model's input."""

    @property
    def input_range(self) -> tuple[float, float]:
        """Range of its values, in the model's input units."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of its values."""

    def project(self, x: Tensor) -> Tensor:
        """Project onto valid examples (N, *shape); values that are not finite become the middle."""

    def hard(self, x: Tensor) -> Tensor:
        """The closest examples that data can hold, where `project` allows what searches need."""

    def start(self, n: int, source: torch.Generator) -> Tensor:
        """Starting points of searches: n valid examples (n, *shape)."""

    def blind(self, public: Tensor | None) -> Tensor:
        """The best prior-only baseline (*shape): from public inputs (N, *shape), or the middle."""

    def constants(self) -> tuple[Tensor, ...]:
        """Other candidates (*shape) that need neither an update nor public examples."""

    @property
    def noun(self) -> str:
        """What one example is called."""

    @property
    def metric(self) -> Score:
        """The name of `score` in records, such as "psnr"."""

    def score(self, a: Tensor, b: Tensor) -> Tensor:
        """(N,) how close paired examples are, higher for closer, in the unit of `metric`."""

    def within(self, *, psnr: float, share: float) -> float:
        """The distance up to which an example counts as reconstructed: by a score of `psnr` dB, or
        by a `share` of its parts.
        """

    def level(self, within: float) -> float:
        """The score of examples at that distance."""

    @property
    def parts(self) -> int | None:
        """The number of columns that the distance counts; None if it is a metric."""

    def fitted(self, public: Tensor) -> Domain:
        """The same with the scales that public inputs (N, *shape) show, where it has some."""

    def costs(self, a: Tensor, b: Tensor) -> Tensor:
        """(A, B) what the pairing of examples a (A, *shape) with candidates b minimizes."""

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """(N,) distance of paired examples, in natural units."""

    def distances(self, a: Tensor, b: Tensor) -> Tensor:
        """(A, B) `distance` of every example of a (A, *shape) and every one of b (B, *shape)."""

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Where each part starts and ends in a flat example; () if no parts count."""

    @property
    def has_neighbors(self) -> bool:
        """Whether neighboring values are similar; total variation and pictures rely on it."""

    @property
    def distance_is_rmse(self) -> bool:
        """Whether `distance` is the root mean squared error, which our bounds use."""

    @property
    def copies_count_once(self) -> bool:
        """Whether equal examples count as copies of one."""

    @property
    def examples_recur(self) -> bool:
        """Whether whole examples occur again in other data, as sentences do."""

    @property
    def rescaled(self) -> bool:
        """Whether data in [0, 1] is moved to `input_range`, not taken as it is stored."""

    @property
    def vocabulary(self) -> int | None:
        """The number of tokens, if examples are sequences of them."""

    @property
    def padding(self) -> int | None:
        """The token that fills places after the end of a sequence; None if there is none."""

    @property
    def advice(self) -> str:
        """What to give if a model cannot take such examples; "" if nothing special."""

    def coded(self, x: Tensor) -> Tensor:
        """(..., parts) numbers for the parts of examples (..., *shape), if parts count: a part
        differs at a scale if they are farther apart than the scale. Float64 on the CPU.
        """

    def frequencies(self, public: Tensor) -> dict[tuple[str, str], float]:
        """How often what a fact names, as (subject, item), occurs in public examples (N, *shape).

        Empty if facts of this domain name nothing that may be rare.
        """

    def fields(
        self,
        truth: Tensor | None,
        guess: Tensor,
        baseline: Tensor | None = None,
    ) -> Fields:
        """What to show of paired examples and their prior-only baselines, or of reconstructions
        without a known truth.
        """


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Mean squared error between every example of `a` (A, *S) and of `b` (B, *S): (A, B), float64.

    Example:
        >>> squared_distances(torch.zeros(1, 2), torch.tensor([[1.0, 3.0]])).tolist()
        [[5.0]]
    """
    left, right = (x.detach().cpu().double().flatten(1) for x in (a, b))
    if len(left) == 0 or len(right) == 0:
        return torch.zeros(len(left), len(right), dtype=torch.float64)
    # Row by row: all differences at once take A x B x d numbers.
    return torch.stack([(right - row).square().mean(1) for row in left])


def euclidean(a: Tensor, b: Tensor) -> Tensor:
    """(A, B) Euclidean distance of every example of a (A, *S) and of b (B, *S), float64 on the CPU.

    Example:
        >>> euclidean(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]])).tolist()
        [[5.0]]
    """
    left, right = (x.detach().cpu().double().flatten(1) for x in (a, b))
    # The form with a matrix product loses half of the digits of near examples.
    return torch.cdist(
        left,
        right,
        compute_mode="donot_use_mm_for_euclid_dist",
    )


@dataclass(frozen=True)
class NumberDomain:
    """Inputs of any shape in a box; they are close if their root mean squared error is small.

    Example:
        >>> domain = NumberDomain((3,))
        >>> domain.distance(torch.zeros(1, 3), torch.full((1, 3), 0.5)).tolist()
        [0.5]
    """

    shape: tuple[int, ...]
    input_range: tuple[float, float] = (0.0, 1.0)
    dtype: torch.dtype = torch.float32
    name = "values"
    noun = "example"
    metric: ClassVar[Score] = "psnr"
    has_neighbors = False
    distance_is_rmse = True
    copies_count_once = True
    examples_recur = False
    rescaled = True
    vocabulary = None
    padding = None
    advice = ""
    parts = None
    spans = ()

    def project(self, x: Tensor) -> Tensor:
        """Clip to the box; NaN becomes its middle."""
        low, high = self.input_range
        return torch.nan_to_num(
            x,
            nan=(low + high) / 2,
            posinf=high,
            neginf=low,
        ).clamp(low, high)

    def hard(self, x: Tensor) -> Tensor:
        """The same as `project`."""
        return self.project(x)

    def start(self, n: int, source: torch.Generator) -> Tensor:
        """Uniform over the box."""
        low, high = self.input_range
        return low + (high - low) * uniform((n, *self.shape), source).to(self.dtype)

    def blind(self, public: Tensor | None) -> Tensor:
        """The mean public example, which has the smallest mean squared error; else the middle."""
        if public is not None and tuple(public.shape[1:]) == self.shape and len(public):
            return public.mean(0)
        return torch.full(
            self.shape,
            sum(self.input_range) / 2,
            dtype=self.dtype,
        )

    def constants(self) -> tuple[Tensor, ...]:
        """The lowest value, the middle and the highest everywhere."""
        low, high = self.input_range
        return tuple(
            torch.full(self.shape, v, dtype=self.dtype) for v in (low, (low + high) / 2, high)
        )

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """(N,) root mean squared error, in input units, float64 on the CPU."""
        apart = a.detach().cpu().double() - b.detach().cpu().double()
        return apart.square().flatten(1).mean(1).sqrt()

    def distances(self, a: Tensor, b: Tensor) -> Tensor:
        """(A, B) root mean squared errors of all pairs, float64 on the CPU."""
        return euclidean(a, b) / math.sqrt(math.prod(self.shape))

    def within(self, *, psnr: float, share: float) -> float:
        """A root mean squared error of range / 10^(psnr/20)."""
        low, high = self.input_range
        return math.sqrt(mse_of_psnr(psnr, high - low))

    def level(self, within: float) -> float:
        """PSNR in dB; 0.01 for 20 dB, not 0.010000000000000002."""
        low, high = self.input_range
        return float(psnr_of_mse(float(f"{within**2:.14g}"), high - low))

    def fitted(self, public: Tensor) -> Domain:
        """It has no scales."""
        return self

    def score(self, a: Tensor, b: Tensor) -> Tensor:
        """(N,) PSNR in dB, at most PSNR_CAP."""
        low, high = self.input_range
        scores: Tensor = capped_psnr(self.distance(a, b).square(), high - low)
        return scores

    def coded(self, x: Tensor) -> Tensor:
        """Its numbers; no parts count."""
        return x.detach().cpu().double().flatten(1)

    def frequencies(self, public: Tensor) -> dict[tuple[str, str], float]:
        """Nothing: single numbers are not rare."""
        return {}

    def costs(self, a: Tensor, b: Tensor) -> Tensor:
        """(A, B) mean squared errors."""
        return squared_distances(a, b)

    def fields(
        self,
        truth: Tensor | None,
        guess: Tensor,
        baseline: Tensor | None = None,
    ) -> Fields:
        """The first values of the first reconstructions."""
        rows = guess[:_SHOWN].detach().flatten(1)[:, :_VALUES].double().tolist()
        return Fields(values=tuple(tuple(float(f"{v:.4g}") for v in row) for row in rows))


@dataclass(frozen=True)
class ImageDomain(NumberDomain):
    """Images (C, H, W): values with similar neighbors, shown as pictures."""

    name = "images"
    noun = "image"
    has_neighbors = True

    def fields(
        self,
        truth: Tensor | None,
        guess: Tensor,
        baseline: Tensor | None = None,
    ) -> Fields:
        """Pictures of both; values if an example is a single line."""
        if min(self.shape[1:]) == 1:
            return super().fields(truth, guess)
        shown = {} if truth is None else {"truth": self.slices(truth)}
        return Fields(pictures={**shown, "reconstruction": self.slices(guess)})

    def slices(self, examples: Tensor) -> Tensor:
        """The picture (N, C, H, W) of each example."""
        return examples


@dataclass(frozen=True)
class VolumeDomain(ImageDomain):
    """Volumes (C, D, H, W): images of three axes, shown as their middle slices.

    Example:
        >>> domain = VolumeDomain((1, 2, 4, 3))
        >>> domain.fields(None, torch.zeros(5, 1, 2, 4, 3)).pictures["reconstruction"].shape
        torch.Size([5, 1, 8, 4])
    """

    name = "volumes"
    noun = "volume"

    def slices(self, examples: Tensor) -> Tensor:
        """The middle slices along each axis, one below the other: (N, C, H + 2 D, max(W, H)).

        What a slice is narrower than the widest is filled with the lowest value.
        """
        middle = [examples.select(axis, examples.shape[axis] // 2) for axis in (2, 3, 4)]
        width = max(part.shape[-1] for part in middle)
        low = self.input_range[0]
        padded = [
            torch.nn.functional.pad(part, (0, width - part.shape[-1]), value=low) for part in middle
        ]
        return torch.cat(padded, 2)


@dataclass(frozen=True)
class SeriesDomain(NumberDomain):
    """Series (C, T): C channels over T times; the distance is that of the worst channel.

    It is the largest root mean squared error of a channel over the channel's scale, a metric.

    Args:
        scales: of each channel, in input units, such as the standard deviation over public series;
            () counts every channel in units of the input range.

    Example:
        >>> domain = SeriesDomain((2, 4), scales=(1.0, 10.0))
        >>> domain.distance(torch.zeros(1, 2, 4), torch.ones(1, 2, 4)).tolist()
        [1.0]
    """

    scales: tuple[float, ...] = ()
    name = "series"
    noun = "series"
    metric: ClassVar[Score] = "snr"
    distance_is_rmse = False

    def __post_init__(self) -> None:
        if self.scales and len(self.scales) != self.shape[0]:
            raise ValueError(
                f"scales holds {len(self.scales)} numbers; give one for each of {self.shape[0]} "
                "channels"
            )

    def fitted(self, public: Tensor) -> SeriesDomain:
        """The same with the standard deviation of every channel over public series (N, C, T)."""
        if not len(public):
            return self
        spread = public.detach().cpu().double().transpose(0, 1).flatten(1).std(1, correction=0)
        # A constant channel has no spread to divide by.
        return replace(self, scales=tuple(float(s) or 1.0 for s in spread))

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """(N,) the largest error of a channel in units of its scale."""
        low, high = self.input_range
        known = torch.tensor(self.scales or (high - low,) * self.shape[0], dtype=torch.float64)
        apart = a.detach().cpu().double() - b.detach().cpu().double()
        return (apart.square().mean(-1).sqrt() / known).amax(-1)

    def distances(self, a: Tensor, b: Tensor) -> Tensor:
        """(A, B) largest errors of a channel in units of its scale, of all pairs."""
        low, high = self.input_range
        known = self.scales or (high - low,) * self.shape[0]
        size = math.sqrt(self.shape[1])
        channels = [
            euclidean(a[:, channel], b[:, channel]) / (scale * size)
            for channel, scale in enumerate(known)
        ]
        return torch.stack(channels).amax(0)

    def within(self, *, psnr: float, share: float) -> float:
        """An error of 10^(-psnr/20) scales on the worst channel."""
        return root_of_psnr(psnr)

    def level(self, within: float) -> float:
        """In dB."""
        return psnr_of_root(within)

    def score(self, a: Tensor, b: Tensor) -> Tensor:
        """(N,) 20 log10 of scale over error on the worst channel, in dB."""
        scores: Tensor = capped_psnr(self.distance(a, b).square())
        return scores


class PartsDomain(ABC):
    """Examples (n,) whose parts count: the distance is the number of parts that differ.

    d_(s+t)(x, y) <= d_s(x, z) + d_t(z, y), where s and t scale tolerances: a part that differs
    between x and y by more than s + t differs from z by more than s, or by more than t.
    """

    what: ClassVar[str]
    """What examples are, in messages of attacks that are for them alone."""
    distance_is_rmse = False
    has_neighbors = False
    copies_count_once = False
    examples_recur = False
    rescaled = False
    advice = ""

    @property
    @abstractmethod
    def parts(self) -> int:
        """The number of parts."""

    @property
    @abstractmethod
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Where each part starts and ends in an example (n,)."""

    @abstractmethod
    def coded(self, x: Tensor) -> Tensor:
        """See `Domain.coded`."""

    def misses(
        self,
        a: Tensor,
        b: Tensor,
        scale: float = 1.0,
    ) -> Tensor:
        """(..., parts) whether parts differ between examples a and b, which broadcast: (..., n)."""
        # Written so that NaN differs from everything.
        return ~((self.coded(a) - self.coded(b)).abs() <= scale)

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """(N,) number of parts that differ between paired examples, float64 on the CPU."""
        return self.misses(a, b).sum(-1).double()

    def distances(
        self,
        a: Tensor,
        b: Tensor,
        scale: float = 1.0,
    ) -> Tensor:
        """(A, B) number of parts that differ between every example of a and of b, float64."""
        left = self.coded(a)
        right = self.coded(b)
        step = max(1, PAIRS // max(1, len(b) * self.parts))
        counts = [
            (~((some[:, None] - right).abs() <= scale)).sum(-1).double()
            for some in torch.split(left, step)
        ]
        return torch.cat(counts)

    def costs(self, a: Tensor, b: Tensor) -> Tensor:
        """(A, B) distances of all pairs."""
        return self.distances(a, b)

    def constants(self) -> tuple[Tensor, ...]:
        """None: no constant example is closer to most examples than the most frequent parts."""
        return ()

    def within(self, *, psnr: float, share: float) -> float:
        """The most parts that may differ if this share of them must be right.

        Example:
            >>> from leakbound.domains import TokenDomain
            >>> TokenDomain(5, 20).within(psnr=20.0, share=0.9)
            2
        """
        if not 0 < share <= 1:
            raise ValueError(f"share is {share}; give a share above 0 and at most 1")
        # Rounding of share * parts must not ask for one part more.
        return self.parts - math.ceil(share * self.parts - 1e-9)

    def level(self, within: float) -> float:
        """Percent of parts that are right."""
        return 100 * (1 - within / max(1, self.parts))

    def score(self, a: Tensor, b: Tensor) -> Tensor:
        """(N,) percent of parts that are right."""
        return 100 * (1 - self.distance(a, b) / self.parts)
