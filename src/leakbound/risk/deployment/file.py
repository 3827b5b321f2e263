"""Read and write deployment files, and translate the settings of other libraries into them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from leakbound import check
from leakbound._util import files
from leakbound._util.text import printable, toml
from leakbound.risk.deployment import mistakes
from leakbound.risk.deployment.facts import LARGEST, Deployment, Mistake

Described = tuple[Deployment, tuple[Mistake, ...]]
PATH = re.compile(r"\$\.?([\w.\[\]]*)")


def read(path: Path) -> Described:
    """The facts of a deployment file, and its mistakes with their lines.

    Instead of facts, it may hold one table of another library's parameters: `[opacus]`,
    `[tf_privacy]` or `[pfl]`, and facts beside it, which count first.

    Raises:
        ValueError: it cannot be read, has an unknown key, or contradicts itself.
    """
    what = f"deployment {str(path)!r}"
    table = files.read_toml(path, what)
    text = files.read(path).decode("utf-8-sig")
    factor = table.get("correlation")
    if isinstance(factor, str) and factor.endswith(".npy"):  # relative to the file that names it
        table = {**table, "correlation": str(path.parent / factor)}
    given = parse(table)
    return given, tuple(
        msgspec.structs.replace(mistake, line=line_of(text, mistake.key))
        for mistake in mistakes.find(given)
    )


def parse(table: Mapping[str, Any]) -> Deployment:
    """A deployment from the tables of its file.

    Example:
        >>> parse({"clip": {"norm": 1.0, "kind": "l2"}, "rounds": 3}).clip.l2
        1.0
    """
    whole = dict(table)
    for name, library in LIBRARIES.items():
        parameters = whole.pop(name, {})
        if not isinstance(parameters, Mapping):
            raise ValueError(f"{name} is no table; give [{name}] with its parameters")
        if parameters:
            whole = _merged(library.read(name, parameters), whole)
    try:
        return msgspec.convert(whole, Deployment)
    except msgspec.ValidationError as error:
        raise ValueError(in_words(str(error), Deployment)[1]) from None


def in_words(
    text: str,
    kind: Any,
    whole: str = "the file",
) -> tuple[str, str]:
    """The key of an error of msgspec; and in words: what is wrong, and the nearest known key."""
    where = PATH.search(text)
    key = whole if where is None or not where[1] else where[1]
    unknown = re.search(r"unknown field `(\w+)`", text)
    if unknown is None:
        return key, f"{key}: {' '.join(text.partition(' - at')[0].split())[:200]}"
    for part in key.split(".") if key != whole else ():
        kind = next(f.type for f in msgspec.structs.fields(kind) if f.name == part)
        if not isinstance(kind, type):  # such as Adaptive | None
            kind = next(one for one in kind.__args__ if one is not type(None))
    known = [field.name for field in msgspec.structs.fields(kind)]
    return unknown[1], f"{key} has no key {unknown[1]!r}; {check.closest(unknown[1], known)}"


def _merged(
    first: Mapping[str, Any],
    over: Mapping[str, Any],
) -> dict[str, Any]:
    """Both tables; where both have a key, the second's value."""
    merged = dict(first)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return merged


def text_of(given: Deployment, notes: Iterable[str] = ()) -> str:
    """A deployment as TOML, with notes as comments on top.

    Example:
        >>> print(text_of(Deployment(rounds=3)), end="")
        title = "deployment"
        rounds = 3
    """
    lines = [f"# {printable(note)}" for note in notes]
    for key, value in _stated(msgspec.to_builtins(given)).items():
        if value != {}:
            lines.append(f"{key} = {toml(value)}")
    return "\n".join(lines) + "\n"


def _stated(value: Any) -> Any:
    """Tables without the keys that are not stated: TOML has no null."""
    if not isinstance(value, Mapping):
        return value
    return {name: _stated(part) for name, part in value.items() if part is not None}


def line_of(text: str, key: str) -> int | None:
    r"""The line of a TOML text that sets a dotted key, or the nearest table above it; from 1.

    A table of an array has its place in it, from 0, as the last part of its name.

    Example:
        >>> line_of("noise = {epsilon = 8.0}", "noise.epsilon")
        1
        >>> line_of("[[audit]]\n[[audit]]\nexposed = 0", "audit.1.exposed")
        3
    """
    best: tuple[int, int | None] = (0, None)
    table = ""
    places = Counter[str]()
    parts = key.split(".")
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"[ \t]*\[(\[?)([\w. \t-]+)\]", line[:400])
        if header:
            name = "".join(header[2].split())
            if header[1]:
                places[name] += 1
                name += f".{places[name] - 1}"
            table = name + "."
        elif named := re.match(r"[ \t]*([\w.-]+)[ \t]*=", line[:400]):
            name = table + named[1]
        else:
            continue
        set_here = name.split(".")
        if set_here == parts[: len(set_here)] and len(set_here) > best[0]:
            best = (len(set_here), number)
    return best[1]


@dataclass(frozen=True)
class Library:
    """Another library's parameters: the fact that each states, and what all its trainings share.

    `facts` names "" where only `more`, which reads several parameters, uses one. What a library
    leaves to its user, such as the seed of a generator, is not stated.
    """

    facts: Mapping[str, str]
    always: Mapping[str, Any]
    more: Callable[[Mapping[str, Any]], Mapping[str, Any]]

    def read(self, name: str, table: Mapping[str, Any]) -> dict[str, Any]:
        """The facts of a table of parameters, as the tables of a deployment file."""
        check.known_keys(name, table, self.facts)
        for key, value in table.items():
            _check_parameter(f"{name}.{key}", key, value)
        stated = {self.facts[key]: value for key, value in table.items() if self.facts[key]}
        return placed({**self.always, **stated, **self.more(table)})


def _check_parameter(
    where: str,
    key: str,
    value: Any,
) -> None:
    if key == "mechanism":
        return
    shown = str(value)[:40]
    if key == "poisson_sampling":
        if not isinstance(value, bool):
            raise ValueError(f"{where} is {shown}; give true or false")
    elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGEST:
        raise ValueError(f"{where} is {shown}; give a number above 0")


def placed(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts by their keys as nested tables; None is not stated.

    Example:
        >>> placed({"rounds": 3, "clip.norm": 1.0, "clip.kind": None})
        {'rounds': 3, 'clip': {'norm': 1.0}}
    """
    table: dict[str, Any] = {}
    for key, value in facts.items():
        # a key that is present would be stated
        if value is None:
            continue
        *parts, name = key.split(".")
        place = table
        for part in parts:
            place = place.setdefault(part, {})
        place[name] = _without_numpy(value)
    return table


def _without_numpy(value: Any) -> Any:
    """Numbers of live objects may be NumPy's, which a table cannot hold."""
    if isinstance(value, list | tuple):
        return [_without_numpy(one) for one in value]
    return value.item() if isinstance(value, np.generic) else value


def described(
    facts: Mapping[str, Any],
    own: Sequence[Mistake] = (),
) -> Described:
    """A deployment from facts by their keys, and its mistakes; a reader's own come first."""
    try:
        given = msgspec.convert(placed(facts), Deployment)
    except msgspec.ValidationError as error:
        raise ValueError(str(error.__cause__ or error)) from None
    # a reader knows the file or the object, and names the place more exactly
    named = {one.name for one in own}
    return given, (*own, *(one for one in mistakes.find(given) if one.name not in named))


def _of_opacus(parameters: Mapping[str, Any]) -> dict[str, Any]:
    batch = parameters.get("batch_size")
    size = parameters.get("sample_size")
    samplers = {None: None, True: "poisson", False: "shuffled"}
    return {
        "local.rate": 1 / math.ceil(size / batch) if batch and size else None,  # 1 / len(loader)
        "local.sampler": samplers[parameters.get("poisson_sampling")],
    }


def _of_tf_privacy(parameters: Mapping[str, Any]) -> dict[str, Any]:
    batch = parameters.get("batch_size")
    if batch is not None and parameters.get("num_microbatches") == batch:
        return {}
    return {"clip.norm": None, "clip.kind": None}  # the clip is of a mean of examples


def _of_pfl(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The simulation shrinks the noise by cohort / noise cohort."""
    stated = parameters.get("noise_multiplier")
    cohort = parameters.get("cohort_size")
    simulated = parameters.get("noise_cohort_size")
    real = None
    if stated is not None and cohort and simulated:
        real = stated * min(1.0, cohort / simulated)
    law = None
    if (apart := parameters.get("min_separation")) is not None:
        if apart > 1:
            law = "server-picks"
        elif cohort and parameters.get("population"):
            law = "fixed-size"
    return {
        "noise.multiplier": real,
        "claim.amplified": "sampling_probability" in parameters,  # only its accountant's
        "claim.rounds": parameters.get("num_rounds"),
        "claim.because": "noise_scale simulates a larger cohort" if real != stated else None,
        "participation.law": law,
    }


_CLAIM = {"epsilon": "claim.epsilon", "delta": "claim.delta"}
_EXAMPLES = {
    "noise_multiplier": "noise.multiplier",
    "batch_size": "local.batch",
    "epochs": "local.epochs",
    **_CLAIM,
}
_OF_EXAMPLES = {
    "clip.kind": "example",
    "noise.at": "optimizer",
    "correlation": "none",
    "local.normalizer": "expected",
    "claim.amplified": True,
}
LIBRARIES = {
    "opacus": Library(
        {
            **_EXAMPLES,
            "max_grad_norm": "clip.norm",
            "sample_size": "local.examples",
            "poisson_sampling": "",
        },
        _OF_EXAMPLES,
        _of_opacus,
    ),
    # Keras shuffles, while the accountant is for Poisson sampling
    "tf_privacy": Library(
        {
            **_EXAMPLES,
            "l2_norm_clip": "clip.norm",
            "n": "local.examples",
            "num_microbatches": "",
        },
        {**_OF_EXAMPLES, "local.sampler": "shuffled"},
        _of_tf_privacy,
    ),
    "pfl": Library(
        {
            "noise_multiplier": "claim.multiplier",
            "clipping_bound": "clip.norm",
            "cohort_size": "participation.cohort",
            "noise_cohort_size": "",
            "population": "participation.population",
            "num_rounds": "rounds",
            "sampling_probability": "",
            "mechanism": "correlation",
            "min_separation": "participation.min_separation",
            **_CLAIM,
        },
        {
            "clip.kind": "l2",
            "noise.at": "server",
            "noise.on": "sum",
            "weights": "uniform",
            "claim.unit": "client",
        },
        _of_pfl,
    ),
}
