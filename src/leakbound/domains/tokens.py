"""Sequences of tokens: close if few places differ."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from leakbound import check
from leakbound._util.results import SequenceResult
from leakbound.domains.base import Fields, PartsDomain, Score
from leakbound.randomness import uniform

_SHOWN = 8


@dataclass(frozen=True)
class TokenDomain(PartsDomain):
    """Sequences (n,) of token numbers; the distance counts the places that differ (Hamming).

    Args:
        vocabulary: number of tokens V; a sequence holds numbers from 0 to V - 1.
        length: number of places n; shorter sequences are padded.
        padding: the token that fills the other places; None if all sequences are full.
        words: the text of every token, for display alone.
        padding_side: where padding stands: "right", after the end, or "left", before the start.

    Example:
        >>> domain = TokenDomain(5, 3)
        >>> domain.distance(torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 4]])).tolist()
        [1.0]
    """

    vocabulary: int
    length: int
    padding: int | None = None
    words: tuple[str, ...] = field(default=(), repr=False)
    padding_side: Literal["right", "left"] = "right"
    name = "tokens"
    noun = "sequence"
    metric: ClassVar[Score] = "tokens"
    dtype: ClassVar[torch.dtype] = torch.int64
    what = "sequences of tokens"
    examples_recur = True
    advice = (
        "it gets tokens (B, n) of torch.int64 and nothing else: give fewer tokens, or a subclass "
        "whose forward takes tokens alone and returns scores, such as CLIP's text features "
        "(a wrapper would change the names of weights)"
    )

    def __post_init__(self) -> None:
        check.count(vocabulary=self.vocabulary, length=self.length)
        if self.padding is not None and not 0 <= self.padding < self.vocabulary:
            raise ValueError(
                f"padding is {self.padding}; give a token from 0 to {self.vocabulary - 1}"
            )
        check.one_of(("right", "left"), padding_side=self.padding_side)
        if self.words and len(self.words) != self.vocabulary:
            raise ValueError(
                f"words holds {len(self.words)} texts, and the vocabulary has {self.vocabulary} "
                "tokens: tokenizer and model do not belong together; give the model's own tokenizer"
            )

    @property
    def padded_before(self) -> bool:
        """Whether padding stands before the start of a sequence."""
        return self.padding is not None and self.padding_side == "left"

    @property
    def shape(self) -> tuple[int, ...]:
        """(n,)."""
        return (self.length,)

    @property
    def input_range(self) -> tuple[float, float]:
        """From 0 to V - 1."""
        return 0.0, float(self.vocabulary - 1)

    @property
    def parts(self) -> int:
        """The number of places."""
        return self.length

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Each place is a part."""
        return tuple((place, place + 1) for place in range(self.length))

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

    def fitted(self, public: Tensor) -> TokenDomain:
        """It has no scales."""
        return self

    def coded(self, x: Tensor) -> Tensor:
        """Tokens as numbers 4 apart, so that they differ at any scale of tolerances in use."""
        return 4 * x.detach().cpu().double()

    def frequencies(self, public: Tensor) -> dict[tuple[str, str], float]:
        """The share of public sequences (N, n) that hold each token."""
        shares = dict[tuple[str, str], float]()
        for sequence in public.cpu():
            for word in self.text(sequence.unique()):
                shares["", word] = shares.get(("", word), 0.0) + 1 / len(public)
        return shares

    def text(self, sequence: Tensor) -> tuple[str, ...]:
        """The tokens of one sequence (n,) as texts, or as numbers if no words are known."""
        return tuple(self.words[k] if self.words else str(k) for k in sequence.tolist())

    def fields(
        self,
        truth: Tensor | None,
        guess: Tensor,
        baseline: Tensor | None = None,
    ) -> Fields:
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


def is_padding(domain: TokenDomain, tokens: Tensor) -> Tensor:
    """Which of tokens (...,) are padding."""
    # No token is -1.
    return tokens == (-1 if domain.padding is None else domain.padding)
