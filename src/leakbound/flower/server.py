"""An honest-but-curious server's view of a round: strategies that keep it, and app runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import FitIns, FitRes, Parameters, Scalar, parameters_to_ndarrays
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy as SumStrategy
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from leakbound import check
from leakbound._util import files, user_code
from leakbound.captured.capture import TREES, Capture
from leakbound.captured.declared import words_of
from leakbound.captured.observe import plan_of
from leakbound.client_side.captures import checked_rounds, keep, ready_folder, view
from leakbound.flower.compat import log
from leakbound.flower.grid import InProcessGrid
from leakbound.flower.messages import COUNTS, SENT, first, is_train, only_arrays, read
from leakbound.models.custom import missing_arguments

RATES = ("lr", "learning-rate", "learning_rate")
OPTIMIZERS = ("optimizer", "optimizer-name", "optimizer_name")
Results = list[tuple[ClientProxy, FitRes]]
Failures = list[tuple[ClientProxy, FitRes] | BaseException]


def _passed_on(name: str) -> Any:
    def method(self: Any, *args: Any, **named: Any) -> Any:
        return getattr(self.strategy, name)(*args, **named)

    return method


class _Watching:
    """Around a strategy: what is kept of some rounds."""

    def __init__(
        self,
        strategy: Any,
        *,
        rounds: Sequence[int] = (1,),
        out: Path | str | None = None,
        on_round: Callable[[int, list[Capture]], None] | None = None,
        learning_rate: float | None = None,
    ) -> None:
        self.strategy = strategy
        self.rounds = checked_rounds(rounds)
        self.captures: list[Capture] = []
        self._out = out
        self._on_round = on_round or (lambda number, captures: None)
        self._rate = learning_rate

    def _add(self, capture: Capture) -> None:
        self.captures.append(capture)
        if self._out is not None:
            keep(self._out, capture)


class Watched(_Watching, Strategy):
    """A strategy that wraps another and keeps what the server sees in some rounds.

    It keeps the weights that it sent, and those that each client answered, in `captures`.

    Args:
        strategy: the strategy of your app.
        rounds: which rounds to keep, from 1.
        out: a folder to write them to, as `leakbound capture` does; None: only in memory.
        on_round: called with the round's number and its captures once they are complete.
        learning_rate: of the clients' SGD; by default "lr" or "learning-rate" in the server's
            configuration.

    Example:
        >>> from flwr.serverapp.strategy import FedAvg
        >>> watched = Watched(FedAvg(), rounds=(1, 2))
        >>> watched.captures, watched.min_train_nodes
        ([], 2)
    """

    strategy: Strategy
    _sent: Mapping[int, Message] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "strategy":  # not set yet: copied or unpickled
            raise AttributeError(name)
        return getattr(self.strategy, name)

    configure_evaluate = _passed_on("configure_evaluate")
    aggregate_evaluate = _passed_on("aggregate_evaluate")

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        if server_round in self.rounds:
            self._sent = {message.metadata.dst_node_id: message for message in messages}
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        if server_round in self.rounds:
            self._keep(server_round, replies)
        return self.strategy.aggregate_train(server_round, replies)

    def summary(self) -> None:
        self.strategy.summary()
        log(INFO, "\t└──> leakbound keeps what the server sees of rounds %s", list(self.rounds))

    def start(self, *args: Any, **named: Any) -> Result:
        # the wrapped strategy's own loop, which calls this object's methods
        return type(self.strategy).start(self, *args, **named)

    def _keep(self, number: int, replies: Sequence[Message]) -> None:
        known = len(self.captures)
        for reply in replies:
            asked = self._sent.get(reply.metadata.src_node_id)
            if asked is None or reply.has_error():
                continue
            try:
                self._add(capture_of(number, asked, reply, learning_rate=self._rate))
            except Exception as error:  # the training continues: this code only observes
                log(WARNING, "leakbound does not keep the reply: %s", error)
        # weights of past rounds would only fill the memory
        self._sent = {}
        self._on_round(number, self.captures[known:])


class WatchedSum(_Watching, SumStrategy):
    """A strategy of `flwr.server` that keeps the sums that SecAgg+ shows the server, in `captures`.

    SecAgg+ gives the server the average of the clients' weights, weighted by their numbers of
    examples. For one local step this equals one client's step on all examples, in which no attack
    can assign images to clients; for several local steps it is an approximation.

    Args:
        strategy: the strategy for the `LegacyContext`.
        rounds: which rounds to keep, from 1.
        out: a folder to write them to; None: only in memory.
        on_round: called with the round's number and its sum.
        learning_rate: of the clients' SGD.
    """

    strategy: SumStrategy
    _before: Mapping[str, Tensor] = {}

    initialize_parameters = _passed_on("initialize_parameters")
    configure_evaluate = _passed_on("configure_evaluate")
    aggregate_evaluate = _passed_on("aggregate_evaluate")
    evaluate = _passed_on("evaluate")

    def configure_fit(
        self,
        server_round: int,
        parameters: Parameters,
        client_manager: ClientManager,
    ) -> list[tuple[ClientProxy, FitIns]]:
        if server_round in self.rounds:
            self._before = _numbered(parameters)
        return self.strategy.configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(
        self,
        server_round: int,
        results: Results,
        failures: Failures,
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        if server_round in self.rounds and results:
            self._keep(server_round, results)
        return self.strategy.aggregate_fit(server_round, results, failures)

    def _keep(self, number: int, results: Results) -> None:
        shared = results[0][1].parameters
        # Under SecAgg+ all results share one object, the average; otherwise each has its own.
        if any(answer.parameters is not shared for _, answer in results):
            log(
                WARNING,
                "leakbound keeps no sum of round %s: the clients' updates are there",
                number,
            )
            return
        capture = view(
            number,
            0,
            "weights",
            _numbered(shared),
            self._before,
            examples=sum(answer.num_examples for _, answer in results),
            clients=len(results),
            learning_rate=self._rate,
        )
        capture = replace(capture, name=f"round {number}, the sum of {len(results)} clients")
        self._add(capture)
        self._on_round(number, [capture])


def capture_of(
    number: int,
    asked: Message,
    reply: Message,
    *,
    learning_rate: float | None = None,
) -> Capture:
    """What the server holds of one client in one round."""
    client = reply.metadata.src_node_id
    name = f"round {number}, client {client}"
    _, sent = only_arrays(asked.content, SENT)  # from this server itself: no check needed
    before = {key: torch.from_numpy(array.numpy().copy()) for key, array in sent.items()}
    _, answered = only_arrays(reply.content, f"the reply of {name}")
    kind = "weights"
    like = before
    if [value.dtype for value in before.values()] == [torch.uint8]:  # a file may change its length
        kind = TREES
        # The sender declares sizes; the bytes that came are an upper bound on them.
        sizes = (min(len(array.data), *array.shape, 2**40) for array in answered.values())
        size = max(sizes, default=0)
        like = {key: torch.empty(size, dtype=torch.uint8) for key in before}
    after = read(answered, like, what=f"the reply of {name}")
    examples = first(COUNTS, reply.content.metric_records.values())
    configs = list(asked.content.config_records.values())
    if learning_rate is None:
        learning_rate = first(RATES, configs)
    return view(
        number,
        client,
        kind,
        after,
        before,
        examples=examples,
        learning_rate=learning_rate,
        optimizer=_known_optimizer(first(OPTIMIZERS, configs)),
    )


def _known_optimizer(text: Any) -> str | None:
    """The optimizer that a server's configuration names, if it is one that attacks simulate."""
    try:
        return plan_of(text.lower()).optimizer if isinstance(text, str) else None
    except ValueError:
        return None


def _numbered(parameters: Parameters) -> dict[str, Tensor]:
    """This server's own arrays, numbered in the model's order."""
    arrays = (np.asarray(value, dtype=np.float32) for value in parameters_to_ndarrays(parameters))
    return {str(number): torch.from_numpy(array.copy()) for number, array in enumerate(arrays)}


Say = Callable[[str], None]


def capture_app(
    folder: Path | str,
    out: Path | str,
    *,
    rounds: Sequence[int] = (1,),
    clients: int = 2,
    run_config: Mapping[str, Any] | None = None,
    on_progress: Say | None = None,
) -> list[Path]:
    """Run the app in a folder and keep what the server sees of some rounds; returns the files.

    This runs the app's code: the components that its pyproject.toml names under
    `[tool.flwr.app.components]` are imported. The app runs in this process, one client after the
    other, and stops after the last requested round's replies.

    Args:
        folder: of the app, with its pyproject.toml. It is not written to.
        out: a folder for the captured updates (docs/captured_updates.md has its form).
        rounds: which rounds to keep, from 1.
        clients: how many clients there are.
        run_config: values that override those of `[tool.flwr.app.config]`.
        on_progress: called with a sentence at every step, and before each import.

    Raises:
        ValueError: the folder has no Flower app, the code does not import, or no requested reply
            came.
    """
    wanted = checked_rounds(rounds)
    say = on_progress or (lambda text: None)
    place = Path(folder)
    about = _about(place)
    known = _flat(about.get("config", {}))
    for key in run_config or {}:
        if key not in known:
            raise ValueError(
                f"run_config has the key {key!r}, which [tool.flwr.app.config] does not; "
                f"{check.closest(key, known)}"
            )
    config = {**known, **(run_config or {})}
    ready_folder(out)
    # late: it describes this module's classes
    from leakbound.flower.applied import Applied, mods_of

    applied = Applied()
    with _importing(place), applied.watching():
        server = _component(place, about, "serverapp", ServerApp, say)
        client = _component(place, about, "clientapp", ClientApp, say)
        grid = _CapturingGrid(
            wanted,
            Path(out),
            say,
            applied.about,
            applied.around(client),
            clients,
            run_config=config,
        )
        hook = register_module_forward_pre_hook(grid.called)
        try:
            server(grid, Context(1, 1, {}, RecordDict(), config))
        except _Enough:
            say(f"stopped in round {grid.round}")
        finally:
            hook.remove()
    if grid.refusal is not None:
        raise grid.refusal
    for mistake in applied.mistakes(mods_of(client)):
        say(f"{mistake.name}: {mistake.text}")
    if grid.problem is not None and grid.round not in grid.seen:
        raise ValueError(f"no client answered in round {grid.round}: {grid.problem}")
    missing = [number for number in wanted if number not in grid.seen]
    if missing:
        raise ValueError(
            f"rounds includes {missing[0]}, but the app ended after round {grid.round}; ask for "
            "earlier rounds, or set more rounds in run_config"
        )
    return grid.written


class _Enough(BaseException):
    """All requested rounds are complete; an app's `except Exception` must not catch this."""


class _CapturingGrid(InProcessGrid):
    def __init__(
        self,
        wanted: tuple[int, ...],
        out: Path,
        say: Say,
        declared: Callable[[Message], Mapping[str, str | None]],
        *app: Any,
        **options: Any,
    ) -> None:
        super().__init__(*app, **options, on_exchange=self._keep)
        self.round = 0
        self.seen = set[int]()
        self.written = list[Path]()
        self._wanted = wanted
        self._out = out
        self._say = say
        self._declared = declared
        self._said = {""}
        self.problem: str | None = None
        self.refusal: ValueError | None = None
        self._models: dict[type[nn.Module], tuple[str, int]] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        if any(is_train(message) for message in messages):
            self._stop_when_done()
            self.round = self.round + 1
            self.problem = None
            self._say(f"round {self.round}: {len(messages)} clients train")
        names = super().push_messages(messages)
        if self.problem is not None and self.round not in self.seen:
            raise _Enough
        self._stop_when_done()
        return names

    def called(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Note the shape of the first input of a module class, and how many tensors it has."""
        kind = type(module)
        if kind not in self._models and inputs and isinstance(inputs[0], Tensor):
            shape = ",".join(map(str, inputs[0].shape[1:]))
            self._models[kind] = shape, len(module.state_dict())

    def _model(self, tensors: int) -> dict[str, str]:
        """The class and input shape of the first called module with this many tensors."""
        for kind, (shape, count) in self._models.items():
            if count != tensors or not shape:
                continue
            about = {"input_shape": shape}
            if (needed := missing_arguments(kind)) is not None:
                about["model"] = f"{kind.__module__}:{kind.__qualname__}"
            if needed:
                about["model_needs"] = ",".join(needed)
            return about
        return {}

    def _stop_when_done(self) -> None:
        if self.seen >= set(self._wanted):
            raise _Enough

    def _keep(self, asked: Message, reply: Message) -> None:
        if not is_train(asked) or self.round not in self._wanted:
            return
        try:
            if reply.has_error():
                raise ValueError(reply.error.reason)
            capture = capture_of(self.round, asked, reply)
        except ValueError as error:
            self.problem = self.problem or str(error)
            return
        seen = self._declared(reply) if capture.kind != TREES else {}
        known = {**capture.about, **self._model(len(capture.update)), **seen}
        about = {key: text for key, text in known.items() if text is not None}
        try:
            path = keep(self._out, replace(capture, about=about))
        except ValueError as error:
            self.refusal = error
            raise _Enough from None
        self.seen.add(self.round)
        self.written.append(path)
        self._say(f"kept {path.parent.name}/{path.name}")
        if (text := words_of(about)) not in self._said:
            self._said.add(text)
            self._say(text)


def _about(folder: Path) -> dict[str, Any]:
    path = folder / "pyproject.toml"
    table = files.read_toml(path, f"folder is {str(folder)!r}, whose pyproject.toml")
    about = table.get("tool", {}).get("flwr", {}).get("app", {})
    if not isinstance(about, dict) or not isinstance(about.get("components"), dict):
        raise ValueError(
            f"{str(path)!r} has no [tool.flwr.app.components]; give the folder of a Flower app"
        )
    return about


def _flat(table: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested tables as one, with keys joined by dots, as Flower does."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        inner = isinstance(value, dict)
        flat |= _flat(value, f"{above}{key}.") if inner else {above + key: value}
    return flat


def _component(
    folder: Path,
    about: Mapping[str, Any],
    name: str,
    kind: type,
    say: Say,
) -> Any:
    """One app that the pyproject.toml names, imported from the folder; its kind is checked."""
    path = about["components"].get(name)
    if not isinstance(path, str):
        raise ValueError(
            f"[tool.flwr.app.components] has no {name}; add {name} = 'package.module:app'"
        )
    _refuse_namesake(folder, path.partition(":")[0].partition(".")[0])
    say(f"importing {path} (this runs the app's code)")
    app = user_code.find(name, path)
    if not isinstance(app, kind):
        raise ValueError(f"{name} is {path!r}, a {type(app).__name__}; give a {kind.__name__}")
    return app


def _refuse_namesake(folder: Path, package: str) -> None:
    """Raise an error if an imported package has the folder package's name: Python would use it."""
    other = getattr(sys.modules.get(package), "__file__", None)
    place = folder.resolve()
    in_folder = (place / package).is_dir() or (place / f"{package}.py").is_file()
    if in_folder and other is not None and not Path(other).resolve().is_relative_to(place):
        raise ValueError(
            f"folder is {str(folder)!r}, but another package with the name {package!r} is "
            "already imported; run this in a separate process"
        )


@contextmanager
def _importing(folder: Path) -> Iterator[None]:
    """Put the folder first in the import path; its modules are removed afterwards."""
    place = str(folder.resolve())
    known = set(sys.modules)
    sys.path.insert(0, place)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(place)
        for name in set(sys.modules) - known:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file).is_relative_to(place):
                del sys.modules[name]
