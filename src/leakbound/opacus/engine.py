"""A `PrivacyEngine` that meets a risk, adds secure noise, and says what it amounts to."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from opacus import PrivacyEngine  # type: ignore[import-untyped]
from opacus.optimizers import DPOptimizer  # type: ignore[import-untyped]
from torch import nn
from torch.utils.data import DataLoader

from leakbound import check
from leakbound.bounds.ladder import Rung
from leakbound.defenses.whitening import Whiten
from leakbound.opacus import checkpoint, empty
from leakbound.opacus.optimizer import (
    EXPERIMENT,
    SecureDPOptimizer,
    SecureGhostOptimizer,
    WhitenedDPOptimizer,
)
from leakbound.opacus.record import refuse_misfit, width
from leakbound.opacus.sampling import resampled
from leakbound.opacus.shape import PublicRoot
from leakbound.opacus.statement import Statement, risk
from leakbound.risk import (
    BaselineMatches,
    Calibration,
    Target,
    TrainingSetting,
    calibrate,
)
from leakbound.risk.corridor import Participation
from leakbound.types import Batch, Loss, NotApplicable

MODES = ("hooks", "functorch", "ew", "ghost")


@dataclass(frozen=True)
class _Asked:
    """What `risk` answers by default: for which records and which goal one was calibrated."""

    whom: dict[str, Any]
    goal: dict[str, float]

    @staticmethod
    def of(found: Calibration, prior: Rung, input_range: float) -> _Asked:
        setting, target = found.setting, found.target
        whom: dict[str, Any] = {"dim": setting.dim, "norm": setting.norm, "prior": prior}
        whom |= {"participation": setting.participation, "input_range": input_range}
        if target.psnr is None:
            return _Asked(whom, {"eta": target.eta})
        return _Asked({**whom, "input_range": width(target)}, {"psnr": target.psnr})

    def plain(self) -> dict[str, Any]:
        """For a checkpoint: without the prior, which is no plain value."""
        return {"whom": {**self.whom, "prior": None}, "goal": self.goal}


class RiskEngine(PrivacyEngine):  # type: ignore[misc]
    """Opacus' `PrivacyEngine` with secure noise and sampling, public noise shapes and risks.

    Args:
        accountant: "prv", "rdp" or "gdp", as in Opacus. Risks are computed from its history alone.

    Noise and batches come from the operating system's entropy. With `noise_generator` both can be
    replayed (batches by the loader's generator), and engine, optimizer and statements say
    *experiment only*.

    Example:
        >>> from leakbound.bounds.ladder import from_images
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> data = torch.utils.data.TensorDataset(torch.rand(40, 1, 2, 2), torch.arange(40) % 2)
        >>> engine = RiskEngine()
        >>> model, optimizer, loader, found = engine.make_private_with_risk(
        ...     module=model,
        ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ...     data_loader=DataLoader(data, batch_size=4),
        ...     target="psnr>=35 with probability<=0.1",
        ...     dim=4,
        ...     norm=1.0,
        ...     prior=from_images(torch.rand(100, 4, generator=torch.Generator().manual_seed(0))),
        ...     epochs=2,
        ...     max_grad_norm=1.0,
        ... )
        >>> found.noise_multiplier == optimizer.noise_multiplier, found.setting.steps
        (True, 20)
    """

    def __init__(self, *, accountant: str = "prv") -> None:
        with warnings.catch_warnings():  # it speaks of Opacus' own noise, which is not used
            warnings.filterwarnings("ignore", message="Secure RNG turned off")
            super().__init__(accountant=accountant, secure_mode=False)
        self._seeded = False
        self._poisson = True
        self._shaped = False
        self._trains = False
        self._generator: torch.Generator | None = None
        self._asked: _Asked | None = None

    @property
    def experiment_only(self) -> bool:
        """Whether some training of this engine was given a generator for its noise."""
        return self._seeded

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float,
        whiten: Whiten | None = None,
        public: Batch | None = None,
        public_loss: Loss = nn.functional.cross_entropy,
        poisson_sampling: bool = True,
        noise_generator: torch.Generator | None = None,
        **rest: Any,
    ) -> tuple[Any, ...]:
        """As Opacus' `make_private`, with two arguments more.

        Args:
            module: the plain model, before Opacus has put its hooks on it.
            optimizer: a torch optimizer of its parameters.
            data_loader: its length gives the sampling rate, 1 / len.
            noise_multiplier: noise standard deviation / max_grad_norm.
            max_grad_norm: L2 bound of every example's (whitened) gradient.
            whiten: the shape of the noise; None: isotropic. `refresh` counts steps.
            public: images that anyone may see, which decide the shape. None of them may be private.
            public_loss: of the model's output and the public labels.
            poisson_sampling: False leaves the loader as it is; no risk is known then.
            noise_generator: a seeded generator, for experiments only.
            rest: all other arguments of Opacus' `make_private`.

        Raises:
            NotApplicable: a combination whose guarantee would not hold, or that has no gradient of
                every example; the reason says which.
        """
        check.non_negative(noise_multiplier=noise_multiplier)
        self._refuse(max_grad_norm, whiten, public, rest)
        shape = None
        if whiten is not None and public is not None:
            size = max(1, len(data_loader.dataset) // len(data_loader))  # type: ignore[arg-type]
            shape = PublicRoot.of(module, public, whiten, examples=size, loss=public_loss)
        self._seeded |= noise_generator is not None
        self._poisson &= poisson_sampling
        self._shaped |= shape is not None
        self._generator = noise_generator
        found = super().make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            poisson_sampling=poisson_sampling,
            noise_generator=noise_generator,
            shape=shape,
            **rest,
        )
        self._trains = True
        return tuple(found)

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
        prior: Rung,
        matches: BaselineMatches | None = None,
        delta: float = 1e-5,
        **rest: Any,
    ) -> tuple[Any, ...]:
        """`make_private` with the least noise that meets a risk after so many epochs.

        Args:
            data_loader: its length gives the sampling rate, 1 / len, and the steps.
            target: the accepted risk, as "psnr>=20 with probability<=0.001".
            dim: number of values of one record.
            norm: the least among the records.
            epochs: of the whole training.
            max_grad_norm: L2 bound of every example's gradient.
            input_range: width of the range of an input.
            participation: "hidden" where no attacker sees which batch holds a record, as epsilon
                in Opacus has it; "visible" where one does, such as a server that picks clients.
            prior: of the records, taken from public ones: `ladder.from_images(public)`.
            matches: what guesses without an update match in the data.
            delta: at which epsilon is told.
            rest: all other arguments of `make_private`.

        Returns:
            What `make_private` returns, and the `Calibration`.

        Raises:
            ValueError: nothing meets the target, no noise is needed, the data's first record does
                not fit `dim` or `input_range`, or this engine has a training already.
        """
        check.count(epochs=epochs)
        if not getattr(prior, "informed", False):
            raise ValueError(
                f"prior is {prior!r}; a target needs a prior that knows the data, taken from "
                "public examples: leakbound.bounds.ladder.from_images(public)"
            )
        self._refuse_earlier()
        refuse_misfit(data_loader, dim, target, input_range)
        each = len(data_loader)
        setting = TrainingSetting(1.0, dim, norm, epochs * each, 1 / each, participation)
        found: Calibration = calibrate(
            target,
            setting,
            clip_norm=max_grad_norm,
            delta=delta,
            input_range=input_range,
            prior=prior,
            matches=matches,
        )
        found.defense()  # refuses where no noise is needed
        rest |= {"data_loader": data_loader, "max_grad_norm": max_grad_norm}
        made = self.make_private(noise_multiplier=found.noise_multiplier, **rest)
        self._asked = _Asked.of(found, prior, input_range)
        return (*made, found)

    def risk(self, *, delta: float = 1e-5, **asked: Any) -> Statement:
        """What the steps so far amount to; arguments as of `statement.risk`.

        After `make_private_with_risk`, what was asked for there is the default.

        Raises:
            NotApplicable: a training without Poisson sampling, for which no edge is known.
            ValueError: neither this call nor a calibration says for which records.
        """
        if not self._poisson:
            raise NotApplicable(
                "poisson_sampling is False: the edges hold for Poisson sampling alone, and a "
                "record that takes part once an epoch is at more risk"
            )
        if self._asked is not None:
            goal = {} if {"eta", "psnr"} & set(asked) else self._asked.goal
            asked = {**self._asked.whom, **goal, **asked}
        if "dim" not in asked:
            raise ValueError("dim is missing; give dim, norm and psnr or eta")
        asked = {"experiment_only": self._seeded, "shaped": self._shaped, **asked}
        return risk(self.accountant, delta=delta, **asked)

    def save_checkpoint(
        self, *, checkpoint_dict: dict[str, Any] | None = None, **rest: Any
    ) -> None:
        """As Opacus', with what `risk` needs beside the history.

        Args:
            checkpoint_dict: what else to save: tensors and plain values, else it cannot be loaded.
            rest: all other arguments of Opacus' `save_checkpoint`.
        """
        flags = (self._seeded, self._poisson, self._shaped)
        held = dict(zip(checkpoint.FLAGS, flags, strict=True))
        asked = None if self._asked is None else self._asked.plain()
        whole = {**(checkpoint_dict or {}), checkpoint.KEY: {**held, "asked": asked}}
        super().save_checkpoint(checkpoint_dict=whole, **rest)

    def load_checkpoint(
        self, *, path: Any, torch_load_kwargs: dict[str, Any] | None = None, **rest: Any
    ) -> dict[str, Any]:
        """As Opacus'; what was true of the saved training stays true of what follows it.

        Args:
            path: of a checkpoint that `save_checkpoint` wrote.
            torch_load_kwargs: for `torch.load`.
            rest: all other arguments of Opacus' `load_checkpoint`.

        Raises:
            ValueError: a checkpoint that holds code, or says nothing on seeds and sampling.
        """
        settings = torch_load_kwargs or {}
        whole, held = checkpoint.opened(path, **settings)
        self._seeded |= held["experiment_only"]
        self._poisson &= held["poisson_sampling"]
        self._shaped |= held["shaped"]
        found = super().load_checkpoint(path=whole, torch_load_kwargs=settings, **rest)
        if self._asked is None and held.get("asked"):
            self._asked = _Asked(held["asked"]["whom"], held["asked"]["goal"])
        return dict(found)

    def _refuse_earlier(self) -> None:
        if len(self.accountant) > 0:
            raise ValueError(
                f"the accountant holds {len(self.accountant)} settings of earlier steps, which the "
                "calibration would not count; make a new engine"
            )
        if self._trains:
            raise ValueError(
                "this engine has made a training private before: both would share the risk that "
                "is asked for here, and each could use it up; make a new engine"
            )

    def _refuse(
        self,
        max_grad_norm: Any,
        whiten: Whiten | None,
        public: Batch | None,
        rest: dict[str, Any],
    ) -> None:
        if isinstance(max_grad_norm, list):
            raise NotApplicable("max_grad_norm is a list: only one bound for the whole gradient")
        check.positive(max_grad_norm=max_grad_norm)
        if (clipping := rest.get("clipping", "flat")) != "flat":
            raise NotApplicable(f"clipping is {clipping!r}: only 'flat' has secure noise here")
        mode = rest.get("grad_sample_mode", "hooks")
        if mode not in MODES:
            raise NotApplicable(f"grad_sample_mode is {mode!r}: only {', '.join(MODES)} are known")
        if (whiten is None) != (public is None):
            raise NotApplicable(
                "a shape needs both whiten= and public images that decide it; give both or neither"
            )
        if public is not None and mode == "ghost":
            raise NotApplicable(
                "grad_sample_mode is 'ghost', which never has the gradient of one example, so it "
                "cannot be whitened; take 'hooks' or 'functorch'"
            )
        if rest.get("rand_on_empty"):
            raise NotApplicable(
                "rand_on_empty puts a random record where a batch is empty: the sum then moves by "
                "up to twice the clip norm when a record joins, more than the accountant counts"
            )

    def _prepare_model(
        self, module: nn.Module, *, grad_sample_mode: str = "hooks", **settings: Any
    ) -> Any:
        if grad_sample_mode not in empty.KINDS or not settings["wrap_model"]:
            return super()._prepare_model(module, grad_sample_mode=grad_sample_mode, **settings)
        self.validate(module=module, optimizer=None, data_loader=None)
        kept = {name: settings[name] for name in ("batch_first", "loss_reduction")}
        return empty.wrapped(module, grad_sample_mode, **kept)

    def _prepare_optimizer(
        self,
        *,
        optimizer: torch.optim.Optimizer,
        distributed: bool = False,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        shape: PublicRoot | None = None,
        **settings: Any,
    ) -> DPOptimizer:
        if distributed:
            raise NotApplicable("the module is distributed: secure noise here is for one process")
        if isinstance(optimizer, DPOptimizer):
            optimizer = optimizer.original_optimizer
        if shape is not None:
            return WhitenedDPOptimizer(
                optimizer, shape=shape, generator=noise_generator, **settings
            )
        kind = SecureGhostOptimizer if grad_sample_mode == "ghost" else SecureDPOptimizer
        return kind(optimizer, generator=noise_generator, **settings)

    def _prepare_data_loader(self, data_loader: DataLoader[Any], **settings: Any) -> Any:
        made = super()._prepare_data_loader(data_loader, **settings)
        if not settings["poisson_sampling"]:
            return made
        return resampled(made, steps=len(data_loader), seeded=self._generator is not None)

    def __repr__(self) -> str:
        note = f"; {EXPERIMENT}" if self._seeded else ""
        steps = sum(int(count) for *_, count in self.accountant.history)
        return f"RiskEngine({self.accountant.mechanism()}, {steps} steps{note})"
