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


def answers(policy: ClientPolicy, base: Path) -> Iterator[Requirement]:
    """The requirements of one client."""
    deployment, _ = read(base / policy.deployment)
    declared = declared_of(policy, deployment)
    one, two = _both(policy, declared)
    yield _sent(one)
    if policy.facts is not None:
        yield _reported(policy, deployment, one.facts)
    yield from judged(one, two, declared, same=policy.same_signal)


def declared_of(policy: ClientPolicy, deployment: Deployment) -> Declared:
    """What a release must be by the deployment file.

    Raises:
        ValueError: the file does not say so much of one client's release.
    """
    bound = deployment.clip.l2
    std = std_of(deployment.clip, deployment.noise)
    at = deployment.noise.at
    examples = deployment.clip.kind == "example"
    batch = policy.batch or deployment.local.batch
    if at in ("server", "none"):
        std = 0.0
    elif at != ("optimizer" if examples else "client"):
        std = None
    if bound is None or std is None or (examples and batch is None):
        raise ValueError(
            f"{policy.deployment} does not state one client's clip and noise; state clip.norm, "
            "noise.multiplier and noise.at (client; if examples are clipped, optimizer, and "
            "local.batch)"
        )
    batch = batch or 16
    scale = policy.scale or (1 / batch if examples else 1.0)
    change = 2 * bound * scale if examples else None
    return Declared(std * scale, bound * scale * (batch if examples else 1), change, batch)


def judged(
    one: Sent,
    two: Sent,
    declared: Declared,
    *,
    same: bool,
) -> Iterator[Requirement]:
    """Noise, clip and sensitivity of the releases of two processes."""
    std, bound, change, _ = declared
    # divided among all tests, so that all together keep to LEVEL
    level = LEVEL / (2 * noise.count_of(one.spans) + 3)
    # two processes together: their noise must differ as that of two calls does
    rows = {name: np.concatenate([first, two.rows[name]]) for name, first in one.rows.items()}
    bad = [name for name, both in rows.items() if not np.isfinite(both).all()]
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
    means = {name: both.mean(0) for name, both in rows.items()}
    # of a mean over all calls
    variance = std**2 / len(rows["plain"])
    for name in ("plain", "large"):
        stated = f"the norm of the {name} batch's update without noise is at most {bound:.4g}"
        yield _of_norm("clip", stated, noise.norm_of(means[name], variance, bound, level))
    if change is not None:
        stated = f"replacing one example changes it by at most {change:.4g}"
        moved = means["plain"] - means["replaced"]
        yield _of_norm("sensitivity", stated, noise.norm_of(moved, 2 * variance, change, level))


def _of_norm(
    key: str,
    stated: str,
    test: NormTest,
) -> Requirement:
    tested = _tested(key, stated, test.words, test.broken)
    return replace(tested, numbers=(test.estimate, test.critical))


def _tested(
    key: str,
    stated: str,
    result: str,
    broken: bool,
) -> Requirement:
    stated = f"{stated} (false alarm at most {LEVEL:g})"
    return Requirement(key, stated, result, answer_of(broken=broken))


def _sent(seen: Sent) -> Requirement:
    names = {*seen.expected, *seen.shapes}
    wrong = sorted(name for name in names if seen.expected.get(name) != seen.shapes.get(name))
    words = [f"{name} {seen.shapes.get(name, 'is missing')}" for name in wrong[:3]]
    stated = f"only the model's {len(seen.expected)} trained tensors leave"
    answer = answer_of(broken=bool(wrong))
    return Requirement("sent", stated, "; ".join(words) or "these leave", answer)


def _reported(
    policy: ClientPolicy,
    deployment: Deployment,
    facts: dict[str, Any],
) -> Requirement:
    """The client's settings beside the deployment's, key by key."""
    reported = _leaves(msgspec.to_builtins(parse(facts)))
    stated = _leaves(msgspec.to_builtins(deployment))
    wrong = []
    gaps = [f"{key} is not reported" for key in policy.reports if key not in reported]
    for key, value in reported.items():
        if key not in stated:
            gaps.append(f"{key} is not stated in {policy.deployment}")
        elif stated[key] != value:
            wrong.append(f"{key} is {value!r}, stated {stated[key]!r}")
    words = "; ".join([*wrong, *gaps]) or f"{len(reported)} settings agree"
    what = f"the client's settings are those of {policy.deployment}"
    answer = answer_of(broken=bool(wrong), unsure=bool(gaps))
    return Requirement("facts", what, words, answer)


def _leaves(value: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            leaves |= _leaves(inner, f"{above}{name}.")
        elif inner is not None and name != "title":
            leaves[above + name] = inner
    return leaves


def _both(policy: ClientPolicy, declared: Declared) -> list[Sent]:
    """The same calls in two fresh processes, which share no state of any generator."""
    context: Any = multiprocessing.get_context("spawn")
    if sys.platform == "linux":  # twice as fast; macOS's own libraries do not stand a fork
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
    end = time.monotonic() + policy.seconds
    readers = []
    workers = []
    answers = list[Sent]()
    try:
        for _ in range(2):
            here, there = context.Pipe(duplex=False)
            worker = context.Process(
                target=_work,
                args=(policy, declared, there),
                daemon=True,
            )
            workers.append(worker)
            worker.start()
            readers.append(here)
            there.close()
        for here in readers:
            if not here.poll(max(0.0, end - time.monotonic())):
                raise ValueError(
                    f"{policy.update} takes too long; give more seconds or fewer repeats"
                )
            answer = here.recv()
            if isinstance(answer, str):
                raise ValueError(f"{policy.update}: {answer}")
            answers.append(answer)
    except EOFError:
        raise ValueError(
            f"the process of {policy.update} ended; call the function yourself"
        ) from None
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    return answers


def _work(
    policy: ClientPolicy,
    declared: Declared,
    out: Connection,
) -> None:
    """In a process of its own: what the client prints goes to stderr, and no seed is inherited."""
    os.dup2(2, 1)
    torch.seed()
    np.random.seed()  # noqa: NPY002
    random.seed()
    torch.set_num_threads(1)
    try:
        out.send(_called(policy, declared))
    except Exception as error:  # whatever the user's code raises
        out.send(f"{type(error).__name__}: {error}")


def built(policy: NamedModel) -> torch.nn.Module:
    model: torch.nn.Module = registry.parse(
        "model",
        policy.model,
        input_shape=policy.input_shape,
        classes=policy.classes,
        generator=stream(0, "gate", "model"),
    )
    return model


def _called(
    policy: ClientPolicy,
    declared: Declared,
) -> Sent:
    # Bytecode of the client's code would also serve a change of the same size in the same second.
    sys.dont_write_bytecode = True
    net = built(policy)
    calls = policy.repeats // 2
    expected = {n: tuple(p.shape) for n, p in net.named_parameters() if p.requires_grad}
    if sum(p.numel() for p in net.parameters()) * calls * 6 > MOST:
        raise ValueError("the model is too large for so many repeats; give a smaller one")
    function = user_code.find("update", policy.update)
    batches = _batches(policy, declared)
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
    start = 0
    for key in expected:
        if key in sent:
            stop = start + sent[key].size
            spans[key] = slice(start, stop)
            start = stop
    facts = dict(user_code.find("facts", policy.facts)()) if policy.facts else {}
    stacked = {name: np.stack(calls) for name, calls in rows.items()}
    return Sent(expected, shapes, spans, stacked, facts)


def _array(value: Any) -> Array:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().double().numpy()
    return np.asarray(value, dtype=np.float64)


def _batches(
    policy: ClientPolicy, declared: Declared
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """One in the input range; one far beyond it, of one class; if examples count, one with an
    example of each.
    """
    low, high = policy.input_range
    shape = (declared.batch, *policy.input_shape)
    labels = torch.arange(declared.batch) % policy.classes
    plain, large = (
        factor * (low + (high - low) * uniform(shape, stream(0, "gate", name)))
        for name, factor in (("plain", 1.0), ("large", LARGE))
    )
    zero = 0 * labels
    batches = {"plain": (plain, labels), "large": (large, zero)}
    if declared.change is not None:
        mixed = torch.cat([plain[:-1], large[-1:]])
        batches["replaced"] = (mixed, torch.cat([labels[:-1], zero[-1:]]))
    return batches
