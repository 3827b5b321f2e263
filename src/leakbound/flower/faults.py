"""What Flower's own clipping does with an update of three numbers: faults are measured, not listed.

Every probe calls the installed class on stand-ins for messages, so a release of Flower without a
fault is not accused. A probe restores NumPy's global random state and keeps Flower's log silent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.clientapp import mod as client_mods
from flwr.serverapp import strategy as strategies

NORM = 1.0
WIDE = 4096
"""Entries of an update that measures the noise: its standard deviation is known to 1.1 %."""

Values = Sequence[Any]


def of_clip(name: str) -> frozenset[str]:
    """The faults of one of Flower's clips: a mod's or a strategy's name.

    Returns:
        "nan-disables-clip": one NaN leaves all other entries at full length. "zero-update-raises":
        an update of zero becomes an error. "integer-buffers": a whole-number array makes the clip
        raise, or takes noise that is cut to whole numbers. "scalars-pass": an array without
        dimensions, such as a temperature or a batch norm's counter, leaves unclipped (and from
        LocalDpMod without noise).

    Example:
        >>> "scalars-pass" in of_clip("no clip of Flower's")
        False
    """
    if not (hasattr(client_mods, name) or hasattr(strategies, name)):
        return frozenset()
    faults = set()
    out = _clipped(name, [np.array([np.nan, 3.0, 4.0])])
    if out is not None and np.abs(np.nan_to_num(np.concatenate(out))).max() > NORM * 1.01:
        faults.add("nan-disables-clip")
    if _clipped(name, [np.zeros(3)]) is None:
        faults.add("zero-update-raises")
    out = _clipped(name, [np.array([3.0, 4.0]), np.array(7.0)])
    if out is not None and abs(float(out[1])) > NORM * 1.01:
        faults.add("scalars-pass")
    whole = [np.array([3.0, 4.0]), np.array([5])]
    if _clipped(name, whole) is None or (name == "LocalDpMod" and _cuts_noise()):
        faults.add("integer-buffers")
    return frozenset(faults)


def of_adaptive(name: str) -> frozenset[str]:
    """The faults of a strategy with adaptive clipping, by its name.

    Returns:
        "adaptive-wrong-sign": all updates are clipped, and the norm falls. "noise-of-next-norm":
        the noise has the level of the next round's norm.

    Example:
        >>> name = "DifferentialPrivacyServerSideAdaptiveClipping"
        >>> of_adaptive(name) <= {"adaptive-wrong-sign", "noise-of-next-norm"}
        True
    """
    # two updates of twice the norm: both are clipped, so the norm should grow by e^1
    with _quiet():
        rule = _strategy(name, clients=2, noise=0.05, clip_norm_lr=2.0)
        update = np.full(WIDE, 2 * NORM / WIDE**0.5)
        sent = update if "ServerSide" in name else update / 2  # the clients clip in the latter
        mean = _aggregated(rule, [np.zeros(WIDE)], [[sent], [sent]])
    if mean is None:
        return frozenset()
    level = float((mean[0] - update / 2).std()) * 2 / rule.noise_multiplier  # of which norm
    faults = {"adaptive-wrong-sign"} if rule.clipping_norm < NORM else set()
    if abs(np.log(level / rule.clipping_norm)) < abs(np.log(level / NORM)):
        faults.add("noise-of-next-norm")
    return frozenset(faults)


def only_warns(name: str) -> bool:
    """Whether a strategy for 5 clients takes the reply of one."""
    with _quiet():
        rule = _strategy(name, clients=5)
        return _aggregated(rule, [np.zeros(2)], [[np.array([0.1, 0.0])]]) is not None


def _clipped(name: str, update: Values) -> list[Any] | None:
    """What leaves the clip of norm 1 for the update; None if it raises or answers with an error."""
    start = [np.zeros_like(part) for part in update]
    try:
        with _quiet():
            if name.startswith("DifferentialPrivacy"):
                return _aggregated(_strategy(name, clients=1), start, [update])
            mod: Any = getattr(client_mods, name)
            if name == "LocalDpMod":
                mod = mod(NORM, 0.0, 1.0, 0.5)  # sensitivity 0: no noise
            return _through(mod, start, update)
    except Exception:  # whatever it raises, the update is not clipped
        return None


def _cuts_noise() -> bool:
    """Whether the noise of LocalDpMod on a whole number stays a whole number."""
    with _quiet():
        mod = client_mods.LocalDpMod(1e6, 1.0, 1.0, 0.5)
        try:
            out = _through(mod, [np.zeros(3, dtype=int)], [np.array([5, 6, 7])])
        except Exception:
            return False
    return out is not None and bool((out[0] == np.round(out[0])).all())


def _through(
    mod: Any,
    start: Values,
    update: Values,
) -> list[Any] | None:
    settings = ConfigRecord({"clipping_norm": NORM})
    asked = SimpleNamespace(content=RecordDict({"arrays": _arrays(start), "config": settings}))
    reply = mod(asked, None, lambda message, context: _reply(update))
    if reply.has_error():
        return None
    return list(next(iter(reply.content.array_records.values())).to_numpy_ndarrays())


def _strategy(
    name: str,
    *,
    clients: int,
    noise: float = 0.0,
    **settings: Any,
) -> Any:
    kind = getattr(strategies, name)
    norm = {"initial_clipping_norm" if "Adaptive" in name else "clipping_norm": NORM}
    privacy_settings = {"noise_multiplier": noise, "num_sampled_clients": clients, **norm}
    return kind(strategies.FedAvg(), **privacy_settings, **settings)


def _aggregated(
    rule: Any,
    start: Values,
    updates: Sequence[Values],
) -> list[Any] | None:
    rule.current_arrays = _arrays(start)
    mean, _ = rule.aggregate_train(1, [_reply(update, norm_bit=1) for update in updates])
    return None if mean is None else list(mean.to_numpy_ndarrays())


def _arrays(values: Values) -> ArrayRecord:
    return ArrayRecord({str(at): Array(np.array(value)) for at, value in enumerate(values)})


def _reply(values: Values, **metrics: int) -> Any:
    """A reply as mods and strategies read it; a real one would need the process's identity."""
    record = MetricRecord({"num-examples": 1, **metrics})
    content = RecordDict({"arrays": _arrays(values), "metrics": record})
    return SimpleNamespace(content=content, has_error=lambda: False)


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("flwr")
    state = np.random.get_state()  # noqa: NPY002
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)
        np.random.set_state(state)  # noqa: NPY002
