"""Sequences of tokens: close if few places differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leakbound import check
from leakbound._util.results import SequenceResult
from leakbound.domains.base import Fields, Score, most_wrong
from leakbound.randomness import uniform

_SHOWN = 8


@dataclass(frozen=True)
class TokenDomain:
    """Sequences (n,) of token numbers; the distance counts the places that differ (Hamming).

    Args:
        vocabulary: number of tokens V; a sequence holds numbers from 0 to V - 1.
        length: number of places n; shorter sequences are padded.
        padding: the token that fills places after the end; None if all sequences are full.
        words: the text of every token, for display alone.

    Example:
        >>> domain = TokenDomain(5, 3)
        >>> domain.distance(torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 4]])).tolist()
        [1.0]
    """

    vocabulary: int
    length: int
    padding: int | None = None
    words: tuple[str, ...] = ()
    name = "tokens"
    noun = "sequence"
    metric: ClassVar[Score] = "tokens"
    dtype: ClassVar[torch.dtype] = torch.int64
    has_neighbors = False
    distance_is_rmse = False
    copies_count_once = False

    def __post_init__(self) -> None:
        check.count(vocabulary=self.vocabulary, length=self.length)
        if self.padding is not None and not 0 <= self.padding < self.vocabulary:
            raise ValueError(
                f"padding is {self.padding}; give a token from 0 to {self.vocabulary - 1}"
            )
        if self.words and len(self.words) != self.vocabulary:
            raise ValueError(
                f"words holds {len(self.words)} texts, and the vocabulary has {self.vocabulary} "
                "tokens: tokenizer and model do not belong together; give the model's own tokenizer"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """(n,)."""
        return (self.length,)

    @property
    def input_range(self) -> tuple[float, float]:
        """From 0 to V - 1."""
        return 0.0, float(self.vocabulary - 1)

    @property
    def parts(self) -> int | None:
        """The number of places."""
        return self.length

    def project(self, x: Tensor) -> Tensor:
        """The closest token numbers; NaN becomes 0."""
        if x.is_floating_point():
            x = torch.nan_to_num(x, nan=0.0).round()
        return x.clamp(0, self.vocabulary - 1).to(self.dtype)

    def hard(self, x: Tensor) -> Tensor:
        """The same as `project`."""
        return self.project(x)

    def start(self, n: int, source: torch.Generator) -> Tensor:
        """Uniformly random tokens."""
        return self.project((uniform((n, *self.shape), source) * self.vocabulary).floor())

    def blind(self, public: Tensor | None) -> Tensor:
        """The most frequent token of each place in public sequences; without any, token 0."""
        if public is None or not len(public):
            return torch.zeros(self.shape, dtype=self.dtype)
        return public.mode(0).values

    def constants(self) -> tuple[Tensor, ...]:
        """None: no constant sequence is likely."""
        return ()

    def fitted(self, public: Tensor) -> TokenDomain:
        """It has no scales."""
        return self

    def within(self, *, psnr: float, share: float) -> float:
        """The number of places that may differ if this share of places must be right."""
        return most_wrong(self.length, share)

    def level(self, within: float) -> float:
        """Percent of places that are right."""
        return 100 * (1 - within / self.length)

    def distance(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        """(N,) number of places with different tokens, a metric; it has no tolerances to scale."""
        return (a.detach().cpu() != b.detach().cpu()).sum(1).double()

    def costs(self, a: Tensor, b: Tensor) -> Tensor:
        """(A, B) distances of all pairs."""
        return self.distances(a, b)

    def distances(self, a: Tensor, b: Tensor) -> Tensor:
        """(A, B) numbers of places that differ, of all pairs, float64 on the CPU."""
        left = a.detach().cpu()
        right = b.detach().cpu()
        if not len(left) or not len(right):
            return torch.zeros(len(left), len(right), dtype=torch.float64)
        return torch.stack([(right != row).sum(1) for row in left]).double()

    def frequencies(self, public: Tensor) -> dict[tuple[str, str], float]:
        """The share of public sequences (N, n) that hold each token."""
        found = dict[tuple[str, str], float]()
        for sequence in public.cpu():
            for word in self.text(sequence.unique()):
                found["", word] = found.get(("", word), 0.0) + 1 / len(public)
        return found

    def score(self, a: Tensor, b: Tensor) -> Tensor:
        """(N,) percent of places that are right."""
        return 100 * (1 - self.distance(a, b) / self.length)

    def text(self, sequence: Tensor) -> tuple[str, ...]:
        """The tokens of one sequence (n,) as texts, or as numbers if no words are known."""
        return tuple(self.words[k] if self.words else str(k) for k in sequence.tolist())

    def fields(self, truth: Tensor | None, guess: Tensor, baseline: Tensor | None = None) -> Fields:
        """The tokens of the first sequences, and which are right."""
        shown = self.project(guess.detach().cpu())[:_SHOWN]
        if truth is None:
            return Fields(
                sequences=tuple(SequenceResult(reconstruction=self.text(s)) for s in shown)
            )
        held = truth.detach().cpu()[:_SHOWN]
        return Fields(
            sequences=tuple(
                SequenceResult(
                    reconstruction=self.text(z),
                    truth=self.text(x),
                    matched=tuple((x == z).tolist()),
                )
                for x, z in zip(held, shown, strict=True)
            )
        )
