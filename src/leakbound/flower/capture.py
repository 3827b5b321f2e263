"""Run a Flower app's folder in this process and write what its server sees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from leakbound import check
from leakbound._util import files
from leakbound.flower import app_folder
from leakbound.flower.app_folder import Progress
from leakbound.flower.grid import InProcessGrid
from leakbound.flower.server import capture_of, checked_rounds, keep


def capture_app(
    folder: Path | str,
    out: Path | str,
    *,
    rounds: Sequence[int] = (1,),
    clients: int = 2,
    run_config: Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
) -> list[Path]:
    """Run the app in a folder and keep what the server sees of some rounds; returns the files.

    This runs the app's code: the components that its pyproject.toml names under
    `[tool.flwr.app.components]` are imported, `on_progress` says which before. The app runs in this
    process with `clients` clients one after the other, and is stopped once the last wanted round's
    replies are there. Nothing of the app is changed, and its folder is not written to. The
    files name the class and the input shape of the module whose weights are sent.

    Args:
        folder: of the app, with its pyproject.toml.
        out: a folder for the captured updates (docs/captured_updates.md has its form).
        rounds: which, from 1.
        clients: how many clients there are.
        run_config: values over those of `[tool.flwr.app.config]`.
        on_progress: is given a sentence at every step.

    Raises:
        ValueError: no Flower app in the folder, a `run_config` of keys that it does not have, code
            that does not import, an app that ends before the last wanted round, clients that do not
            answer.
    """
    wanted, say = checked_rounds(rounds), on_progress or (lambda text: None)
    about = app_folder.about(Path(folder))
    known = app_folder.flat(about.get("config", {}))
    for key in run_config or {}:
        if key not in known:
            raise ValueError(
                f"run_config has the key {key!r}, which [tool.flwr.app.config] does not; "
                f"{check.closest(key, known)}"
            )
    config = {**known, **(run_config or {})}
    with files.writing(Path(out)):
        files.folder(Path(out))
    with app_folder.importing(Path(folder)):
        parts = [app_folder.component(Path(folder), about, name, say) for name in app_folder.KINDS]
        server, client = parts
        grid = _Watching(client, clients, config, wanted, Path(out), say)
        hook = register_module_forward_pre_hook(grid.called)
        try:
            server(grid, Context(1, 1, {}, RecordDict(), config))
        except _Enough:
            say(f"stopped in round {grid.round}")
        finally:
            hook.remove()
    if grid.refusal is not None:
        raise grid.refusal
    if grid.problem is not None and grid.round not in grid.seen:
        raise ValueError(f"no client answered in round {grid.round}: {grid.problem}")
    missing = [number for number in wanted if number not in grid.seen]
    if missing:
        raise ValueError(
            f"rounds holds {missing[0]}, but the app ended after round {grid.round}; ask for "
            "earlier rounds, or give more rounds in run_config"
        )
    return grid.written


class _Enough(BaseException):
    """All wanted rounds are there; no `except Exception` of an app is to catch this."""


class _Watching(InProcessGrid):
    """A grid that writes the replies of wanted rounds, and then stops the app."""

    def __init__(
        self,
        client_app: ClientApp,
        clients: int,
        run_config: Mapping[str, Any],
        wanted: tuple[int, ...],
        out: Path,
        say: Progress,
    ) -> None:
        super().__init__(client_app, clients, run_config=run_config, on_exchange=self._seen)
        self.round, self.seen, self.written = 0, set[int](), list[Path]()
        self._wanted, self._out, self._say = wanted, out, say
        self.problem: str | None = None
        self.refusal: ValueError | None = None
        self._models: dict[type[nn.Module], tuple[str, int]] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """As the grid; a round is what one push of train messages starts."""
        messages = list(messages)
        if any(_trains(message) for message in messages):
            self._stop_when_done()
            self.round, self.problem = self.round + 1, None
            self._say(f"round {self.round}: {len(messages)} clients train")
        names = super().push_messages(messages)
        if self.problem is not None and self.round not in self.seen:
            raise _Enough
        self._stop_when_done()
        return names

    def called(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        """Note the shape of a kind of module's first input, and how many tensors it has."""
        kind = type(module)
        if kind not in self._models and given and isinstance(given[0], Tensor):
            shape = ",".join(map(str, given[0].shape[1:]))
            self._models[kind] = shape, len(module.state_dict())

    def _model(self, tensors: int) -> dict[str, str]:
        """The class and input shape of the first module called that has so many tensors."""
        for kind, (shape, count) in self._models.items():
            if count == tensors and shape:
                return {"model": f"{kind.__module__}:{kind.__qualname__}", "input_shape": shape}
        return {}

    def _stop_when_done(self) -> None:
        if self.seen >= set(self._wanted):
            raise _Enough

    def _seen(self, asked: Message, reply: Message) -> None:
        if not _trains(asked) or self.round not in self._wanted:
            return
        if reply.has_error():
            self.problem = self.problem or reply.error.reason
            return
        try:
            seen = capture_of(self.round, asked, reply)
        except ValueError as error:
            self.problem = self.problem or str(error)
            return
        try:
            path = keep(
                self._out, replace(seen, about={**seen.about, **self._model(len(seen.update))})
            )
        except ValueError as error:
            self.refusal = error
            raise _Enough from None
        self.seen.add(self.round)
        self.written.append(path)
        self._say(f"kept {path.parent.name}/{path.name}")


def _trains(message: Message) -> bool:
    return message.metadata.message_type.split(".")[0] == "train"
