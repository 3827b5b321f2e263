"""A `PrivacyEngine` that meets a target risk, adds secure noise, and states the risk so far."""

from __future__ import annotations

import io
import math
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import torch
from opacus import PrivacyEngine  # type: ignore[import-untyped]
from opacus.optimizers import DPOptimizer  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from leakbound import check
from leakbound._util import files
from leakbound._util.decibels import mse_of_psnr
from leakbound.bounds import conversions
from leakbound.bounds.record_priors import Baseline
from leakbound.core import NotApplicable
from leakbound.opacus.batches import (
    KINDS,
    counted,
    draws_once,
    examples_of_a_pass,
    refuse_dropped,
    resampled,
    wrapped,
)
from leakbound.opacus.optimizer import EXPERIMENT, SecureDPOptimizer, SecureGhostOptimizer
from leakbound.opacus.statement import Statement, risk
from leakbound.risk import (
    BaselineMatches,
    Target,
    TrainingSetting,
    calibrate_setting,
)
from leakbound.risk.corridor import Participation

MODES = (*KINDS, "ghost")
FLAGS = ("experiment_only", "poisson_sampling")
"""What a checkpoint must state under the key "leakbound", beside the arguments of `risk`."""
GOALS = {"eta", "psnr"}
UNSAMPLED = (
    "poisson_sampling is False, and how often an example takes part is not known: the loader has "
    "its own sampler, a step did not have exactly one new batch of it, or the engine also trained "
    "with Poisson sampling; use PyTorch's shuffle=True and a new engine, or poisson_sampling=True"
)


class RiskEngine(PrivacyEngine):  # type: ignore[misc]
    """Opacus' `PrivacyEngine` with secure noise and sampling, and risks.

    Noise and batches come from the operating system's entropy. With `noise_generator` both can be
    replayed, and engine, optimizer and statements say *experiment only*.

    Args:
        accountant: "prv", "rdp" or "gdp", as in Opacus. Risks use only its history.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.rand(40, 4), torch.arange(40) % 2)
        >>> model, engine = nn.Linear(4, 2), RiskEngine()
        >>> model, optimizer, loader = engine.make_private(
        ...     module=model,
        ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ...     data_loader=DataLoader(data, batch_size=4),
        ...     noise_multiplier=1.0,
        ...     max_grad_norm=1.0,
        ... )
    """

    def __init__(self, *, accountant: str = "prv") -> None:
        with warnings.catch_warnings():  # about Opacus' own noise, which is not used
            warnings.filterwarnings("ignore", message="Secure RNG turned off")
            super().__init__(accountant=accountant, secure_mode=False)
        self._flags = {"experiment_only": False, "poisson_sampling": True}
        self._trains = False
        # over shuffled examples, and batches that they gave
        self._passes = 0
        self._batches = 0
        self._rate = 0.0  # the largest share of a batch; Opacus multiplies it where batches join
        self._repeats = False  # whether a pass may give an example twice
        self._sampled: set[bool] = set()  # whether trainings had Poisson sampling
        self._divisor = 1
        self._generator: torch.Generator | None = None
        self._risk_arguments: dict[str, Any] = {}  # of `make_private_with_risk`

    @property
    def experiment_only(self) -> bool:
        """Whether some training of this engine was given a generator for its noise."""
        return self._flags["experiment_only"]

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float,
        poisson_sampling: bool = True,
        noise_generator: torch.Generator | None = None,
        **rest: Any,
    ) -> tuple[Any, ...]:
        """As Opacus' `make_private`, with secure noise and batches.

        `module` is the plain model, before Opacus adds its hooks. Without `poisson_sampling`, each
        pass over the data counts as one full-batch step, if every step takes one new batch of the
        loader and its `collate_fn` repeats no example. A seeded `noise_generator` is for
        experiments.

        The noisy sum is divided by the integer part of examples / batches, a constant; with
        `loss_reduction` "sum" it is not divided. Your loss must be the mean (or sum) of one term
        per example, as `loss_reduction` says; if you give it as `criterion`, that is checked.

        Raises:
            NotApplicable: the guarantee does not hold for this combination.
        """
        check.non_negative(noise_multiplier=noise_multiplier)
        _refuse(max_grad_norm, rest)
        self._note(noise_generator is not None, poisson_sampling)
        self._generator = noise_generator
        private = super().make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            poisson_sampling=poisson_sampling,
            noise_generator=noise_generator,
            **rest,
        )
        self._trains = True
        return tuple(private)

    def make_private_with_risk(
        self,
        *,
        data_loader: DataLoader[Any],
        target: Target | str,
        dim: int,
        norm: float,
        epochs: int,
        max_grad_norm: float,
        input_range: float = 1.0,
        participation: Participation = "hidden",
        people: int = 1,
        prior: Baseline,
        matches: BaselineMatches | None = None,
        delta: float = 1e-5,
        **rest: Any,
    ) -> tuple[Any, ...]:
        """`make_private` with the least noise that meets a risk after so many epochs.

        Returns what `make_private` returns, and the `Calibration`.

        Args:
            data_loader: its length gives the sampling rate, 1 / len, and the steps.
            target: the accepted risk, as "psnr>=20 with probability<=0.001".
            dim: number of values of one example.
            norm: the least among the examples.
            epochs: of the whole training.
            max_grad_norm: L2 bound of every example's gradient.
            input_range: width of the range of an input.
            participation: "hidden" if no attacker sees which batch holds an example, as Opacus'
                epsilon assumes; "visible" if one does, such as a server that picks clients.
            people: the largest number of one person's examples in the data.
            prior: of the examples, taken from public ones: `record_priors.from_images(public)`.
            matches: what prior-only guesses match in the data.
            delta: the delta at which epsilon is stated.
            rest: all other arguments of `make_private`.

        Raises:
            ValueError: nothing meets the target, no noise is needed, the data's first example does
                not fit `dim` or `input_range`, or this engine already has a training.
        """
        check.count(epochs=epochs)
        if getattr(prior, "basis", None) is None:
            raise ValueError(
                f"prior is {prior!r}; a target needs a prior from the data, taken from "
                "public examples: leakbound.bounds.record_priors.from_images(public)"
            )
        if len(self.accountant) > 0:
            raise ValueError(
                f"the accountant holds {len(self.accountant)} settings of earlier steps, which the "
                "calibration would not count; make a new engine"
            )
        if self._trains:
            raise ValueError(
                "this engine has already made a training private: both would share the requested "
                "risk, and each could use it up; make a new engine"
            )
        if isinstance(target, str):
            target = Target.parse(target, input_range=input_range)
        if target.goal is not None or target.ncc is not None:
            raise ValueError(
                f"target is {target}, but a statement here is about mean squared errors; calibrate "
                "with leakbound.calibrate(data=...), and give its noise to make_private"
            )
        refuse_misfit(data_loader, dim, target)
        each = len(data_loader)
        setting = TrainingSetting(
            1.0, dim, norm, epochs * each, 1 / each, participation, people=people
        )
        calibration = calibrate_setting(
            target,
            setting,
            clip_norm=max_grad_norm,
            delta=delta,
            prior=prior,
            matches=matches,
        )
        if calibration.noise_multiplier == 0:
            calibration.defense()  # says that no noise is needed
        private = self.make_private(
            data_loader=data_loader,
            noise_multiplier=calibration.noise_multiplier,
            max_grad_norm=max_grad_norm,
            **rest,
        )
        goal: dict[str, Any] = {"eta": target.eta, "input_range": input_range}
        if target.psnr is not None:
            goal = {"psnr": target.psnr, "input_range": _width(target)}
        self._risk_arguments = {
            "dim": dim,
            "norm": norm,
            "prior": prior,
            "participation": participation,
            "people": people,
            **goal,
        }
        return (*private, calibration)

    def risk(self, *, delta: float = 1e-5, **arguments: Any) -> Statement:
        """The risk of the steps so far; arguments as of `leakbound.opacus.risk`.

        After `make_private_with_risk`, its arguments are the default. Without Poisson sampling, an
        example is in one batch of every pass over the data, so k passes count as k full-batch
        steps: in the worst case no better bound holds (docs/federated_privacy.md).

        Raises:
            NotApplicable: without Poisson sampling, the number of passes is not known.
        """
        # One goal replaces the other.
        replaced = GOALS if GOALS & set(arguments) else set()
        defaults = {name: v for name, v in self._risk_arguments.items() if name not in replaced}
        arguments = {"experiment_only": self.experiment_only, **defaults, **arguments}
        if "dim" not in arguments:
            raise ValueError("dim is missing; give dim, norm and psnr or eta")
        return risk(self._history, delta=delta, **arguments)

    @property
    def _history(self) -> Any:
        """The accountant, or, without Poisson sampling, a full-batch step for every pass."""
        if self._flags["poisson_sampling"]:
            return self.accountant
        history = self.accountant.history
        steps = sum(int(count) for *_, count in history)
        joined = any(rate > self._rate * (1 + 1e-9) for _, rate, _ in history)
        if self._repeats or joined or len(self._sampled) > 1 or steps != self._batches:
            raise NotApplicable(UNSAMPLED)
        if not steps:
            return []
        return [(min(noise for noise, *_ in history), 1.0, self._passes)]

    def get_epsilon(self, delta: float, **settings: Any) -> float:
        """As Opacus'; without Poisson sampling, that of a full-batch step for every pass."""
        if self._flags["poisson_sampling"]:
            return float(super().get_epsilon(delta, **settings))
        steps = self._history
        if not steps:
            return 0.0
        noise, _, count = steps[0]
        return float(conversions.epsilon(noise, delta=delta, steps=count))

    def _taken(self, *, passes: int = 0, batches: int = 0) -> None:
        self._passes += passes
        self._batches += batches

    def save_checkpoint(
        self, *, checkpoint_dict: dict[str, Any] | None = None, **rest: Any
    ) -> None:
        """As Opacus', with the data for `risk` in addition to the history.

        `checkpoint_dict` may hold tensors and plain values; anything else cannot be loaded.
        """
        arguments = self._risk_arguments.items()
        kept = {
            **self._flags,
            # A prior is no plain value.
            "risk_arguments": {name: value for name, value in arguments if name != "prior"},
            "passes": self._passes,
            "batches": -1 if self._repeats else self._batches,
            "rate": self._rate,
        }
        whole = {**(checkpoint_dict or {}), "leakbound": kept}
        super().save_checkpoint(checkpoint_dict=whole, **rest)

    def load_checkpoint(
        self,
        *,
        path: Any,
        torch_load_kwargs: dict[str, Any] | None = None,
        **rest: Any,
    ) -> dict[str, Any]:
        """As Opacus'; the facts about the saved training also hold for what follows it.

        A checkpoint that holds code, or that `save_checkpoint` did not write, raises a ValueError.
        """
        settings = torch_load_kwargs or {}
        whole, kept = _opened(path, settings)
        self._note(*(kept[flag] for flag in FLAGS))
        counts: list[Any] = [kept.get(name) for name in ("passes", "batches", "rate")]
        if [*map(type, counts)] == [int, int, float] and min(counts) >= 0:
            passes, batches, rate = counts
            self._rate = max(self._rate, rate)
            self._taken(passes=passes, batches=batches)
        else:
            self._repeats = True
        loaded = super().load_checkpoint(path=whole, torch_load_kwargs=settings, **rest)
        if not self._risk_arguments:
            self._risk_arguments = dict(kept.get("risk_arguments") or {})
        return dict(loaded)

    def _note(self, seeded: bool, poisson: bool) -> None:
        self._flags["experiment_only"] |= seeded
        self._flags["poisson_sampling"] &= poisson
        self._sampled.add(poisson)

    def _prepare_model(
        self,
        module: nn.Module,
        *,
        grad_sample_mode: str = "hooks",
        **settings: Any,
    ) -> Any:
        if grad_sample_mode not in KINDS or not settings["wrap_model"]:
            return super()._prepare_model(module, grad_sample_mode=grad_sample_mode, **settings)
        self.validate(module=module, optimizer=None, data_loader=None)
        return wrapped(
            module,
            grad_sample_mode,
            batch_first=settings["batch_first"],
            loss_reduction=settings["loss_reduction"],
        )

    def _prepare_optimizer(
        self,
        *,
        optimizer: torch.optim.Optimizer,
        distributed: bool = False,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        **settings: Any,
    ) -> DPOptimizer:
        if distributed:
            raise NotApplicable("the module is distributed: secure noise here is for one process")
        if isinstance(optimizer, DPOptimizer):
            optimizer = optimizer.original_optimizer
        settings |= {"generator": noise_generator, "expected_batch_size": self._divisor}
        kind = SecureGhostOptimizer if grad_sample_mode == "ghost" else SecureDPOptimizer
        return kind(optimizer, **settings)

    def _prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        **settings: Any,
    ) -> Any:
        seeded = self._generator is not None
        if settings["poisson_sampling"]:
            refuse_dropped(data_loader, seeded=seeded)
        made = super()._prepare_data_loader(data_loader, **settings)
        # In floats, as in Opacus, 49 * (1 / 49) is 0.99 and so 0.
        self._divisor = max(1, examples_of_a_pass(data_loader) // len(data_loader))
        if not settings["poisson_sampling"]:
            self._repeats |= not draws_once(data_loader)
            self._rate = max(self._rate, 1 / len(data_loader))
            return counted(made, self._taken)
        made.in_order = data_loader.in_order
        made.pin_memory_device = data_loader.pin_memory_device
        return resampled(made, steps=len(data_loader), seeded=seeded)

    def __repr__(self) -> str:
        note = f"; {EXPERIMENT}" if self.experiment_only else ""
        steps = sum(int(count) for *_, count in self.accountant.history)
        return f"RiskEngine({self.accountant.mechanism()}, {steps} steps{note})"


def _refuse(max_grad_norm: Any, rest: dict[str, Any]) -> None:
    """Reject settings without secure noise, or without a valid guarantee."""
    if isinstance(max_grad_norm, list):
        raise NotApplicable(
            "max_grad_norm is a list: only one bound for the whole gradient is supported"
        )
    check.positive(max_grad_norm=max_grad_norm)
    if (clipping := rest.get("clipping", "flat")) != "flat":
        raise NotApplicable(f"clipping is {clipping!r}: only 'flat' has secure noise here")
    mode = rest.get("grad_sample_mode", "hooks")
    if mode not in MODES:
        raise NotApplicable(f"grad_sample_mode is {mode!r}: only {', '.join(MODES)} are known")
    _refuse_loss(rest.get("criterion"), rest.get("loss_reduction", "mean"), mode)
    if rest.get("rand_on_empty"):
        raise NotApplicable(
            "rand_on_empty puts a random example where a batch is empty: the sum then moves by "
            "up to twice the clip norm when an example joins, more than the accountant counts"
        )


def _refuse_loss(
    criterion: Any,
    reduction: str,
    mode: str,
) -> None:
    """Reject a loss for which an example's gradient depends on the rest of the batch."""
    reduced = getattr(criterion, "reduction", reduction)
    if reduced in ("mean", "sum") and reduced != reduction:
        raise NotApplicable(
            f"criterion has the reduction {reduced!r} and loss_reduction is {reduction!r}: every "
            "example's gradient is then scaled by the size of the batch before it is clipped, and "
            "one example moves those of all others; give both the same"
        )
    weighs = (
        isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss) and criterion.weight is not None
    )
    if (
        weighs and reduced == "mean" and mode != "ghost"
    ):  # ghost clipping divides by the batch's size
        raise NotApplicable(
            "criterion has class weights and the reduction 'mean', which divides by the sum of the "
            "weights in the batch, and that is private; give reduction='sum' and "
            "loss_reduction='sum', or use grad_sample_mode 'ghost'"
        )


def refuse_misfit(
    loader: DataLoader[Any],
    dim: int,
    target: Target,
) -> None:
    """Reject a first example of another size or, for decibels, a wider range than the target's."""
    inputs = _first(loader.dataset)
    if not inputs:
        return
    values = inputs[0].detach()
    if dim not in (values.numel(), sum(part.numel() for part in inputs)):
        raise ValueError(
            f"dim is {dim}, but the first example of data_loader has {values.numel()} values; "
            "give their number"
        )
    if target.psnr is None or not values.is_floating_point() or values.numel() == 0:
        return
    if float(values.max()) - float(values.min()) > _width(target) * (1 + 1e-6):
        raise ValueError(
            f"input_range is {_width(target):.4g}, but the first example of data_loader spans "
            "more; give the width of the range that inputs can have"
        )


def _width(target: Target) -> float:
    """The width of the input range for which the target's decibels equal its error."""
    assert target.psnr is not None
    return math.sqrt(target.eta / mse_of_psnr(target.psnr))


def _first(dataset: Any) -> list[Tensor]:
    """The tensors of the first example that are not single numbers, usually the input first."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return []
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            example = dataset[0]
    except Exception:  # a data set may raise anything; the training will raise it again
        return []
    finally:
        random.setstate(state)
    parts = example if isinstance(example, tuple | list) else [example]
    return [part for part in parts if isinstance(part, Tensor) and part.ndim > 0]


def _opened(
    path: Any,
    settings: dict[str, Any],
) -> tuple[io.BytesIO, dict[str, Any]]:
    """A checkpoint's bytes, and what `save_checkpoint` stored; no code in the file runs."""
    whole = io.BytesIO(path.read() if hasattr(path, "read") else files.read(Path(path)))
    try:
        checkpoint = torch.load(whole, **settings, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"path is {path!r}, which is not a checkpoint of tensors and plain values only "
            f"({str(error).splitlines()[0][:200]}); leave other things out of checkpoint_dict"
        ) from None
    whole.seek(0)
    kept = checkpoint.get("leakbound") if isinstance(checkpoint, dict) else None
    if not isinstance(kept, dict) or any(type(kept.get(flag)) is not bool for flag in FLAGS):
        raise ValueError(
            f"path is {path!r}, which does not say whether its noise was seeded and its batches "
            "were Poisson samples, so no risk can be stated; use one that "
            "RiskEngine.save_checkpoint wrote"
        )
    return whole, kept
