"""Learned priors in files, in memory, and from the user's code."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leakbound import tensors
from leakbound._util import user_code
from leakbound._util.cache import RecentCache
from leakbound.attacks.blind import public_examples
from leakbound.attacks.pace import is_over
from leakbound.attacks.prior.denoiser import Denoiser, train_prior
from leakbound.core import Batch, NotApplicable, Observation

KIND = "learned prior 1"
MOST = 20 * 2**20
"""Bytes of a file of weights."""
SUFFIX = ".safetensors"
# An audit attacks many rounds with one public set, and training takes longer than an attack.
_TRAINED: RecentCache[Denoiser] = RecentCache()


@dataclass(frozen=True, eq=False)
class DenoisingPrior:
    """A denoiser of standardized examples, with what standardizes them: (x - center) / scale."""

    denoise: Callable[[Tensor, float, Tensor | None], Tensor]
    center: Tensor
    scale: Tensor

    def natural(self, x: Tensor) -> Tensor:
        return self.center + self.scale * x


def digest(public: Batch) -> str:
    """SHA-256 of public examples and labels, in hex."""
    state = hashlib.sha256(repr(tuple(public.inputs.shape)).encode())
    for value in (public.inputs, public.labels):
        state.update(value.detach().cpu().double().contiguous().numpy().data)
    return state.hexdigest()


def save_prior(
    path: Path,
    prior: Denoiser,
    about: Mapping[str, Any],
) -> None:
    """Write a denoiser as .safetensors; only a file that leakbound wrote is replaced.

    `about` is kept as text metadata: the domain, the public set's digest, the training's settings.

    Raises:
        ValueError: leakbound did not write the file that is there, or it would be over 20 MiB.
    """
    held = prior.state_dict()
    size = sum(value.numel() * value.element_size() for value in held.values())
    if size > MOST:
        raise ValueError(
            f"the prior takes {size / 2**20:.0f} MiB of at most 20; give a lower width"
        )
    facts = {"shape": prior.shape, "classes": prior.classes, "width": prior.width}
    text = json.dumps({**about, **facts}, sort_keys=True)
    tensors.write(path, held, {"leakbound.kind": KIND, "leakbound.prior": text})


def load_prior(path: Path) -> tuple[Denoiser, dict[str, Any]]:
    """A denoiser that `save_prior` wrote, and its metadata; sizes are checked before it is built.

    Raises:
        ValueError: the file is no learned prior, is damaged, or is over 20 MiB.
    """
    wrong = f"prior {str(path)!r} is no learned prior; write one with leakbound train-prior"
    # Names and metadata come on top of the weights.
    named, text = tensors.read(path, most=MOST + 2**16)
    if text.get("leakbound.kind") != KIND:
        raise ValueError(wrong)
    try:
        about = json.loads(text["leakbound.prior"])
        shape = tuple(about["shape"])
        facts = (about["classes"], about["width"])
        # Exact types: True is an int, and the file is not trusted.
        if not all(type(v) is int and 0 <= v <= 2**16 for v in (*shape, *facts)) or 0 in shape:
            raise ValueError("sizes")
        with torch.device("meta"):  # allocates nothing: the file's header may state any size
            model = Denoiser(shape, *facts)
        wanted = {name: (v.shape, v.dtype) for name, v in model.state_dict().items()}
        if wanted != {name: (v.shape, v.dtype) for name, v in named.items()}:
            raise ValueError("shapes or types")
    # Deeply nested JSON ends in a RecursionError.
    except (ValueError, KeyError, TypeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"{wrong} (it is damaged: {error})") from None
    if not all(bool(value.isfinite().all()) for value in named.values()):
        raise ValueError(f"{wrong} (it holds numbers that are not finite)")
    # The model is on "meta": its tensors are replaced, as they hold nothing.
    model.load_state_dict(named, assign=True)
    return model.eval().requires_grad_(False), about


def prior_for(
    name: str,
    observation: Observation,
    generator: torch.Generator,
    *,
    steps: int,
) -> DenoisingPrior:
    """The prior that a setting names: "" (trained on the attacker's public examples), a file of
    `leakbound train-prior`, or the user's "package.module:build".
    """
    shape = observation.input_shape
    like = observation.update.rows
    if name and not name.endswith(SUFFIX):
        return _of_user(name, observation, generator)
    if name:
        model, _ = load_prior(Path(name))
        if model.shape != shape:
            raise NotApplicable(
                f"prior {name!r} is for inputs {model.shape}, and one input here is {shape}; train "
                "one on public examples of this kind with leakbound train-prior"
            )
    else:
        model = _of_public(observation, steps)
    if (model.center.dtype, model.center.device) != (like.dtype, like.device):
        model = copy.deepcopy(model).to(like)

    def denoise(
        x: Tensor,
        sigma: float,
        labels: Tensor | None,
    ) -> Tensor:
        known = labels if labels is not None and (labels < model.classes).all() else None
        with torch.no_grad():
            return model(x, x.new_full((len(x),), sigma), known)

    return DenoisingPrior(denoise, model.center, model.scale)


class _OutOfTime(Exception):
    def __init__(self, model: Denoiser) -> None:
        super().__init__()
        self.model = model


def _of_public(observation: Observation, steps: int) -> Denoiser:
    """Trained once for each public set, from a fixed stream."""
    public = public_examples(observation)
    if public is None or public.size < 2:
        raise NotApplicable(
            "there are no public examples to learn a prior from; give public examples, or a prior "
            "of leakbound train-prior (prior='FILE.safetensors')"
        )
    classes = observation.task.label_range or 0

    def train() -> Denoiser:
        model = train_prior(
            public,
            classes=classes,
            steps=steps,
            watch=lambda step, loss: is_over(),
        )
        if is_over():
            raise _OutOfTime(model)
        return model

    try:
        return _TRAINED.get((digest(public), classes, steps), train)
    except _OutOfTime as stopped:  # it is not kept for later attacks
        return stopped.model


def _of_user(
    name: str,
    observation: Observation,
    generator: torch.Generator,
) -> DenoisingPrior:
    """`build(input_shape=...)` returns `denoise(x, sigma)`: examples (N, *S) in the model's units
    without their Gaussian noise of standard deviation `sigma`.
    """
    with user_code.seeded(generator):
        denoiser = user_code.find("prior", name)(input_shape=observation.input_shape)
    low, high = observation.task.input_range
    like = observation.update.rows
    center = like.new_full(observation.input_shape, (low + high) / 2)
    scale = torch.full_like(center, (high - low) / 4)

    def denoise(
        x: Tensor,
        sigma: float,
        labels: Tensor | None,
    ) -> Tensor:
        with torch.no_grad():
            denoised = denoiser(center + scale * x, sigma * (high - low) / 4)
        if not isinstance(denoised, Tensor) or denoised.shape != x.shape:
            raise ValueError(
                f"prior {name!r} returned no tensor of the shape {tuple(x.shape)}; return examples "
                "as they were given, without their noise"
            )
        return (denoised.to(x) - center) / scale

    return DenoisingPrior(denoise, center, scale)
