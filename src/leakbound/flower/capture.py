"""Run a Flower app's folder in this process and write what its server sees."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from leakbound import check
from leakbound._util import files, user_code
from leakbound.flower.grid import InProcessGrid
from leakbound.flower.messages import is_train
from leakbound.flower.server import capture_of, checked_rounds, keep

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
    other, and is stopped once the last wanted round's replies are there. Its folder is not written
    to. The files name the class and the input shape of the module whose weights are sent.

    Args:
        folder: of the app, with its pyproject.toml.
        out: a folder for the captured updates (docs/captured_updates.md has its form).
        rounds: which, from 1.
        clients: how many clients there are.
        run_config: values over those of `[tool.flwr.app.config]`.
        on_progress: is given a sentence at every step, and before each import.

    Raises:
        ValueError: no Flower app in the folder, a `run_config` of keys that it does not have, code
            that does not import, an app that ends before the last wanted round, clients that do not
            answer.
    """
    wanted, say, place = checked_rounds(rounds), on_progress or (lambda text: None), Path(folder)
    about = _about(place)
    known = _flat(about.get("config", {}))
    for key in run_config or {}:
        if key not in known:
            raise ValueError(
                f"run_config has the key {key!r}, which [tool.flwr.app.config] does not; "
                f"{check.closest(key, known)}"
            )
    config = {**known, **(run_config or {})}
    with files.writing(Path(out)):
        files.folder(Path(out))
    with _importing(place):
        server = _component(place, about, "serverapp", ServerApp, say)
        client = _component(place, about, "clientapp", ClientApp, say)
        grid = _CapturingGrid(wanted, Path(out), say, client, clients, run_config=config)
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


class _CapturingGrid(InProcessGrid):
    """A grid that writes the replies of wanted rounds, and then stops the app."""

    def __init__(self, wanted: tuple[int, ...], out: Path, say: Say, *app: Any, **given: Any):
        super().__init__(*app, **given, on_exchange=self._keep)
        self.round, self.seen, self.written = 0, set[int](), list[Path]()
        self._wanted, self._out, self._say = wanted, out, say
        self.problem: str | None = None
        self.refusal: ValueError | None = None
        self._models: dict[type[nn.Module], tuple[str, int]] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """As the grid; a round is what one push of train messages starts."""
        messages = list(messages)
        if any(is_train(message) for message in messages):
            self._stop_when_done()
            self.round, self.problem = self.round + 1, None
            self._say(f"round {self.round}: {len(messages)} clients train")
        names = super().push_messages(messages)
        if self.problem is not None and self.round not in self.seen:
            raise _Enough
        self._stop_when_done()
        return names

    def called(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Note the shape of a kind of module's first input, and how many tensors it has."""
        kind = type(module)
        if kind not in self._models and inputs and isinstance(inputs[0], Tensor):
            shape = ",".join(map(str, inputs[0].shape[1:]))
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
        about = {**capture.about, **self._model(len(capture.update))}
        try:
            path = keep(self._out, replace(capture, about=about))
        except ValueError as error:
            self.refusal = error
            raise _Enough from None
        self.seen.add(self.round)
        self.written.append(path)
        self._say(f"kept {path.parent.name}/{path.name}")


def _about(folder: Path) -> dict[str, Any]:
    """The table `tool.flwr.app` of a folder's pyproject.toml."""
    path = folder / "pyproject.toml"
    try:
        with files.opened(path) as file:
            table = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(
            f"folder is {str(folder)!r}, whose pyproject.toml cannot be read: {error}; give the "
            "folder of a Flower app"
        ) from error
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


def _component(folder: Path, about: Mapping[str, Any], name: str, kind: type, say: Say) -> Any:
    """One app that the pyproject.toml names, imported from the folder; its kind is checked."""
    path = about["components"].get(name)
    if not isinstance(path, str):
        raise ValueError(
            f"[tool.flwr.app.components] names no {name}; add {name} = 'package.module:app'"
        )
    _refuse_namesake(folder, path.partition(":")[0].partition(".")[0])
    say(f"importing {path} (this runs the app's code)")
    app = user_code.find(name, path)
    if not isinstance(app, kind):
        raise ValueError(f"{name} is {path!r}, a {type(app).__name__}; give a {kind.__name__}")
    return app


def _refuse_namesake(folder: Path, package: str) -> None:
    """Python would take a package of that name that is imported already, and not the folder's."""
    other = getattr(sys.modules.get(package), "__file__", None)
    place = folder.resolve()
    own = (place / package).is_dir() or (place / f"{package}.py").is_file()
    if own and other is not None and not Path(other).resolve().is_relative_to(place):
        raise ValueError(
            f"folder is {str(folder)!r}, whose package {package!r} has the name of one that is "
            "imported from elsewhere; run this in a process of its own"
        )


@contextmanager
def _importing(folder: Path) -> Iterator[None]:
    """The folder in front of the import path; its modules are forgotten afterwards."""
    place, known = str(folder.resolve()), set(sys.modules)
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
