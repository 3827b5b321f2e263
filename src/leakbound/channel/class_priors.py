"""Priors by class: updates often reveal labels, so a bound must cover attackers who know them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from leakbound.bounds.priors import FlatPrior, GaussianPrior, Prior, joined
from leakbound.core import Batch, NotApplicable
from leakbound.randomness import permutation, uniform

FEWEST = 8
"""Minimum number of public examples of a class for a prior."""
NAMES = {
    "gaussian": "one Gaussian per class in {k} directions, labels known",
    "isotropic": "one isotropic Gaussian per class, labels known",
    "flat": "flat (limit of wide priors), with a class's variance, labels known",
}


@dataclass(frozen=True, eq=False)
class ClassPriors:
    """A prior for examples of known labels, each fitted to the public examples of its class.

    With one prior for all classes, the mean image of a class would beat the bound.

    Attributes:
        public: public examples of the same kind, never private ones.
        kind: "gaussian" (principal directions), "isotropic" or "flat".
        components: leading directions of "gaussian".

    Source: this project; docs/error_bounds.md.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> public = Batch(torch.rand(40, 1, 2, 2, generator=generator), torch.arange(40) % 2)
        >>> prior = ClassPriors(public, "isotropic").prior(torch.tensor([1, 0, 1]))
        >>> prior.dimension, prior.name
        (12, '3 independent examples, one isotropic Gaussian per class, labels known')
    """

    public: Batch | None
    kind: str
    components: int = 32
    _fitted: dict[int, Prior] = field(default_factory=dict, repr=False)

    def prior(self, labels: Tensor) -> Prior:
        """The joint prior of examples with these labels (B,), in blocks.

        Raises:
            NotApplicable: a class has too few public examples, or equal ones.
        """
        parts = [self._of(label) for label in labels.tolist()]
        many = "" if len(parts) == 1 else f"{len(parts)} independent examples, "
        return joined(parts, f"{many}{NAMES[self.kind].format(k=self.components)}")

    def batches(
        self,
        labels: Tensor,
        count: int,
        source: torch.Generator,
    ) -> list[Batch]:
        """Batches with these labels (B,), to average the Fisher information over.

        A bound holds for its prior, so the batches are drawn from it. A flat prior cannot be drawn
        from: then the batches are public examples of the class.
        """
        # A float32 in [0, 1) has 24 random bits.
        generator = np.random.default_rng(int(uniform((1,), source) * 2**24))
        drawn = []
        for label in labels.tolist():
            prior = self._of(label)
            images = self._images(label)
            # No example twice while there are others.
            index = permutation(len(images), source)[torch.arange(count) % len(images)]
            inputs = images[index]
            if isinstance(prior, GaussianPrior):
                made = torch.as_tensor(prior.draw(count, generator))
                inputs = made.to(inputs).reshape(inputs.shape)
            drawn.append(inputs)
        return [Batch(inputs, labels) for inputs in torch.stack(drawn, 1)]

    def _of(self, label: int) -> Prior:
        if label not in self._fitted:
            pixels = self._images(label).flatten(1).double().cpu().numpy()
            try:
                self._fitted[label] = _fit(pixels, self.kind, self.components)
            except ValueError as error:  # such as public examples that are all equal
                reason = f"no prior can be taken from the public examples of class {label}: {error}"
                raise NotApplicable(reason) from None
        return self._fitted[label]

    def _images(self, label: int) -> Tensor:
        public = self.public
        images = () if public is None else public.inputs[public.labels == label]
        if not isinstance(images, Tensor) or len(images) < FEWEST:
            raise NotApplicable(
                f"there are {len(images)} public examples of class {label}; give at least "
                f"{FEWEST} for a prior"
            )
        return images


def _fit(
    pixels: np.ndarray,
    kind: str,
    components: int,
) -> Prior:
    if kind == "gaussian":
        return GaussianPrior.from_samples(pixels, components=components)
    variance = float(pixels.var(0).mean())
    if kind == "flat":
        return FlatPrior(pixels.shape[1], variance * pixels.shape[1])
    return GaussianPrior.isotropic(pixels.mean(0), variance)
