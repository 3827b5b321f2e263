"""What an app's own strategy and mods did to each update: watched while they run, not declared."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message
from flwr.clientapp import client_app as client_apps
from flwr.clientapp.mod import centraldp_mods, localdp_mod
from flwr.serverapp.strategy import Strategy

from leakbound.captured import declared
from leakbound.client_side.captures import declares, undeclared
from leakbound.client_side.optimizers import OptimizerWatch
from leakbound.client_side.round import computes_anew
from leakbound.defenses import Clip, Defense, GaussianNoise, chain
from leakbound.flower.facts import describe
from leakbound.flower.messages import digest, only_arrays
from leakbound.flower.nesting import Seal, watched_seals
from leakbound.risk.deployment.facts import Mistake


@dataclass(frozen=True)
class AppliedStep:
    """One change of an update: its links in units of the weights, and digests around it.

    `links` is empty if the change is no clip and no noise of a fixed level.
    """

    who: str
    links: tuple[Defense, ...]
    given: str
    out: str
    anew: bool = False

    @property
    def origin(self) -> tuple[str, str]:
        return self.given, self.who.partition("(")[0]


class Applied:
    """Watches an app in this process: which strategy started, which mods changed an update how.

    A step counts only if the arrays that it left are those of the next step, and of the reply.
    """

    def __init__(self) -> None:
        self.strategy: Any = None
        self.rounds: int | None = None
        self.arrays: ArrayRecord | None = None
        self._steps: list[AppliedStep] = []
        self._keys: list[str] = []
        self._rates = set[float]()
        self._optimizers = OptimizerWatch()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Import and run the app inside this block; Flower's functions are put back after it."""
        local = "LocalDpMod"
        fixed = "fixedclipping_mod"
        adaptive = "adaptiveclipping_mod"
        places: list[tuple[Any, str, Callable[[Any], Any]]] = [
            (Strategy, "start", self._start),
            (client_apps, "make_ffn", _with_mods),
            (localdp_mod, "compute_clip_model_update", self._change(local, Clip)),
            (localdp_mod, "add_gaussian_noise_inplace", self._change(local, GaussianNoise)),
            (centraldp_mods, "compute_clip_model_update", self._change(fixed, Clip)),
            (centraldp_mods, "compute_adaptive_clip_model_update", self._change(adaptive, Clip)),
        ]
        with ExitStack() as stack:
            for place, name, around in places:
                # A release of Flower may lack one of these functions.
                if (real := getattr(place, name, None)) is not None:
                    setattr(place, name, around(real))
                    stack.callback(setattr, place, name, real)
            stack.enter_context(self._optimizers.watching())
            yield

    def around(self, app: Any) -> Callable[..., Message]:
        """The client's app, watched from each message to its reply."""

        def call(message: Message, context: Any) -> Message:
            records = list(message.content.array_records.values())
            self._steps = []
            self._rates = set()
            self._optimizers.forget()
            self._keys = list(records[0]) if len(records) == 1 else []
            with watched_seals(self._sealed):
                reply: Message = app(message, context)
            return reply

        return call

    def about(self, reply: Message) -> dict[str, str | None]:
        """The metadata of the last reply's update: what it declares, and what it does not."""
        about = self._defended(reply)
        # An update that a mod computes anew is not what the app's optimizer made.
        if any(step.anew for step in self._steps):
            return {**about, declared.OPTIMIZER: "sgd"}
        return {**about, **self._optimizers.about()}

    def _defended(self, reply: Message) -> dict[str, str]:
        """What was done to the update after the training."""
        about = self._of_server()
        if not self._steps:
            return about
        want = digest(only_arrays(reply.content, "the reply")[1])
        kept = list[AppliedStep]()
        # backwards from what left: a step counts if its output is the next one's input
        for step in reversed(self._steps):
            if step.out == want:
                kept = [step, *kept]
                want = step.given
                if step.anew:
                    break
        who = " and ".join(dict.fromkeys(step.who for step in kept or self._steps))
        links = [link for step in kept for link in step.links]
        if not kept:
            words = f"{who} ran, but something changed the weights afterwards"
        elif not links or not all(step.links for step in kept):
            words = f"{who} ran, but not as a clip or noise of all weights"
        else:
            try:
                chain(*links)
            except ValueError as error:
                return {**about, declared.NOTE: f"{who} ran: {error}"}
            return {**about, **declares(links, f"{who}, seen in the app while it ran")}
        return undeclared(". ".join([*about.values(), words]))

    def mistakes(self, mods: Sequence[Any]) -> tuple[Mistake, ...]:
        """Those of the strategy that started, with these mods."""
        if self.strategy is None:
            return ()
        return describe(
            self.strategy,
            mods,
            rounds=self.rounds,
            arrays=self.arrays,
        )[1]

    def _of_server(self) -> dict[str, str]:
        """A note in an update's metadata if the strategy adds noise to it later."""
        if self.strategy is None:
            return {}
        deployment, _ = describe(self.strategy)
        if deployment.noise.at != "server":
            return {}
        does = "clips and adds noise" if deployment.clip.at == "server" else "adds noise"
        note = (
            f"the server's strategy {does} after it has the updates: the server sees each update "
            "without this, so it is not declared"
        )
        return {declared.NOTE: note}

    def _start(self, real: Any) -> Any:
        signature = inspect.signature(real)

        def start(*args: Any, **named: Any) -> Any:
            bound = signature.bind(*args, **named)  # apps give these by position or by name
            bound.apply_defaults()
            self.strategy = bound.arguments["self"]
            self.rounds = bound.arguments.get("num_rounds")
            self.arrays = bound.arguments.get("initial_arrays")
            return real(*args, **named)

        return start

    def _change(self, mod: str, link: type[Any]) -> Callable[[Any], Any]:
        """Watch a function of arrays (first) that it changes in place by a level (last)."""

        def around(real: Any) -> Any:
            signature = inspect.signature(real)

            def change(*args: Any, **named: Any) -> Any:
                arrays, *_, level = signature.bind(*args, **named).arguments.values()
                before = self._digest(arrays)
                result = real(*args, **named)
                if level > 0:
                    self._step(f"Flower's {mod}", [link(float(level))], before, arrays)
                return result

            return change

        return around

    def _step(
        self,
        who: str,
        links: Sequence[Defense],
        before: str,
        arrays: Any,
    ) -> None:
        if any(np.ndim(v) == 0 and np.asarray(v).dtype.kind == "f" for v in arrays):
            links = ()  # Flower neither clips a scalar nor adds noise to it
        self._steps.append(AppliedStep(who, tuple(links), before, self._digest(arrays)))

    def _digest(self, arrays: Sequence[Any]) -> str:
        """That of the record that Flower's mods make of these arrays."""
        keys = self._keys if len(self._keys) == len(arrays) else map(str, range(len(arrays)))
        named = zip(keys, arrays, strict=True)
        return digest(ArrayRecord({key: Array(np.asarray(value)) for key, value in named}))

    def _sealed(self, seal: Seal) -> None:
        self._rates.add(seal.rate)
        try:
            if len(self._rates) > 1:
                raise ValueError("two mods divide by different rates")
            links = tuple(declared.scaled(link, seal.rate) for link in seal.defense.links)
        except ValueError:
            links = ()
        if self._steps and (seal.given, "DefenseMod") == self._steps[-1].origin:
            del self._steps[-1]  # the outer mod's seal names its links too
        anew = computes_anew(seal.defense) is not None
        who = f"DefenseMod({seal.defense!r})"
        self._steps.append(AppliedStep(who, links, seal.given, seal.digest, anew))


def mods_of(app: Any) -> tuple[Any, ...]:
    """The mods around an app's train function, if it was made while an `Applied` watched."""
    made = app._call or app._registered_funcs.get("train.default")
    return tuple(getattr(made, "leakbound_mods", ()))


def _with_mods(real: Any) -> Any:
    def make(function: Any, mods: Sequence[Any]) -> Any:
        made = real(function, mods)

        def called(*arguments: Any, **named: Any) -> Any:
            return made(*arguments, **named)

        called.leakbound_mods = tuple(mods)  # type: ignore[attr-defined]
        return called

    return make
