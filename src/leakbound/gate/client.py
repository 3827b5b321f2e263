"""Whether what a client's own code sends is what its deployment file declares."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from leakbound import registry
from leakbound._util import user_code
from leakbound.gate import noise
from leakbound.gate.noise import Array, NormTest, Spans
from leakbound.gate.policy import ClientPolicy, NamedModel, Requirement, answer_of
from leakbound.randomness import stream, uniform
from leakbound.risk.deployment import Deployment, parse
from leakbound.risk.deployment.file import read
from leakbound.risk.deployment.laws import std_of

LEVEL = 1e-6
"""Probability that a client that is as declared breaks a requirement, all tests together."""
LARGE = 1e3
"""How many times the input range the large batch reaches: it should be clipped."""
MOST = 2**28
"""The most numbers that both processes keep."""


class Declared(NamedTuple):
    """A release's noise std (0: none at the client), the bound on its signal's norm, the bound on
    the change if one example is replaced (None: the batch is one unit), and examples.
    """

    std: float
    bound: float
    change: float | None
    batch: int


class Sent(NamedTuple):
    """What one process saw: shapes that were expected and sent, where tensors are in releases,
    releases (n, P) of each batch, and what the client reports.
    """

    expected: dict[str, tuple[int, ...]]
    shapes: dict[str, tuple[int, ...]]
    spans: Spans
    rows: dict[str, Array]
    facts: dict[str, Any]


def answers(own: ClientPolicy, base: Path) -> Iterator[Requirement]:
    """The requirements of one client."""
    given, _ = read(base / own.deployment)
    declared = declared_of(own, given)
    one, two = _both(own, declared)
    yield _sent(one)
    if own.facts is not None:
        yield _reported(own, given, one.facts)
    yield from judged(one, two, declared, same=own.same_signal)


def declared_of(own: ClientPolicy, given: Deployment) -> Declared:
    """What a release must be by the deployment file.

    Raises:
        ValueError: the file does not say so much of one client's release.
    """
    bound = given.clip.l2
    std = std_of(given.clip, given.noise)
    at = given.noise.at
    examples = given.clip.kind == "example"
    batch = own.batch or given.local.batch
    if at in ("server", "none"):
        std = 0.0
    elif at not in ("client", "optimizer") or (at == "optimizer") != examples:
        std = None
    if bound is None or std is None or (examples and batch is None):
        raise ValueError(
            f"{own.deployment} does not state one client's clip and noise; state clip.norm, "
            "noise.multiplier and noise.at (client; if examples are clipped, optimizer, and "
            "local.batch)"
        )
    batch = batch or 16
    scale = own.scale or (1 / batch if examples else 1.0)
    change = 2 * bound * scale if examples else None
    return Declared(std * scale, bound * scale * (batch if examples else 1), change, batch)


def judged(one: Sent, two: Sent, declared: Declared, *, same: bool) -> Iterator[Requirement]:
    """Noise, clip and sensitivity of the releases of two processes."""
    std, bound, change, _ = declared
    # divided among all tests, so that all together keep to LEVEL
    level = LEVEL / (2 * noise.count_of(one.spans) + 3)
    # two processes together: their noise must differ as that of two calls does
    rows = {name: np.concatenate([own, two.rows[name]]) for name, own in one.rows.items()}
    bad = [name for name, own in rows.items() if not np.isfinite(own).all()]
    if bad or not one.spans:
        words = f"NaN or infinity for the {bad[0]} batch" if bad else "none of these is sent"
        yield _tested("update", "the model's tensors leave as finite numbers", words, True)
        return
    if std:
        more = {"ratio": 0.0 if same else bound / std, "level": level}
        faults = [
            f"{words} ({name} batch)"
            for name in ("plain", "large")
            for words in noise.faults_of(rows[name] / std, one.spans, **more)
        ]
        words = "; ".join(faults[:2]) or f"so in {len(rows['plain'])} calls for each batch"
        stated = f"every entry has fresh Gaussian noise of std {std:.4g}"
        yield _tested("noise", stated, words, bool(faults))
    means = {name: own.mean(0) for name, own in rows.items()}
    # of a mean over all calls
    variance = std**2 / len(rows["plain"])
    for name in ("plain", "large"):
        stated = f"the norm of the {name} batch's update without noise is at most {bound:.4g}"
        yield _of_norm("clip", stated, noise.norm_of(means[name], variance, bound, level))
    if change is not None:
        stated = f"replacing one example changes it by at most {change:.4g}"
        moved = means["plain"] - means["replaced"]
        yield _of_norm("sensitivity", stated, noise.norm_of(moved, 2 * variance, change, level))


def _of_norm(key: str, stated: str, test: NormTest) -> Requirement:
    tested = _tested(key, stated, test.words, test.broken)
    return replace(tested, numbers=(test.estimate, test.critical))


def _tested(key: str, stated: str, result: str, broken: bool) -> Requirement:
    stated = f"{stated} (false alarm at most {LEVEL:g})"
    return Requirement(key, stated, result, answer_of(broken=broken))


def _sent(seen: Sent) -> Requirement:
    names = {*seen.expected, *seen.shapes}
    wrong = sorted(name for name in names if seen.expected.get(name) != seen.shapes.get(name))
    words = [f"{name} {seen.shapes.get(name, 'is missing')}" for name in wrong[:3]]
    stated = f"only the model's {len(seen.expected)} trained tensors leave"
    found = "; ".join(words) or "these leave"
    return Requirement("sent", stated, found, answer_of(broken=bool(wrong)))


def _reported(own: ClientPolicy, given: Deployment, facts: dict[str, Any]) -> Requirement:
    """The client's settings beside the deployment's, key by key."""
    said = _leaves(msgspec.to_builtins(parse(facts)))
    stated = _leaves(msgspec.to_builtins(given))
    wrong = [
        f"{key} is {value!r}, stated {stated[key]!r}"
        for key, value in said.items()
        if stated.get(key, value) != value
    ]
    gaps = [f"{key} is not stated in {own.deployment}" for key in said if key not in stated]
    gaps += [f"{key} is not reported" for key in own.reports if key not in said]
    words = "; ".join([*wrong, *gaps]) or f"{len(said)} settings agree"
    what = f"the client's settings are those of {own.deployment}"
    answer = answer_of(broken=bool(wrong), unsure=bool(gaps))
    return Requirement("facts", what, words, answer)


def _leaves(value: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            found |= _leaves(inner, f"{above}{name}.")
        elif inner is not None and name != "title":
            found[above + name] = inner
    return found


def _both(own: ClientPolicy, declared: Declared) -> list[Sent]:
    """The same calls in two fresh processes, which share no state of any generator."""
    context: Any = multiprocessing.get_context("spawn")
    if sys.platform == "linux":  # twice as fast; macOS's own libraries do not stand a fork
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
    end = time.monotonic() + own.seconds
    ends = []
    workers = []
    found = list[Sent]()
    try:
        for _ in range(2):
            here, there = context.Pipe(duplex=False)
            worker = context.Process(target=_work, args=(own, declared, there), daemon=True)
            workers.append(worker)
            worker.start()
            ends.append(here)
            there.close()
        for here in ends:
            if not here.poll(max(0.0, end - time.monotonic())):
                raise ValueError(f"{own.update} takes too long; give more seconds or fewer repeats")
            found.append(here.recv())
            if isinstance(found[-1], str):
                raise ValueError(f"{own.update}: {found[-1]}")
    except EOFError:
        raise ValueError(f"the process of {own.update} ended; call the function yourself") from None
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    return found


def _work(own: ClientPolicy, declared: Declared, out: Connection) -> None:
    """In a process of its own: what the client prints goes to stderr, and no seed is inherited."""
    os.dup2(2, 1)
    torch.seed()
    np.random.seed()  # noqa: NPY002
    random.seed()
    torch.set_num_threads(1)
    try:
        out.send(_called(own, declared))
    except Exception as error:  # whatever the user's code raises
        out.send(f"{type(error).__name__}: {error}")


def built(own: NamedModel) -> torch.nn.Module:
    given = {"input_shape": own.input_shape, "classes": own.classes}
    model: torch.nn.Module = registry.parse(
        "model", own.model, **given, generator=stream(0, "gate", "model")
    )
    return model


def _called(own: ClientPolicy, declared: Declared) -> Sent:
    # Bytecode of the client's code would also serve a change of the same size in the same second.
    sys.dont_write_bytecode = True
    net = built(own)
    calls = own.repeats // 2
    expected = {n: tuple(p.shape) for n, p in net.named_parameters() if p.requires_grad}
    if sum(p.numel() for p in net.parameters()) * calls * 6 > MOST:
        raise ValueError("the model is too large for so many repeats; give a smaller one")
    function = user_code.find("update", own.update)
    batches = _batches(own, declared)
    shapes: dict[str, tuple[int, ...]] = {}
    rows: dict[str, list[Array]] = {name: [] for name in batches}
    for _ in range(calls):
        for name, batch in batches.items():
            # a copy: the function may change its arguments
            sent = {k: _array(v) for k, v in function(*(part.clone() for part in batch)).items()}
            shapes |= {str(key): value.shape for key, value in sent.items()}
            kept = [sent[key].ravel() for key in expected if key in sent]
            rows[name].append(np.concatenate([*kept, np.zeros(0)]))
    spans = {}
    at = 0
    for key in expected:
        if key in sent:
            spans[key] = slice(at, at := at + sent[key].size)
    facts = dict(user_code.find("facts", own.facts)()) if own.facts else {}
    return Sent(expected, shapes, spans, {name: np.stack(own) for name, own in rows.items()}, facts)


def _array(value: Any) -> Array:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().double().numpy()
    return np.asarray(value, dtype=np.float64)


def _batches(own: ClientPolicy, declared: Declared) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """One in the input range; one far beyond it, of one class; if examples count, one with an
    example of each.
    """
    low, high = own.input_range
    shape = (declared.batch, *own.input_shape)
    labels = torch.arange(declared.batch) % own.classes
    plain, large = (
        factor * (low + (high - low) * uniform(shape, stream(0, "gate", name)))
        for name, factor in (("plain", 1.0), ("large", LARGE))
    )
    mixed = torch.cat([plain[:-1], large[-1:]])
    zero = 0 * labels
    found = {"plain": (plain, labels), "large": (large, zero)}
    if declared.change is not None:
        found["replaced"] = (mixed, torch.cat([labels[:-1], zero[-1:]]))
    return found
