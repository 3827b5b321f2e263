"""What an NVFlare server sees of a round, kept by a component of the server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvflare.apis.dxo import DXO, MetaKey
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_constant import AppConstants
from torch import Tensor

from leakbound.captured import declared
from leakbound.client_side.captures import checked_rounds, keep, undeclared, view
from leakbound.client_side.optimizers import OptimizerWatch
from leakbound.nvflare.exchange import KINDS, exchanged, tensor
from leakbound.nvflare.filter import MARKS, WHY, keep_installed

PROBLEM = "problem.txt"
DONE = "done.txt"
"""Files that a watch writes next to the log of a run of `capture_job`."""
TRAINED = "optimizer-{}.json"
"""The file in which a site's `ClientWatch` says what trained the result that it sends."""


class ServerWatch(FLComponent):  # type: ignore[misc]
    """Keep what the server sees of some rounds: the weights sent, and each client's result.

    A component of config_fed_server.json. Results are kept as they arrive, before any filter of
    the server.

    Args:
        out: folder for the captured updates (docs/captured_updates.md has its form).
        rounds: which rounds to keep, from 1.
        clients: names of the clients, whose numbers are their positions from 1; None: by arrival.
        about: more of what the server knows, such as "model"; kept with every update.
        defenses: by client, what its filters are known to do to a result
            (`leakbound.captured.declared` has the form). None: their settings are not known.
        notes: a folder for problems and the end. The job is stopped after the last round; None:
            it continues.

    Example:
        >>> ServerWatch("captured", rounds=[2, 1]).rounds
        [1, 2]
    """

    def __init__(
        self,
        out: str,
        rounds: Sequence[int] = (1,),
        clients: Sequence[str] | None = None,
        about: dict[str, str] | None = None,
        notes: str | None = None,
        defenses: dict[str, dict[str, str]] | None = None,
    ) -> None:
        super().__init__()
        self.out = out
        self.rounds = list(checked_rounds(rounds))
        self.notes = notes
        self.clients = list(clients or ())
        self.about = about
        self.defenses = defenses
        self._waits = bool(clients)
        self._count = 0
        self._sent: dict[str, tuple[int, dict[str, Tensor]]] = {}
        self._first: int | None = None
        self._seen: set[tuple[int, str]] = set()

    def add_to_fed_job(
        self,
        job: Any,
        ctx: Any,
        **kwargs: Any,
    ) -> Any:
        """What `job.to_server(watch)` calls; the server uses its own leakbound, not a copy."""
        job.check_kwargs(args_to_check=kwargs, args_expected={})
        keep_installed(job)
        return job.add_component(comp_id="", obj=self, ctx=ctx)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Note what is sent and what arrives; a problem does not stop the job."""
        try:
            if event_type == EventType.AFTER_TASK_DATA_FILTER:
                self._send(fl_ctx.get_prop(FLContextKey.TASK_DATA), fl_ctx)
            elif event_type == EventType.BEFORE_TASK_RESULT_FILTER:
                self._arrive(fl_ctx.get_prop(FLContextKey.TASK_RESULT), fl_ctx)
        except Exception as error:
            self._note(PROBLEM, str(error))

    def _send(self, shareable: Shareable, fl_ctx: FLContext) -> None:
        number = shareable.get_header(AppConstants.CURRENT_ROUND)
        if not isinstance(number, int):
            return  # no training task
        try:
            data = exchanged(shareable, "the server's task").data
        except ValueError:
            return
        # workflows count from their own start_round
        self._first = number if self._first is None else self._first
        number += 1 - self._first
        if number in self.rounds:
            named = {name: tensor(value, name) for name, value in data.items()}
            self._sent[str(fl_ctx.get_prop(FLContextKey.TASK_ID))] = number, named

    def _arrive(self, result: Shareable, fl_ctx: FLContext) -> None:
        sent = self._sent.pop(str(fl_ctx.get_prop(FLContextKey.TASK_ID)), None)
        if sent is None:
            return
        number, before = sent
        name = str(fl_ctx.get_peer_context().get_identity_name())
        self._seen.add((number, name))
        code = result.get_return_code()
        if code != ReturnCode.OK:
            why = str(result.get_header(WHY, ""))
            self._note(PROBLEM, f"{name} answered {code}: {why or 'its log says why'}")
        else:
            self._keep(number, name, before, result)
        # a job of many rounds must not run on after the last one that is asked for
        if self._waits and all((n, c) in self._seen for n in self.rounds for c in self.clients):
            self._note(DONE, f"round {number}")
            if self.notes is not None:
                self.system_panic("leakbound has kept all rounds", fl_ctx)

    def _keep(
        self,
        number: int,
        name: str,
        before: dict[str, Tensor],
        result: Shareable,
    ) -> None:
        dxo = exchanged(result, f"the result of {name}")
        update = {key: tensor(value, key) for key, value in dxo.data.items()}
        if name not in self.clients:
            self.clients.append(name)
        steps = dxo.get_meta_prop(MetaKey.NUM_STEPS_CURRENT_ROUND)
        about: dict[str, Any] = {"site": name, **(self.about or {}), **self._defense(name, dxo)}
        if isinstance(steps, int) and steps > 0:
            about["steps"] = steps
        # A filter that computes the update anew says so.
        if declared.OPTIMIZER not in about:
            about |= self._trained(name)
        client = self.clients.index(name) + 1
        keep(self.out, view(number, client, KINDS[dxo.data_kind], update, before, **about))

    def _trained(self, name: str) -> dict[str, str | None]:
        """What the site's own watch saw of the optimizer, which `capture_job` adds to it."""
        path = Path(self.notes or "") / TRAINED.format(name)
        if self.notes is None or not path.is_file():
            return {}
        seen: dict[str, str | None] = json.loads(path.read_text("utf-8"))
        return seen

    def _defense(self, name: str, dxo: DXO) -> dict[str, str]:
        """What is known of the filters that this result passed."""
        known = dict((self.defenses or {}).get(name, {}))
        passed = MARKS in (dxo.get_filter_history() or ())
        # settings say what should run; only the mark says that it did
        if declared.KEY in known and not passed:
            words = f"the result does not carry the mark of {MARKS}, which its settings name"
            return undeclared(words)
        if passed and not known:
            return undeclared(
                f"{MARKS} ran at the client, and its settings are not known here (give --defense)"
            )
        return known

    def _note(self, name: str, text: str) -> None:
        if self.notes is not None:
            with (Path(self.notes) / name).open("a", encoding="utf-8") as file:
                file.write(text + "\n")
        else:
            self.logger.warning("leakbound: %s", text)


class ClientWatch(FLComponent):  # type: ignore[misc]
    """Writes which optimizer trained each result, for a `ServerWatch` with the same `notes`.

    `capture_job` adds it to config_fed_client.json. It sees scripts that run in the client's own
    process.
    """

    def __init__(self, notes: str) -> None:
        super().__init__()
        self.notes = notes
        self._watch = OptimizerWatch()
        self._handle: Any = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Begin before a task, and write after it."""
        if event_type == EventType.BEFORE_TASK_EXECUTION:
            self._handle = self._handle or self._watch.start()
            self._watch.forget()
        elif event_type == EventType.AFTER_TASK_EXECUTION:
            path = Path(self.notes) / TRAINED.format(fl_ctx.get_identity_name(""))
            path.write_text(json.dumps(self._watch.about()), "utf-8")
        elif event_type == EventType.END_RUN and self._handle is not None:
            self._handle.remove()
            self._handle = None
