"""MLflow and Weights & Biases: what an audit or a gate found, as numbers, words and pages.

Only this package imports mlflow and wandb. Results stay on this machine unless you configured a
server. The libraries' own messages home are off, unless you turned them on or imported them before.
Pages are without examples; names, scores and paths in a plan remain.
"""

from __future__ import annotations

import glob
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from msgspec import to_builtins

from leakbound._util import files
from leakbound._util.text import printable
from leakbound.assess.record import DELTA, VERDICTS
from leakbound.bounds.conversions import epsilon
from leakbound.gate import reports
from leakbound.gate.policy import BROKEN, HOLDS, Requirement
from leakbound.report import check_installed as check_report
from leakbound.report import evidence, folder, page
from leakbound.report.evidence.parts import Subject
from leakbound.report.evidence.privacy import accountant_of
from leakbound.report.tables import Configuration

__all__ = ["check_installed", "to_mlflow", "to_wandb"]

Found = Path | str | Sequence[Requirement]
QUIET = {"mlflow": "MLFLOW_DISABLE_TELEMETRY=true", "wandb": "WANDB_ERROR_REPORTING=false"}
"""What turns off a library's own messages home."""
LONGEST = 180
"""Letters of a name before what is measured; MLflow takes 250 in all."""
FIXED = {"batch_size", "theorem"}
"""Numbers that are no result."""
_OTHER = re.compile(r"[^A-Za-z0-9.:-]+")


class LoggedContent(NamedTuple):
    """Numbers, words and settings by name, and pages for a folder that is called `key`."""

    key: str
    numbers: dict[str, float]
    words: dict[str, str]
    settings: dict[str, str]
    pages: dict[str, bytes]


def check_installed(name: str) -> None:
    """Raise `ValueError` unless "mlflow" or "wandb" can be imported; it names the extra."""
    # a library reads its settings when it is imported
    if name not in sys.modules:
        os.environ.setdefault(*QUIET[name].split("="))
    try:
        __import__(name)
    except ImportError as error:
        words = f"log needs {name} ({error}); pip install 'leakbound[{name}]'"
        raise ValueError(words) from None


def to_mlflow(found: Found) -> str:
    """Log to MLflow: numbers as metrics, words as tags, settings as params, pages as artifacts.

    The active run takes them, else a new one. They go where MLflow's settings say
    (MLFLOW_TRACKING_URI), by default into the working directory. Names and units are those of
    report.json (docs/reference/report.schema.json).

    Args:
        found: the folder of a run, or answers of a gate (`leakbound.gate.decide`).

    Returns:
        The id of MLflow's run.

    Raises:
        ValueError: `found` is no run, or MLflow is not installed or refuses.

    Example:
        >>> to_mlflow("no/run")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: no/run holds no run.json; give the folder of a run ...
    """
    content = _content(found)
    check_installed("mlflow")
    import mlflow

    with _explained("mlflow", "MLFLOW_TRACKING_URI"), TemporaryDirectory() as place:
        active = mlflow.active_run()
        # A run that the user began is not ended here.
        with nullcontext(active) if active else mlflow.start_run() as run:
            mlflow.log_params(content.settings)
            mlflow.log_metrics(content.numbers)
            mlflow.set_tags(content.words)
            _write(Path(place), content)
            mlflow.log_artifacts(place)
            return str(run.info.run_id)


def to_wandb(found: Found, *, mode: str | None = None) -> str:
    """Log to Weights & Biases: numbers and words into the summary, settings, and pages as files.

    As `to_mlflow`. A new run belongs to the project WANDB_PROJECT or "leakbound". Its `mode` is by
    default WANDB_MODE, else "offline": `wandb sync` sends it later.

    Example:
        >>> to_wandb("no/run")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: no/run holds no run.json; give the folder of a run ...
    """
    content = _content(found)
    check_installed("wandb")
    import wandb

    # offline: nothing leaves this machine unless the user asks for it
    mode = mode or os.environ.get("WANDB_MODE") or "offline"
    project = os.environ.get("WANDB_PROJECT") or "leakbound"
    with _explained("wandb", "WANDB_MODE and WANDB_DIR"):
        active = wandb.run
        # A run that the user began is not ended here.
        with nullcontext(active) if active else wandb.init(mode=mode, project=project) as run:
            # A run may already hold the settings of another result.
            run.config.update(content.settings, allow_val_change=True)
            run.log(content.numbers)
            run.summary.update(content.words)
            for path in _write(Path(run.dir), content):
                # `save` takes a pattern, and a path may hold its signs.
                run.save(
                    glob.escape(str(path)),
                    base_path=run.dir,
                    policy="now",
                )
            return str(run.id)


def _content(result: Found) -> LoggedContent:
    made = _of_run(Path(result)) if isinstance(result, Path | str) else _of_gate(result)
    words = {name: printable(text) for name, text in made.words.items()}
    settings = {name: printable(text) for name, text in made.settings.items()}
    return made._replace(words=words, settings=settings)


def _of_gate(requirements: Sequence[Requirement]) -> LoggedContent:
    """`holds` is 1 or 0, and missing where it cannot be decided."""
    key = "leakbound/check"
    taken = set[str]()
    numbers = dict[str, float]()
    words = {f"{key}/answer": reports.summary(requirements)}
    for one in requirements:
        name = _name(taken, key, one.subject, one.key)
        words[f"{name}/answer"] = f"{one.answer}: {one.stated}. Found: {one.found}"
        value, limit = one.numbers or (None, None)
        holds = {HOLDS: 1, BROKEN: 0}.get(one.answer)
        numbers |= _flat({"holds": holds, "value": value, "limit": limit}, name)
    pages = {f"check{ending}": make(requirements) for make, ending in reports.FORMS.values()}
    return LoggedContent(key, numbers, words, {}, pages)


def _of_run(place: Path) -> LoggedContent:
    """Numbers by the names of report.json; the rank of a verdict is 0 (the worst) to 9."""
    check_report()
    run = folder.read(place)
    taken = set[str]()
    subject = evidence.of_run(
        run,
        {},
        accountant_of(epsilon, DELTA),
        images=False,
    )
    sign_off = subject.sign_off
    made = subject.provenance
    key = _name(taken, "leakbound", subject.name)
    counts = Counter(row.verdict for row in subject.configurations)
    numbers = {_name(taken, f"{key}/verdicts", word): float(counts[word]) for word in VERDICTS}
    words = {f"{key}/answer": f"{sign_off.answer} {sign_off.advice}"}
    for row in subject.configurations:
        name = _name(taken, key, row.model, f"batch {row.batch_size}", row.defense)
        numbers |= _flat(_measured(row, subject), name)
        words[f"{name}/verdict"] = f"{row.verdict}; strongest attack: {row.strongest_attack}"
    settings = {"plan": made.plan_hash, "leakbound": made.versions.get("leakbound")}
    settings |= {name: getattr(sign_off, name) for name in ("tested", "attacker", "criterion")}
    named = {f"{key}/{name}": str(text) for name, text in settings.items()}
    card = evidence.card(evidence.document([subject], images=False))
    texts = {**dict(page.pages(run, images=False)), "model-card.md": card}
    pages = {name: text.encode() for name, text in texts.items()}
    return LoggedContent(key, numbers, words, named, pages)


def _measured(row: Configuration, subject: Subject) -> dict[str, Any]:
    """A configuration, the score of its best attack, and the epsilon of one release."""
    attacks = [a for a in subject.measured.attacks if (a.model, a.batch_size, a.defense) == row.key]
    scores = [attack.score for attack in attacks if attack.score is not None]
    score = max(scores, key=lambda one: one.median, default=None)
    known = {claim.claim: claim.epsilons for claim in subject.differential_privacy}
    more = {"score": score, "epsilon": known.get(row.defense)}
    rank = {"verdict_rank": VERDICTS.index(row.verdict)}
    measured: dict[str, Any] = to_builtins(row) | to_builtins(more) | rank
    return measured


def _flat(value: Any, above: str) -> dict[str, float]:
    """All numbers in a dictionary of dictionaries, by their path."""
    if isinstance(value, dict):
        parts = [_flat(v, f"{above}/{name}") for name, v in value.items() if name not in FIXED]
        return {name: number for part in parts for name, number in part.items()}
    # trackers plot numbers, and a flag is none
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return {above: float(value)} if number else {}


def _name(
    taken: set[str],
    above: str,
    *parts: str,
) -> str:
    """A new name below another. What trackers refuse becomes "_"; names that meet are numbered."""
    clean = [_OTHER.sub("_", part.replace("=", ":")).strip("._") or "_" for part in parts]
    # cut before it is numbered, so that two long names stay apart
    cut = "/".join([above, *clean])[:LONGEST].rstrip("/.")
    free = next(name for n in count(1) if (name := cut + f"_{n}" * (n > 1)) not in taken)
    taken.add(free)
    return free


def _write(place: Path, content: LoggedContent) -> list[Path]:
    """Write the pages into a folder of their own below a place; where they are."""
    below = files.folder(place, *content.key.split("/"))
    for name, text in content.pages.items():
        files.write(below / name, text)
    return [below / name for name in content.pages]


@contextmanager
def _explained(name: str, settings: str) -> Iterator[None]:
    """Whatever a library raises, as what to do about it."""
    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as error:
        raise ValueError(f"{name} did not take the results: {error}; check {settings}") from error


LOGGERS = {"mlflow": to_mlflow, "wandb": to_wandb}
"""The values of `--log`."""
