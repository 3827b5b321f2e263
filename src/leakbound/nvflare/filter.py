"""Defenses and the leak meter as a filter of an NVFlare client's results."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply
from nvflare.app_common.app_constant import AppConstants
from torch import Tensor

from leakbound import registry
from leakbound._util import user_code
from leakbound.client_side.batches import distinct, listen, shown
from leakbound.client_side.metered import BROKEN, ClientMeter
from leakbound.client_side.round import (
    MARK,
    ClientRound,
    check_of_client,
    needs_batches,
    public_text,
)
from leakbound.client_side.setup import Setup
from leakbound.defenses.base import Chain, Defense
from leakbound.inspection import LayerFinding, inspect
from leakbound.meter import Policy, Reading
from leakbound.nvflare.exchange import CHANGE, WEIGHTS, coarsest, exchanged, read, write
from leakbound.randomness import Source, secure, stream

RECEIVED = "leakbound.received"
ANSWERED = "leakbound.answered"
WHY = "leakbound.why"
"""The header of an empty result that says why it is empty."""
SENT = "the server's task"
RESULT = "the result"
PACKAGE = "leakbound"
MARKS = "LeakboundFilter"
"""What the history of a result's filters holds after this one."""
HOLDS_WEIGHTS = (WEIGHTS, CHANGE, DataKind.FL_MODEL, DataKind.COLLECTION)
MISSED = (
    "a result with weights did not pass the leakbound filter; name its task in the filter's tasks "
    '(NVFlare compares names exactly: "*" is no pattern)'
)
logger = logging.getLogger("leakbound.nvflare")


@dataclass
class _Received:
    """One task: what the server sent, and how the client answers it."""

    task_id: str
    number: int
    owner: LeakboundFilter
    work: ClientRound | None = None
    findings: tuple[LayerFinding, ...] = ()
    problem: Exception | None = None


class LeakboundFilter(DXOFilter):  # type: ignore[misc]
    """Run a defense on what a client sends, and measure it before it leaves: weights or changes.

    Put it under `task_result_filters` of config_fed_client.json, with the exact names of all tasks
    that return weights. It copies the global weights from the event before the executor runs. In
    a site's privacy.json, filters get no events: name it under `task_data_filters` there, too.

    The defense sees the row (weights before - weights after) / learning rate. Buffers, such as
    running statistics, are replaced by the server's. Metrics and the meta data (numbers of steps)
    leave unchanged. Errors, and results with weights that reach no filter, become empty results
    with a text that does not depend on the data. State between rounds lives in this process.

    Readings of the meter go to `path` alone: NVFlare can stream a client's log to the server.

    Args:
        defense: a name with settings, as in a plan ("clip,clip_norm=1.0"), a list of those, or a
            defense. Links on the sum of all clients raise an error.
        model: what makes the model, as "module:function", or the function.
        learning_rate: of the local SGD. None: 1, so that settings are in units of weights.
        policy: the meter's rules, or a table of them; None: no measurement. The train script has to
            call `leakbound.nvflare.tap(inputs, labels)` once per local step.
        loss: a name in `leakbound.losses.LOSSES`.
        input_range: of every input value.
        classes: number of classes; None does not check labels.
        path: a JSON Lines file on the client for every reading.
        release: put `Reading.release()` into the meta data of results.
        seed: for experiments only: determines every draw, and marks the result.

    Raises:
        ValueError: a setting is wrong. The model is imported at the first task.

    Example:
        >>> LeakboundFilter(["clip,clip_norm=1.0", "gaussian_noise,noise_std=0.1"], "net:Net")
        LeakboundFilter(Clip(clip_norm=1.0) → GaussianNoise(noise_std=0.1))
    """

    def __init__(
        self,
        defense: str | Sequence[str] | Defense = "none",
        model: str | Callable[[], torch.nn.Module] = "",
        learning_rate: float | None = None,
        policy: Policy | Mapping[str, Any] | None = None,
        loss: str = "cross_entropy",
        input_range: Sequence[float] = (0.0, 1.0),
        classes: int | None = None,
        path: str | None = None,
        release: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__([], [])
        # NVFlare's job writer reads the settings from attributes of these names
        self.defense = defense if isinstance(defense, str | list) else _texts(defense)
        self.model = model if isinstance(model, str) else f"{model.__module__}:{model.__qualname__}"
        self.learning_rate = learning_rate
        self.policy = policy
        self.loss = loss
        self.input_range = list(input_range)
        self.classes = classes
        self.path = path
        self.release = release
        self.seed = seed
        self._chain = chain_of(self.defense)
        check_of_client(self._chain, "a client's filter; use secure aggregation")
        if ":" not in self.model:
            raise ValueError(f"model is {self.model!r}; give 'module:function', as 'net:Net'")
        rules = Policy(**policy) if isinstance(policy, Mapping) else policy
        if rules is not None and learning_rate is None:
            raise ValueError(
                "learning_rate is None, but the leak meter's bounds use it; give that of the "
                "clients' SGD"
            )
        self._meter: ClientMeter | None = None
        if rules is not None:
            place = None if path is None else Path(path)
            # NVFlare can stream a client's log to the server
            self._meter = ClientMeter(rules, place, release, logs=False)
        self._stored: Any = None

    def __repr__(self) -> str:
        return f"LeakboundFilter({self._chain!r})"

    @cached_property
    def _setup(self) -> Setup:
        low, high = self.input_range
        return Setup(
            user_code.find("model", self.model),
            1.0 if self.learning_rate is None else self.learning_rate,
            self.loss,
            (low, high),
            self.classes,
        )

    def add_to_fed_job(
        self,
        job: Any,
        ctx: Any,
        **kwargs: Any,
    ) -> None:
        """What `job.to(filter, site, ...)` calls; sites use their own leakbound, not a copy.

        Raises:
            ValueError: `tasks` is not given, for which NVFlare writes "*", the name of no task.
        """
        if not kwargs.get("tasks"):
            raise ValueError(
                f"tasks is {kwargs.get('tasks')!r}; give the names of all tasks that return "
                'weights, as tasks=["train"] (NVFlare compares names exactly: "*" is no pattern)'
            )
        keep_installed(job)
        super().add_to_fed_job(job, ctx, **kwargs)

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """The message that goes on; never the client's own weights."""
        if self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN:
            self._receive(shareable, fl_ctx)
            return shareable
        # after the last filter, a result without this mark is emptied
        fl_ctx.set_prop(ANSWERED, _task_id(fl_ctx), private=True, sticky=False)
        code = shareable.get_return_code()
        if code != ReturnCode.OK:
            return make_reply(code)
        try:
            return self._answer(shareable, fl_ctx)
        except Exception as error:
            logger.error("%r: %s", self, type(error).__name__)
            return _empty(public_text(error))

    def process_dxo(
        self,
        dxo: DXO,
        shareable: Shareable,
        fl_ctx: FLContext,
    ) -> DXO | None:
        """Not used: `process` handles whole results, so that nothing passes unread."""
        raise NotImplementedError

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Copy the global weights before training; empty results that no filter has seen."""
        of_data = self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN
        if event_type == EventType.BEFORE_TASK_EXECUTION and not of_data:
            self._receive(fl_ctx.get_prop(FLContextKey.TASK_DATA), fl_ctx)
        elif event_type == EventType.AFTER_TASK_RESULT_FILTER:
            reply = fl_ctx.get_prop(FLContextKey.TASK_RESULT)
            passed = fl_ctx.get_prop(ANSWERED) == _task_id(fl_ctx)
            if not passed and _kind(reply) in HOLDS_WEIGHTS:
                logger.error(MISSED)
                reply.clear()
                reply.update(_empty(MISSED))

    def _receive(self, shareable: Shareable, fl_ctx: FLContext) -> None:
        """Remember the weights that the server sent, for this one task."""
        number = shareable.get_header(AppConstants.CURRENT_ROUND, 0)
        received = _Received(_task_id(fl_ctx), number if isinstance(number, int) else 0, self)
        fl_ctx.set_prop(RECEIVED, received, private=True, sticky=False)
        try:
            dxo = exchanged(shareable, SENT)
            if dxo.data_kind != WEIGHTS:
                raise ValueError(f"{SENT} holds {dxo.data_kind}; send the global WEIGHTS")
            sent = read(dxo.data, self._setup.state(), SENT, private=False)
            task = self._setup.task(sent, {})
            source: Source = secure()
            if self.seed is not None:
                who = fl_ctx.get_identity_name("")
                source = stream(self.seed, "nvflare", who, str(received.number))
            received.work = ClientRound(self._chain, task, sent, source, self._stored)
            if self._meter is not None:
                received.findings = tuple(inspect(task))
            if start := received.work.start_weights:
                dxo.data = {n: write(start[n], v) if n in start else v for n, v in dxo.data.items()}
                dxo.update_shareable(shareable)
            if self._meter is not None or needs_batches(self._chain):
                listen()
        except Exception as error:  # of the server's message and the settings, not of the data
            received.problem = error

    def _answer(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        # taken first, so that no batch outlives an answer that fails
        tapped = shown()
        if _kind(shareable) == DataKind.METRICS:
            return shareable
        dxo = exchanged(shareable, RESULT)
        received = fl_ctx.get_prop(RECEIVED)
        if received is None or received.task_id != _task_id(fl_ctx):
            raise ValueError(
                "the global weights of this task are unknown; in privacy.json, name the filter "
                "under task_data_filters, too"
            )
        # one object for each direction: only settings tell whether they belong together
        owner = received.owner
        if owner._chain != self._chain:
            raise ValueError(
                f"the filter under task_data_filters runs {owner._chain!r}, but this one "
                f"{self._chain!r}; give both the same settings"
            )
        work = received.work
        if received.problem is not None or work is None:
            raise received.problem or ValueError(f"{SENT} was not read")
        is_change = dxo.data_kind == CHANGE
        trained = None
        if work.anew is None:
            trained = read(dxo.data, self._setup.state(), RESULT, private=True)
        step = coarsest({n: value for n, value in dxo.data.items() if n in work.task.names})
        update, ready, new = work.answer(trained, tapped, is_change=is_change, step=step)
        meta: dict[str, float] = {} if self.seed is None else {MARK: 1}
        kept = work.kept(ready)
        if self._meter is not None:
            meter = self._meter
            reading: Reading | None = None
            try:
                batch = distinct(tapped)
                decision = meter.policy.before(received.findings)
                if not decision.refused:
                    reading, decision = meter.measured(
                        work.task,
                        update,
                        batch,
                        ready,
                        received.findings,
                        seeded=self.seed is not None,
                    )
                meter.keep(fl_ctx.get_identity_name(""), received.number + 1, decision, reading)
            except Exception as error:
                logger.error("the leak meter failed: %s", type(error).__name__)
                return _empty(BROKEN)
            meta |= meter.released(decision, reading)
            if decision.refused:
                new = {}  # the received weights
            if decision.refused and meter.policy.on_refuse == "error":
                owner._stored = kept
                return _empty(meter.refusal(decision, reading))
        owner._stored = kept
        return _result(shareable, dxo, work.sent, new, meta)


def keep_installed(job: Any) -> None:
    """Stop NVFlare's job writer from copying parts of leakbound into each site's `custom` folder.

    It copies the modules that this file imports but not their packages, and imports the copies
    instead of what is missing: 72 of 349 files.
    """
    job.set_app_packages(sorted({*job.job.app_packages, PACKAGE}))


def _result(
    shareable: Shareable,
    dxo: DXO,
    received: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    meta: Mapping[str, Any],
) -> Shareable:
    """A fresh result: the new weights, and of all else what the server sent itself."""
    data = {}
    for name, value in dxo.data.items():
        if name in new:
            data[name] = write(new[name], value)
        elif name in received:
            kept = received[name]
            data[name] = write(kept if dxo.data_kind == WEIGHTS else torch.zeros_like(kept), value)
    fresh = DXO(dxo.data_kind, data, {**(dxo.meta or {}), **meta})
    fresh.add_filter_history(MARKS)
    # nothing of the client's own object is passed on: other entries of it may hold data
    answer = fresh.to_shareable()
    for key, value in shareable.get(ReservedHeaderKey.HEADERS, {}).items():
        answer.set_header(key, value)
    return answer


def _empty(why: str) -> Shareable:
    return make_reply(ReturnCode.TASK_RESULT_FILTER_ERROR, {WHY: why})


def _task_id(fl_ctx: FLContext) -> str:
    return str(fl_ctx.get_prop(FLContextKey.TASK_ID, ""))


def _kind(shareable: Any) -> Any:
    try:
        return from_shareable(shareable).data_kind
    except (ValueError, TypeError, AttributeError):
        return None


def chain_of(defense: str | list[str]) -> Chain:
    """The chain of a filter's `defense`."""
    texts = [defense] if isinstance(defense, str) else defense
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"defense is {defense!r}; give names with settings, as texts")
    rows = [registry.row_of("defense", text) for text in texts]
    built: Chain = registry.parse("defense", rows[0] if len(rows) == 1 else {"links": rows})
    return built


def _texts(defense: Sequence[str] | Defense) -> list[str]:
    """A defense as the texts that make it again."""
    if not isinstance(defense, Defense):
        return list(defense)
    row = registry.row_of("defense", defense)
    rows = row.get("links", [row])
    return [
        ",".join([one["name"], *(f"{k}={json.dumps(v)}" for k, v in one.items() if k != "name")])
        for one in rows
    ]
