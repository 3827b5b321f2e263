"""Read and write deployment files, and translate the settings of other libraries into them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from leakbound import check
from leakbound._util import files
from leakbound.risk.deployment import mistakes
from leakbound.risk.deployment.facts import Deployment, Mistake

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
    text = path.read_text(encoding="utf-8-sig")
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
        if isinstance(own := whole.pop(name, None), Mapping):
            whole = _merged(translate(own), whole)
    try:
        return msgspec.convert(whole, Deployment)
    except msgspec.ValidationError as error:
        raise ValueError(_words(str(error))) from None


def _words(text: str) -> str:
    """An error of msgspec as ours: the key, what is wrong, and the nearest known key."""
    where = PATH.search(text)
    key = "the file" if where is None or not where[1] else where[1]
    unknown = re.search(r"unknown field `(\w+)`", text)
    if unknown is None:
        return f"{key}: {text.partition(' - at')[0]}"
    kind: Any = Deployment
    for part in key.split(".") if key != "the file" else ():
        kind = next(f.type for f in msgspec.structs.fields(kind) if f.name == part)
        if not isinstance(kind, type):  # such as Adaptive | None
            kind = next(one for one in kind.__args__ if one is not type(None))
    known = [field.name for field in msgspec.structs.fields(kind)]
    return f"{key} has no key {unknown[1]!r}; {check.closest(unknown[1], known)}"


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
    lines = [f"# {' '.join(note.split())}" for note in notes]
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
    return json.dumps(value) if isinstance(value, str | bool) else repr(value)


def with_line(text: str, mistake: Mistake) -> Mistake:
    """The mistake with the number of the line in which its key stands."""
    return msgspec.structs.replace(mistake, line=line_of(text, mistake.key))


def line_of(text: str, key: str) -> int | None:
    """The line of a TOML text that sets a dotted key, or the nearest table above it; from 1.

    Example:
        >>> line_of("noise = {epsilon = 8.0}", "noise.epsilon")
        1
    """
    best: tuple[int, int | None] = (0, None)
    table = ""
    parts = key.split(".")
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[\s*([\w.\s-]+?)\s*\]", line)
        if header:
            table = header[1].replace(" ", "") + "."
            name = table[:-1]
        elif named := re.match(r"\s*([\w.-]+)\s*=", line):
            name = table + named[1]
        else:
            continue
        own = name.split(".")
        if own == parts[: len(own)] and len(own) > best[0]:
            best = (len(own), number)
    return best[1]


def _opacus(own: Mapping[str, Any]) -> dict[str, Any]:
    """Opacus' arguments: noise_multiplier, max_grad_norm, batch_size, sample_size, epochs, ..."""
    _only("opacus", own, "noise_multiplier max_grad_norm batch_size sample_size epochs "
          "poisson_sampling epsilon delta")  # fmt: skip
    return {
        "clip": _given(norm=own.get("max_grad_norm"), kind="example"),
        "noise": _given(multiplier=own.get("noise_multiplier"), at="optimizer", seeded=False),
        "correlation": "none",
        "local": _given(
            epochs=own.get("epochs"),
            batch=own.get("batch_size"),
            examples=own.get("sample_size"),
            normalizer="expected",
            sampler="poisson" if own.get("poisson_sampling", True) else "shuffled",
        ),
        "claim": _given(epsilon=own.get("epsilon"), delta=own.get("delta"), amplified=True),
    }


def _tf_privacy(own: Mapping[str, Any]) -> dict[str, Any]:
    """TF-privacy's arguments; Keras shuffles, while its accountant is for Poisson sampling."""
    _only("tf_privacy", own, "noise_multiplier l2_norm_clip batch_size n epochs num_microbatches "
          "epsilon delta")  # fmt: skip
    return {
        "clip": _given(norm=own.get("l2_norm_clip"), kind="example"),
        "noise": _given(multiplier=own.get("noise_multiplier"), at="optimizer", seeded=False),
        "correlation": "none",
        "local": _given(
            epochs=own.get("epochs"),
            batch=own.get("batch_size"),
            examples=own.get("n"),
            normalizer="expected",
            sampler="shuffled",
        ),
        "claim": _given(epsilon=own.get("epsilon"), delta=own.get("delta"), amplified=True),
    }


def _pfl(own: Mapping[str, Any]) -> dict[str, Any]:
    """pfl-research's arguments: the simulation shrinks the noise by cohort / noise cohort."""
    _only("pfl", own, "noise_multiplier clipping_bound cohort_size noise_cohort_size population "
          "num_rounds sampling_probability epsilon delta mechanism min_separation")  # fmt: skip
    multiplier, cohort = own.get("noise_multiplier"), own.get("cohort_size")
    of, scale = own.get("noise_cohort_size"), None
    if cohort is not None and of is not None:
        scale = min(1.0, cohort / of)
    claim = _given(
        epsilon=own.get("epsilon"),
        delta=own.get("delta"),
        multiplier=multiplier,
        amplified=own.get("sampling_probability") is not None,
        rounds=own.get("num_rounds"),
    )
    if scale is not None and scale < 1:
        claim["because"] = "noise_scale simulates a larger cohort"
    return {
        "clip": _given(norm=own.get("clipping_bound"), kind="l2"),
        "noise": _given(
            multiplier=None if multiplier is None or scale is None else multiplier * scale,
            at="server",
            on="sum",
            seeded=False,
        ),
        "weights": "uniform",
        "correlation": own.get("mechanism", "none"),
        "rounds": own.get("num_rounds"),
        "participation": _given(
            law="poisson" if "sampling_probability" in own else None,
            rate=own.get("sampling_probability"),
            cohort=cohort,
            population=own.get("population"),
            min_separation=own.get("min_separation"),
            hidden=True,
        ),
        "claim": claim,
    }


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _only(table: str, own: Mapping[str, Any], known: str) -> None:
    for key, value in own.items():
        if key not in known.split():
            raise ValueError(f"{table} has no key {key!r}; {check.closest(key, known.split())}")
        number = isinstance(value, int | float) and math.isfinite(value)
        if not number and not isinstance(value, str):
            raise ValueError(f"{table}.{key} is {value!r}; give a number")


LIBRARIES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "opacus": _opacus,
    "tf_privacy": _tf_privacy,
    "pfl": _pfl,
}
