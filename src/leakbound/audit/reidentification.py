"""After an audit: let a matcher of the user's own say whose the stored reconstructions are."""

from __future__ import annotations

import io
import tomllib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from leakbound._util import files
from leakbound.assess import record as records
from leakbound.assess.measure import GAP
from leakbound.assess.reidentification import CANDIDATES, Matcher, reidentify
from leakbound.audit.context import (
    PlanContext,
    acquaintances_of,
    one_thread,
    persons_of,
)
from leakbound.audit.experiment import criterion_of
from leakbound.audit.journal import Journal
from leakbound.audit.plan import Experiment
from leakbound.audit.plan_file import parse
from leakbound.core import Batch, NotApplicable
from leakbound.randomness import stream
from leakbound.report import folder as folders
from leakbound.report.rerun import toml_of

FILE = folders.REIDENTIFIED


def reidentify_run(
    folder: Path | str,
    matcher: str | Matcher,
    *,
    by_person: bool = False,
    candidates: int = CANDIDATES,
    name: str | None = None,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, records.Reidentification]:
    """What a matcher names in the reconstructions of an audit, by experiment.

    The run's pictures hold the reconstructions, in 256 levels. Candidates are private and test
    examples of the run's data that were in none of the experiment's batches.
    `reidentified.jsonl` keeps the results, and the report shows them.

    Args:
        folder: of an audit of images, with pictures.
        matcher: as in `leakbound.assess.reidentification.reidentify`.
        by_person: the true candidate is another image of the person, outside of the update.
        candidates: M, the true one included; fewer if the data leave fewer.
        name: of a function, in results and errors.
        watch: is called with how many experiments are done, of how many.

    Raises:
        ValueError: the run holds no pictures, its data are no longer the same or do not say who is
            who, or the matcher fails.

    Example:
        >>> import tempfile, leakbound as lb
        >>> out = tempfile.mkdtemp()
        >>> _ = lb.run_audit("mlp,hidden=[16]", "digits", attacks=["linear_inversion"], seeds=[0],
        ...     out=out)
        >>> [found.right for found in reidentify_run(out, "edges", candidates=20).values()]
        [(True,)]
    """
    folder = Path(folder)
    run = folders.read(folder)
    plan = parse(tomllib.loads(toml_of(run.info.plan)))
    context = PlanContext(plan.data)
    if context.dataset.fingerprint != run.info.data.fingerprint:
        raise ValueError(
            f"{plan.data.source!r} no longer holds the data of the run in {str(folder)!r}; give "
            "back the same data"
        )
    if by_person and context.dataset.people is None:
        raise ValueError(
            f"{plan.data.source!r} does not say who is who; audit it with --person, or leave by "
            "person out"
        )
    units = {unit.id: unit for unit in plan.experiments()}
    wanted = [a for a in run.assessments if a.experiment in units and _stored(a)]
    if not wanted:
        raise ValueError(
            f"the run in {str(folder)!r} stores no reconstructed images of one or three channels; "
            "audit images without --no-examples, or call assess.reidentification.reidentify"
        )
    journal = Journal(folder / FILE, records.Reidentified)
    before = {} if not (folder / FILE).exists() else folders.further_matches(folder)
    results = {}
    with files.claimed(folder), closing(journal), one_thread():
        journal.read()
        for number, record in enumerate(wanted):
            watch(number, len(wanted))
            unit = units[record.experiment]
            people = _people(unit, record, context, by_person=by_person)
            if people.others is None:
                continue
            try:
                match = reidentify(
                    people.truth,
                    _reconstructions(folder, record, context),
                    people.others,
                    criterion_of(unit, context),
                    matcher,
                    persons=people.persons,
                    other_persons=people.other_persons,
                    candidates=candidates,
                    noise_multiplier=record.reidentified[0].noise_multiplier,
                    name=name,
                    source=stream(record.seed, "gallery"),
                )
            except NotApplicable:  # nobody else is like them
                continue
            results[record.experiment] = match
            others_of = before.get(record.experiment, ())
            kept = tuple(one for one in others_of if one.how != match.how)
            journal.append(records.Reidentified(experiment=record.experiment, found=(*kept, match)))
        watch(len(wanted), len(wanted))
        journal.finish(a.experiment for a in run.assessments if a.experiment in journal.ends)
    return results


def _stored(record: records.Assessment) -> bool:
    drawn = record.data.domain == "images" and record.data.shape[0] in (1, 3)
    return drawn and "reconstruction" in record.pictures and bool(record.reidentified)


class _People(NamedTuple):
    """The true examples of an experiment, others that its attack never saw, and whose they are."""

    truth: Batch
    others: Batch | None
    persons: Tensor | None
    other_persons: Tensor | None = None


def _people(
    unit: Experiment,
    record: records.Assessment,
    context: PlanContext,
    *,
    by_person: bool,
) -> _People:
    drawn = unit.batch_size, record.clients, unit.seed
    batches = context.batches(*drawn)
    truth = Batch(
        torch.cat([one.inputs for one in batches]),
        torch.cat([one.labels for one in batches]),
    )
    persons = persons_of(context, *drawn)
    known = acquaintances_of(context, *drawn) if by_person else None
    if known is not None:
        return _People(truth, known[0], persons, known[1])
    return _People(truth, context.others(*drawn), persons)


def _reconstructions(
    folder: Path,
    record: records.Assessment,
    context: PlanContext,
) -> Tensor:
    """(N, C, H, W) the images of a strip, in the data's range."""
    from PIL import Image

    path = folder / "pictures" / record.pictures["reconstruction"]
    if not records.is_picture(path):
        raise ValueError(f"{path} is missing or damaged; run the audit again")
    levels = np.asarray(Image.open(io.BytesIO(files.read(path))))
    channels, height, width = context.input_shape
    pixels = torch.from_numpy(levels.copy()).reshape(height, -1, channels).permute(2, 0, 1)
    low, high = context.domain.input_range
    images = [one[..., :width] for one in torch.split(pixels, width + GAP, dim=2)]
    return low + (high - low) * torch.stack(images).float() / 255
