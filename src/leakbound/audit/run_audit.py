"""An audit from names in Python, as `leakbound audit` runs one from a plan."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from leakbound.attacks import Attack
from leakbound.audit.folder import AuditResult, Progress, audit
from leakbound.audit.plan import Plan, plain
from leakbound.audit.plan_file import load, parse, row_of
from leakbound.defenses import Defense
from leakbound.types import ThreatModel

Named = str | Mapping[str, Any]
"""A name with settings ("mlp,hidden=[64]"), or a table as in plans."""


def run_audit(
    model: Named | Sequence[Named] | Plan | Path,
    data: Named = "mnist5k",
    *,
    attacks: Sequence[Named | Attack] = ("linear_inversion", "inverting_gradients"),
    defenses: Sequence[Named | Defense] = ("none",),
    batch_sizes: Sequence[int] = (1,),
    seeds: Sequence[int] = (0, 1, 2),
    psnr: float = 20.0,
    threat: ThreatModel | None = None,
    error_bound: str = "trace",
    probability: float = 0.001,
    rounds: int = 0,
    out: Path | str | None = None,
    workers: int = 1,
    pictures: bool = True,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> AuditResult:
    """Run every attack on every batch under every defense, and judge each configuration.

    All is given by name, so that the run can be repeated: your own model is
    "package.module:build", your own data a folder or a file (`leakbound list`). For what is in
    memory take `simulate`.

    Args:
        model: one or several models; or a whole plan, or the path of one, in place of all else.
        data: a data source, or a table as in plans.
        attacks: by name with settings, or attacks that a name and settings describe.
        defenses: as attacks; "none" is no defense.
        batch_sizes: examples a client.
        seeds: one repetition each, with its own weights, batch and noise.
        psnr: in dB, from which an example counts as reconstructed.
        threat: what the attacker knows; by default labels and defense.
        error_bound: "trace", "full", "weiss_weinstein" or "none".
        probability: the accepted probability of a reconstruction; 0 asks for no such bound.
        rounds: of a short training under each defense, which shows what it costs; 0 is none.
        out: the run's folder, which a second call continues; None takes a temporary one, which
            lives as long as the result.
        workers: processes; the records are the same for any number.
        pictures: whether pictures of the data are kept.
        watch: called as the audit continues.

    Raises:
        ValueError: what does not fit, by name; a folder of another plan or with files of yours.

    Example:
        >>> found = run_audit("mlp,hidden=[16]", "digits", attacks=["linear_inversion"],
        ...     defenses=["none", "gaussian_noise,noise_std=1.0"], seeds=[0])
        >>> found.verdict, [one.verdict for one in found.assessments][0]
        ('exposed', 'exposed')
    """
    if isinstance(model, Plan):
        plan = model
    elif isinstance(model, Path):
        plan = load(model)
    else:
        models = [model] if isinstance(model, str | Mapping) else list(model)
        source = {"source": data} if isinstance(data, str) else dict(data)
        table: dict[str, Any] = {
            "name": "audit",
            "data": source,
            "models": [row_of("model", one) for one in models],
            "attacks": [row_of("attack", one) for one in attacks],
            "defenses": [row_of("defense", one) for one in defenses],
            "batch_sizes": list(batch_sizes),
            "seeds": list(seeds),
            "criterion": {"psnr": psnr},
            "threat": plain(threat or ThreatModel()),
            "error_bound": {"kind": error_bound},
            "risk": {"probability": probability},
        }
        if rounds:
            table["utility"] = {"rounds": rounds, "repeats": len(seeds)}
        plan = parse(table)
    if out is not None:
        return audit(plan, Path(out), workers=workers, pictures=pictures, watch=watch)
    place = Path(tempfile.mkdtemp(prefix="leakbound-"))
    try:
        found = audit(plan, place / "run", workers=workers, pictures=pictures, watch=watch)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    weakref.finalize(found, shutil.rmtree, place, ignore_errors=True)
    return found
