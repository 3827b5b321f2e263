"""What trainers of transformers and trl write beside their weights: how far they trained.

Only `trainer_state.json` is read. `training_args.bin` holds more, but is a pickle.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from leakbound._util import files

STATE = "trainer_state.json"
SOURCE = "stated_by"
"""The key of the file's name in what it states."""
WEIGHTS = ("model", "adapter_model")
"""How the names of files begin that a trainer writes: the state beside others is not theirs."""
MOST_JSON = 2**26
"""The most bytes of a state: it has a line for each logged step."""
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,12})")


Number = Annotated[int, Meta(ge=0, le=2**31)]


class _State(msgspec.Struct):
    global_step: Number
    epoch: Annotated[float, Meta(ge=0, le=2**31)] | None = None
    train_batch_size: Number | None = None


def stated(update: Path | str, before: Path | str | None = None) -> dict[str, str]:
    """What a trainer's folder says of its training, as an update's metadata do.

    `update` is a folder of a trainer, one of its checkpoints, or a file of weights there; the last
    checkpoint counts. If `before` is an earlier checkpoint, its steps do not count. Other places
    state nothing.

    Raises:
        ValueError: a state is damaged or too large.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / STATE).write_text(
        ...         '{"global_step": 10, "epoch": 5.0, "train_batch_size": 4}')
        ...     stated(folder)
        {'stated_by': 'trainer_state.json', 'steps': '10', 'batch_size': '4', 'examples': '8'}
    """
    after = _state(Path(update))
    if after is None:
        return {}
    begun = None if before is None else _state(Path(before))
    steps = after.global_step - (0 if begun is None else begun.global_step)
    if steps < 1:
        return {}
    about = {SOURCE: STATE, "steps": str(steps)}
    size = after.train_batch_size
    if not size:
        return about
    about["batch_size"] = str(size)
    epochs = (after.epoch or 0.0) - (0.0 if begun is None else begun.epoch or 0.0)
    # Within an epoch no example repeats.
    about["examples"] = str(round(steps * size / max(epochs, 1.0)))
    return about


def note(about: Mapping[str, str]) -> tuple[str, ...]:
    """What to say of numbers from a trainer's state."""
    if not about:
        return ()
    return (
        f"steps and examples are those of {STATE}; it counts the steps of earlier rounds, too, if "
        "the trainer resumed, and the batch of one device without accumulated gradients: then give "
        "--local-steps and --batch-size",
    )


def _state(place: Path) -> _State | None:
    if not place.is_dir() and not place.name.startswith(WEIGHTS):
        return None
    folder = place if place.is_dir() else place.parent
    path = folder / STATE
    if not path.is_file():
        path = _last(folder) / STATE
    if not path.is_file():
        return None
    what = f"trainer state {str(path)!r}"
    try:
        return msgspec.convert(files.read_json(path, what, most=MOST_JSON), _State)
    except msgspec.ValidationError as error:
        raise ValueError(f"{what} is damaged ({error}); remove it, or give the options") from None


def _last(folder: Path) -> Path:
    """The checkpoint of a folder with most steps; the folder itself if it has none."""
    steps_of = {
        path: int(match[1])
        for path in folder.glob("checkpoint-*")
        if (match := _CHECKPOINT.fullmatch(path.name))
    }
    return max(steps_of, key=steps_of.__getitem__, default=folder)
