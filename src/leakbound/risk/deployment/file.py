"""Read and write deployment files, and translate the settings of other libraries into them."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from leakbound import check
from leakbound._util import files
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
    found = (with_line(text, one) for one in mistakes.find(given))
    return given, tuple(found)


def parse(table: Mapping[str, Any]) -> Deployment:
    """A deployment from the tables of its file.

    Example:
        >>> parse({"clip": {"norm": 1.0, "kind": "l2"}, "rounds": 3}).clip.l2
        1.0
    """
    whole = dict(table)
    for name, translate in LIBRARIES.items():
        own = whole.pop(name, {})
        if not isinstance(own, Mapping):
            raise ValueError(f"{name} is no table; give [{name}] with its parameters")
        if own:
            whole = _merged(translate(own), whole)
    try:
        return msgspec.convert(whole, Deployment)
    except msgspec.ValidationError as error:
        raise ValueError(in_words(str(error), Deployment)[1]) from None


def in_words(text: str, kind: Any, whole: str = "the file") -> tuple[str, str]:
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


def _merged(first: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Both tables; where both have a key, the second's value."""
    found = dict(first)
    for key, value in over.items():
        own = found.get(key)
        both = isinstance(own, Mapping) and isinstance(value, Mapping)
        found[key] = _merged(own, value) if both else value  # type: ignore[arg-type]
    return found


def text_of(given: Deployment, notes: Iterable[str] = ()) -> str:
    """A deployment as TOML, with notes as comments on top.

    Example:
        >>> print(text_of(Deployment(rounds=3)), end="")
        title = "deployment"
        rounds = 3
    """
    lines = [f"# {_plain(' '.join(note.split()))}" for note in notes]
    plain = msgspec.to_builtins(given)
    for key, value in plain.items():
        if isinstance(value, Mapping):
            own = {name: one for name, one in value.items() if one is not None}
            if own:
                inner = ", ".join(f"{name} = {_value(one)}" for name, one in own.items())
                lines.append(f"{key} = {{{inner}}}")
        elif value is not None:
            lines.append(f"{key} = {_value(value)}")
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        kept = ((name, one) for name, one in value.items() if one is not None)
        return "{" + ", ".join(f"{name} = {_value(one)}" for name, one in kept) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return json.dumps(_plain(value), ensure_ascii=False)
    return json.dumps(value) if isinstance(value, bool) else repr(value)


def _plain(text: str) -> str:
    """Without control characters, which TOML does not allow as they are."""
    return "".join(one if one.isprintable() else " " for one in text)


def with_line(text: str, mistake: Mistake) -> Mistake:
    """The mistake with the number of the line in which its key stands."""
    return msgspec.structs.replace(mistake, line=line_of(text, mistake.key))


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
        own = name.split(".")
        if own == parts[: len(own)] and len(own) > best[0]:
            best = (len(own), number)
    return best[1]


def _opacus(own: Mapping[str, Any]) -> dict[str, Any]:
    """Opacus' arguments: noise_multiplier, max_grad_norm, batch_size, sample_size, epochs, ...

    Without `poisson_sampling`, how batches are drawn is not stated.
    """
    _only("opacus", own, "noise_multiplier max_grad_norm batch_size sample_size epochs "
          "poisson_sampling epsilon delta")  # fmt: skip
    batch = own.get("batch_size")
    size = own.get("sample_size")
    poisson = own.get("poisson_sampling")
    rate = 1 / math.ceil(size / batch) if batch and size else None  # 1 / len(data_loader)
    sampler = {None: None, True: "poisson", False: "shuffled"}[poisson]
    found = _of_examples(own, norm="max_grad_norm", size="sample_size", sampler=sampler)
    found["local"] |= _given(rate=rate)
    return found


def _tf_privacy(own: Mapping[str, Any]) -> dict[str, Any]:
    """TF-privacy's arguments; Keras shuffles, while its accountant is for Poisson sampling.

    Unless `num_microbatches` is the batch size, one example's gradient is not clipped.
    """
    _only("tf_privacy", own, "noise_multiplier l2_norm_clip batch_size n epochs num_microbatches "
          "epsilon delta")  # fmt: skip
    found = _of_examples(own, norm="l2_norm_clip", size="n", sampler="shuffled")
    batch = own.get("batch_size")
    if batch is None or own.get("num_microbatches") != batch:  # the clip is of a mean of examples
        found["clip"] = {}
    return found


def _of_examples(
    own: Mapping[str, Any], *, norm: str, size: str, sampler: str | None
) -> dict[str, Any]:
    """DP-SGD. Whether the generator has a seed is not stated."""
    return {
        "clip": _given(norm=own.get(norm), kind="example"),
        "noise": _given(multiplier=own.get("noise_multiplier"), at="optimizer"),
        "correlation": "none",
        "local": _local(own, size, sampler),
        "claim": _given(epsilon=own.get("epsilon"), delta=own.get("delta"), amplified=True),
    }


def _local(own: Mapping[str, Any], size: str, sampler: str | None) -> dict[str, Any]:
    return _given(
        epochs=own.get("epochs"),
        batch=own.get("batch_size"),
        examples=own.get(size),
        normalizer="expected",
        sampler=sampler,
    )


def _pfl(own: Mapping[str, Any]) -> dict[str, Any]:
    """pfl-research's arguments: the simulation shrinks the noise by cohort / noise cohort.

    It draws cohorts of a fixed size, unless `min_separation` is above 1. Without that key, the law
    of participation is not stated. `sampling_probability` is its accountant's.
    """
    _only("pfl", own, "noise_multiplier clipping_bound cohort_size noise_cohort_size population "
          "num_rounds sampling_probability epsilon delta mechanism min_separation")  # fmt: skip
    multiplier = own.get("noise_multiplier")
    cohort = own.get("cohort_size")
    of = own.get("noise_cohort_size")
    population = own.get("population")
    real = None
    if multiplier is not None and cohort and of:
        real = multiplier * min(1.0, cohort / of)
    claim = _given(
        epsilon=own.get("epsilon"),
        delta=own.get("delta"),
        multiplier=multiplier,
        amplified="sampling_probability" in own,
        rounds=own.get("num_rounds"),
        unit="client",
        because="noise_scale simulates a larger cohort" if real != multiplier else None,
    )
    apart = own.get("min_separation")
    law = None
    if apart is not None:
        law = "server-picks" if apart > 1 else "fixed-size" if cohort and population else None
    return {
        "clip": _given(norm=own.get("clipping_bound"), kind="l2"),
        "noise": _given(multiplier=real, at="server", on="sum"),
        "weights": "uniform",
        **_given(correlation=own.get("mechanism")),
        "rounds": own.get("num_rounds"),
        "participation": _given(
            law=law, cohort=cohort, population=population, min_separation=apart
        ),
        "claim": claim,
    }


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _only(table: str, own: Mapping[str, Any], known: str) -> None:
    """Known keys with positive numbers, but for a mechanism's name and a flag."""
    check.known_keys(table, own, known.split())
    for key, value in own.items():
        if key == "mechanism":
            continue
        if key == "poisson_sampling":
            if not isinstance(value, bool):
                raise ValueError(f"{table}.{key} is {str(value)[:40]}; give true or false")
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGEST:
            raise ValueError(f"{table}.{key} is {str(value)[:40]}; give a number above 0")


LIBRARIES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "opacus": _opacus,
    "tf_privacy": _tf_privacy,
    "pfl": _pfl,
}
