"""Run a plan's trainings through Flower's messages, with the numbers of `leakbound.audit.utility`.

The server sends weights, the resolved defense and the numbers of the images. A client answers with
its defended update, and keeps its state and the position in its noise stream in `context.state`.
`run` runs a plan on Flower's simulation engine.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from leakbound.audit.context import PlanContext, one_thread
from leakbound.audit.experiment import Result, reason_of, run_training
from leakbound.audit.plan import Plan, TrainingUnit, Unit, build_defense
from leakbound.audit.utility import Opening, noise_of
from leakbound.cluster.connection import connected, environment
from leakbound.flower import messages
from leakbound.protocol import step
from leakbound.types import Unit as Rows
from leakbound.types import Update

WEIGHTS, TURN, DEFENSE, SENT, KEPT, WHY = "weights", "turn", "defense", "sent", "kept", "why"
PATIENCE, GRACE = 120.0, 30.0
"""Seconds to wait for the clients of a simulation to start, and for its end."""


def run(
    plan: Plan,
    done: Iterable[str] = (),
    *,
    workers: int = 1,
    pictures: bool = True,
    context: PlanContext | None = None,
    started: Callable[[Unit], None] = lambda unit: None,
) -> Generator[Result, None, None]:
    """Run a plan's trainings on Flower's simulation engine; otherwise as `leakbound.audit.run`.

    One client per node, `workers` of them at a time (processes with one torch thread each), in a
    Ray on this machine's loopback that ends with the generator. Experiments must be done before.
    """
    finished = set(done)
    if any(one.id not in finished for one in plan.experiments()):
        raise ValueError(
            "engine is 'flower', which runs only trainings; run experiments without it"
        )
    units = [unit for unit in plan.trainings() if unit.id not in finished]
    context = context or PlanContext(plan.data)
    if context.device.type != "cpu":
        raise ValueError(f"device is {str(context.device)!r}, but the simulation computes on CPUs")
    if not units:
        return
    flow = Flow()
    path = os.pathsep.join(entry for entry in ["", *sys.path] if entry)
    with environment({"PYTHONPATH": path}), connected(None, workers, shared=False):
        simulation = threading.Thread(target=_simulate, args=(units, context, flow), daemon=True)
        simulation.start()
        left = len(units)
        try:
            while left:
                event = flow.events.get()
                if isinstance(event, Result):
                    left -= 1
                    yield event
                elif isinstance(event, TrainingUnit):
                    started(event)
                else:
                    raise ValueError(f"Flower's simulation ended: {event or 'it gave no reason'}")
        finally:
            flow.stop.set()
            simulation.join(GRACE)


def _simulate(units: Sequence[TrainingUnit], context: PlanContext, flow: Flow) -> None:
    """Run Flower's engine on the existing Ray; its log shows only errors."""
    from flwr.simulation import run_simulation

    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        run_simulation(
            server_app(units, context, flow),
            client_app(units, context.dataset.fingerprint),
            max(unit.utility.clients for unit in units),
            backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        )
        flow.events.put(None)
    except BaseException as error:  # it ends this thread; the other one raises it
        flow.events.put(error)
    finally:
        logger.setLevel(before)


class Stopped(BaseException):
    """The training must end now; not an error of the training."""


@dataclass
class Flow:
    """From a server's thread to the waiting one: units, results, errors; and `stop`."""

    events: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    stop: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        if self.stop.is_set():
            raise Stopped


def client_app(units: Iterable[TrainingUnit], fingerprint: str) -> ClientApp:
    app, known = ClientApp(), {unit.id: unit for unit in units}

    @app.train()
    def train(message: Message, context: Context) -> Message:
        try:
            with one_thread():
                content = _turn(message.content, context, known, fingerprint)
        except Exception as error:  # the server records it as the training's own failure
            content = RecordDict({TURN: ConfigRecord({WHY: reason_of(error)})})
        return Message(content, reply_to=message)

    return app


def server_app(
    units: Sequence[TrainingUnit], context: PlanContext, flow: Flow | None = None
) -> ServerApp:
    """An app that runs the trainings one after the other, and gives their results to `flow`."""
    app, out = ServerApp(), flow or Flow()

    @app.main()
    def main(grid: Grid, _: Context) -> None:
        try:
            for unit in units:
                out.events.put(unit)
                out.events.put(run_training(unit, context, clients=GridClients(grid, unit, out)))
        except Stopped:
            return
        except BaseException as error:
            out.events.put(error)
            raise

    return app


class GridClients:
    """Clients in the order of their nodes' numbers, which is the order of sums."""

    def __init__(self, grid: Grid, unit: TrainingUnit, flow: Flow) -> None:
        self._grid, self._unit, self._flow = grid, unit, flow
        limit = time.monotonic() + PATIENCE
        count = unit.utility.clients
        while len(nodes := sorted(grid.get_node_ids())) < count:
            flow.check()
            if time.monotonic() > limit:
                raise ValueError(f"{len(nodes)} of {count} clients came in {PATIENCE:.0f} seconds")
            time.sleep(0.02)
        self._nodes = nodes

    def __call__(self, opening: Opening) -> list[Update]:
        nodes = self._nodes[: len(opening.parts)]
        asked = [
            Message(self._content(opening, i), node, "train", group_id=str(opening.number))
            for i, node in enumerate(nodes)
        ]
        replies = {reply.metadata.src_node_id: reply for reply in self._exchange(asked)}
        return [_update(replies[node], opening.task.parameters) for node in nodes]

    def _exchange(self, asked: list[Message]) -> Iterator[Message]:
        waiting = set(self._grid.push_messages(asked))
        while waiting:
            self._flow.check()
            replies = list(self._grid.pull_messages(waiting))
            for reply in replies:
                waiting.discard(reply.metadata.reply_to_message_id)
                yield reply
            if waiting and not replies:
                time.sleep(0.002)

    def _content(self, opening: Opening, client: int) -> RecordDict:
        weights, parts = opening.task.parameters.numpy(), opening.parts[client].numpy()
        turn: Any = {"unit": self._unit.id, "round": opening.number, "client": client}
        arrays = ArrayRecord({"weights": Array(weights), "images": Array(parts)})
        content = RecordDict({WEIGHTS: arrays, TURN: ConfigRecord(turn)})
        messages.save(content, DEFENSE, self._unit.id, opening.defense.links)
        return content


def _update(reply: Message, like: torch.Tensor) -> Update:
    if reply.has_error():
        raise ValueError(f"a client did not answer: {reply.error.reason}")
    turn: Any = reply.content[TURN]
    if WHY in turn:
        raise ValueError(str(turn[WHY]))
    sent: Any = reply.content[SENT]
    rows, mask = _tensor(sent["rows"]).to(like.dtype), sent.get("mask")
    examples = tuple(sent["examples"].numpy().tolist())
    mask = None if mask is None else _tensor(mask)
    return Update(rows, Rows(int(turn["rows_of"])), examples, mask=mask)


def _turn(
    content: RecordDict, context: Context, known: dict[str, TrainingUnit], fingerprint: str
) -> RecordDict:
    turn: Any = content[TURN]
    arrays: Any = content[WEIGHTS]
    unit, number = known[str(turn["unit"])], int(turn["round"])
    known_data = _context(unit.data)
    if known_data.dataset.fingerprint != fingerprint:
        raise ValueError(f"data source {unit.data.source!r} differs from the server's on this node")
    task = known_data.task(unit.model, unit.seed).with_parameters(_tensor(arrays["weights"]))
    plain = build_defense(unit.defense)
    ready = type(plain)(messages.load(content, DEFENSE, unit.id, plain))
    noise, kept = noise_of(unit, int(turn["client"])), None
    if number > 1:
        kept, place = messages.load(context.state, KEPT, unit.id, ready)
        noise.set_state(place)
    update, kept = step(task, known_data.batch(_tensor(arrays["images"])), ready, noise, kept)
    messages.save(context.state, KEPT, unit.id, (kept, noise.get_state()))
    sent = {"rows": Array(update.rows.numpy()), "examples": Array(np.array(update.examples))}
    if update.mask is not None:
        sent["mask"] = Array(update.mask.numpy())
    about = ConfigRecord({"rows_of": int(update.unit)})
    return RecordDict({SENT: ArrayRecord(sent), TURN: about})


def _tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.array(array.numpy()))


_context = lru_cache(maxsize=1)(PlanContext)
