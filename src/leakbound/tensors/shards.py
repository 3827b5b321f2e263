"""Weights in several files, as `save_pretrained` writes large models, with their index."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from leakbound._util import files

WEIGHTS = "model.safetensors"
INDEX = ".safetensors.index.json"
"""How the name of an index of shards ends."""
MOST_JSON = 2**26
"""The most bytes of an index."""
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def weights_in(folder: Path) -> Path | None:
    """The file or index of weights in a folder that `save_pretrained` wrote; None: it holds none.

    Raises:
        ValueError: the folder holds pickles only.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(weights_in(Path(folder)))
        None
    """
    for name in (WEIGHTS, f"model{INDEX}"):
        if (folder / name).exists():
            return folder / name
    for name in PICKLED:
        if (folder / name).exists():
            raise ValueError(
                f"{str(folder)!r} holds {name}: pickles, which can run code when opened; save the "
                "model with save_pretrained(..., safe_serialization=True)"
            )
    return None


def read_shards(
    path: Path, most: int, read: Callable[[Path, int], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """The tensors of all shards that an index names, of at most `most` bytes together.

    `read` reads one shard of at most so many bytes.

    Raises:
        ValueError: the index is damaged, a shard is missing, or they hold other tensors.
    """
    shard_of = _map(path)
    found: dict[str, Tensor] = {}
    for name in sorted(set(shard_of.values())):
        own = read(path.parent / name, most)
        most -= sum(value.numel() * value.element_size() for value in own.values())
        wanted = {key for key, shard in shard_of.items() if shard == name}
        if odd := sorted(wanted ^ own.keys()):
            where = "lacks" if odd[0] in wanted else "holds, but the index does not name,"
            raise ValueError(
                f"{str(path)!r}: the shard {name} {where} {odd[0]}; give shards and index of one "
                "model"
            )
        found |= own
    return found


def _map(path: Path) -> dict[str, str]:
    """The shard of each tensor. Shards are files beside the index, never elsewhere."""
    what = f"index {str(path)!r}"
    with files.opened(path) as stream:
        # One byte more shows that the file is larger, without reading it all.
        content = stream.read(MOST_JSON + 1)
    if len(content) > MOST_JSON:
        raise ValueError(f"{what} is over {MOST_JSON} bytes; give the index of one model")
    try:
        held: Any = json.loads(content)
    # Lists nested thousands deep exhaust the stack.
    except (ValueError, RecursionError):
        raise ValueError(f"{what} is not valid JSON; save the model again") from None
    rows = held.get("weight_map") if isinstance(held, dict) else None
    if not isinstance(rows, dict) or not rows:
        raise ValueError(f"{what} has no weight_map; give the index that save_pretrained wrote")
    for shard in rows.values():
        # A path could lead out of the folder. On Linux a backslash is no separator for `Path`.
        plain = isinstance(shard, str) and Path(shard).name == shard and "\\" not in shard
        if not plain or not shard.endswith(".safetensors"):
            raise ValueError(
                f"{what} names the shard {str(shard)[:60]!r}; give an index of .safetensors files "
                "in its own folder"
            )
    return rows
