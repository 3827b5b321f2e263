"""What `leakbound bound` and `leakbound calibrate` do: the risk corridor on the command line."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from leakbound.audit.calibrate import UNIFORM, Calibration, calibrate, under
from leakbound.audit.corridor import MOST_STEPS, Corridor, Setting, epsilon
from leakbound.audit.corridor_verdict import UNINFORMED, verdict_of
from leakbound.audit.reach import reach
from leakbound.audit.target import Target
from leakbound.bounds import record_priors
from leakbound.bounds.law import positive, probability, whole
from leakbound.commands import check_files, write_files
from leakbound.terminal import console, errors, safe

if TYPE_CHECKING:
    from leakbound import options

FILES = ("bound.json", "corridor.png", "surface.png")
DEFAULT = "mixture"
"""The prior where data are given."""
SHOWN = 10
"""Names of examples in one line."""
AROUND = 5.0
"""Decibels that the plots show beside the thresholds."""
WIDEST = 1e100
COLUMNS = ("PSNR dB", "MSE", "blind", "attained", "no attacker exceeds", "alike", "verdict")


@dataclass(frozen=True, eq=False)
class Records:
    """What the command line knows of the records: from data, or from numbers given."""

    dim: int
    norms: tuple[float, float]
    images: NDArray[Any] | None = None
    source: str | None = None
    names: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def count(self) -> int | None:
        """How many records were looked at."""
        return None if self.images is None else len(self.images)


def bound(command: options.Bound) -> int:
    """Both edges of the risk for one setting, over some thresholds."""
    probability("accept", command.accept)
    probability("delta", command.delta)
    if command.out is not None:
        check_files(command.out, FILES)
    thresholds = thresholds_of(command)
    records = records_of(command)
    setting = setting_of(command, records, command.noise_multiplier)
    prior = prior_of(command.prior, records)
    with errors.status("bounding ..."):
        edges = under(prior, setting, [eta for _, eta in thresholds])
        private = _finite(epsilon(setting, command.delta))
        seen = records.images
        alike = [None if seen is None else reach(seen, eta).most for _, eta in thresholds]
    found = {
        "setting": asdict(setting),
        "delta": command.delta,
        "epsilon": private,
        "accepted": command.accept,
        "prior": UNIFORM if prior is None else prior.name,
        "thresholds": [
            {
                "psnr": psnr,
                "mse": eta,
                "log10_blind": _log10(edges.log_kappa[i]),
                "lower": float(edges.lower[i]),
                "upper": float(edges.upper[i]),
                "alike": alike[i],
                "verdict": verdict_of(edges, i, alike[i], command.accept),
            }
            for i, (psnr, eta) in enumerate(thresholds)
        ],
        "lower_scope": asdict(edges.lower_scope),
        "upper_scope": asdict(edges.upper_scope),
    }
    if command.json:
        print(json.dumps(found, indent=1, sort_keys=True, allow_nan=False))
    else:
        _show_bound(found, edges, records)
    if command.out is not None:
        names = _write(command.out, found, setting, command, prior)
        out = errors if command.json else console
        out.print(f"written: {', '.join(names)} into {safe(command.out)}")
    return 0


def calibration(command: options.Calibrate) -> int:
    """The setting that meets a target, what it means and what it costs."""
    target = Target.parse(command.target, input_range=_width(command.input_range))
    noise = command.noise_multiplier
    given, sought = noise is not None, command.solve in ("steps", "sampling_rate")
    if given and not sought:
        raise ValueError(
            f"noise_multiplier is {noise:g}, but --solve {command.solve} finds it; leave it out"
        )
    if sought and not given:
        raise ValueError(f"noise_multiplier is not given; --solve {command.solve} needs it")
    records = without_constants(records_of(command), target)
    prior = prior_of(command.prior, records)
    setting = setting_of(command, records, 1.0 if noise is None else noise)
    with errors.status("calibrating ..."):
        found = calibrate(
            target,
            setting,
            solve=command.solve,
            clip_norm=command.clip_norm,
            noise_std=command.noise_std,
            delta=command.delta,
            prior=prior,
            reach=None if records.images is None else reach(records.images, target.eta),
            records=records.count,
        )
    if command.json:
        told = {**found.plain(), "left_out": list(records.left_out)}
        print(json.dumps(told, indent=1, sort_keys=True, allow_nan=False))
    else:
        _show_calibration(found, records)
    return 0


def records_of(command: options.Bound | options.Calibrate) -> Records:
    """The examples that the options name: how many values each has, and their norms."""
    low, high = command.input_range
    _width(command.input_range)
    if command.data is None:
        if command.dim is None or command.norm is None:
            raise ValueError("dim and norm are not given; give both, or --data to take them from")
        if command.size is not None or command.channels is not None:
            raise ValueError("size and channels resize the images of --data, which is not given")
        if command.exclude:
            raise ValueError("exclude leaves examples of --data out, which is not given")
        return Records(command.dim, _possible(_range(command.norm), command.dim, (low, high)))
    from leakbound import data

    dataset = data.load(command.data, size=command.size, channels=command.channels)
    flat = dataset.inputs.flatten(1).double().numpy()
    names = dataset.files or tuple(map(str, range(len(flat))))
    keep = _kept(names, command.exclude)
    flat, names = flat[keep], tuple(np.array(names)[keep])
    least, most = flat.min(), flat.max()
    if least < low or most > high:
        raise ValueError(
            f"input_range is {low:g} to {high:g}, but the data run from {least:.6g} to {most:.6g}; "
            "give a range that contains them"
        )
    if command.dim is not None and command.dim != flat.shape[1]:
        raise ValueError(f"dim is {command.dim}, but the data have {flat.shape[1]} values a record")
    own = np.linalg.norm(flat, axis=1)
    norms = (float(own.min()), float(own.max()))
    if command.norm is not None:
        given = _range(command.norm)
        if norms[0] < given[0] or (len(command.norm) > 1 and norms[1] > given[1]):
            raise ValueError(
                f"norm is {given[0]:g} to {given[1]:g}, but the data's run from {norms[0]:.6g} to "
                f"{norms[1]:.6g}; give a range that contains them"
            )
        norms = given
    if norms[0] == 0:
        raise ValueError(
            f"data holds {int((own == 0).sum())} examples of {len(own)} that are all zeros, which "
            f"the zero image matches without any update: {_listed(names, own == 0)}; leave them "
            "out: --exclude"
        )
    return Records(flat.shape[1], norms, flat, command.data, names)


def _kept(names: Sequence[str], exclude: Sequence[str]) -> NDArray[Any]:
    """Which examples stay, of these names (or numbers from 0)."""
    keep = np.ones(len(names), dtype=bool)
    place = {name: i for i, name in enumerate(names)}
    for word in exclude:
        at = place.get(word, int(word) if word.isdecimal() else len(names))
        if at >= len(names):
            raise ValueError(
                f"exclude holds {word!r}, which names no example of the data; give numbers from 0 "
                f"to {len(names) - 1}, or names of image files"
            )
        keep[at] = False
    if not keep.any():
        raise ValueError(f"exclude leaves out all {len(names)} examples; leave some")
    return keep


def _listed(names: Sequence[str], which: NDArray[Any]) -> str:
    """The first few of some names."""
    found = [names[int(i)] for i in np.flatnonzero(which)]
    return ", ".join(found[:SHOWN]) + (", ..." if len(found) > SHOWN else "")


def without_constants(records: Records, target: Target) -> Records:
    """The examples but those that a constant image matches: no amount of noise protects these.

    Raises:
        ValueError: such are more than half of the examples, so the target itself is at fault.
    """
    if records.images is None:
        return records
    matched = records.images.var(1) <= target.eta
    if 2 * matched.sum() > len(matched):
        raise ValueError(
            f"target is {target}, but a constant image matches {int(matched.sum())} of "
            f"{len(matched)} examples within it, without any update: no amount of noise helps; ask "
            "for a smaller error"
        )
    images = records.images[~matched]
    norms = records.norms
    if matched.any() and norms[0] == np.linalg.norm(records.images, axis=1).min():
        norms = (float(np.linalg.norm(images, axis=1).min()), norms[1])
    names = tuple(np.array(records.names)[~matched])
    left = tuple(np.array(records.names)[matched])
    return replace(records, images=images, norms=norms, names=names, left_out=left)


def _possible(
    norms: tuple[float, float], dim: int, input_range: tuple[float, float]
) -> tuple[float, float]:
    """Norms that records of dim values in this range can have."""
    low, high = input_range
    widest = math.sqrt(float(whole("dim", dim))) * max(abs(low), abs(high))
    nearest = math.sqrt(dim) * max(0.0, low, -high)
    if norms[1] > widest * (1 + 1e-9) or norms[0] < nearest * (1 - 1e-9):
        raise ValueError(
            f"norm is {norms[0]:g} to {norms[1]:g}, but {dim} values from {low:g} to {high:g} have "
            f"one of {nearest:.6g} to {widest:.6g}; give --input-range as it is in your data"
        )
    return norms


def _range(norm: Sequence[float]) -> tuple[float, float]:
    if not 1 <= len(norm) <= 2 or list(norm) != sorted(norm):
        raise ValueError(f"norm is {list(norm)}; give the least norm, or the least and the most")
    positive("norm", list(norm))
    return float(norm[0]), float(norm[-1])


def _width(input_range: tuple[float, float]) -> float:
    low, high = input_range
    if not (abs(low) <= WIDEST and abs(high) <= WIDEST and high - low >= 1 / WIDEST):
        raise ValueError(
            f"input_range is {low:g} {high:g}; give the lowest and the highest value of an input"
        )
    return high - low


def setting_of(
    command: options.Bound | options.Calibrate, records: Records, noise: float
) -> Setting:
    """What the risk laws need, at a noise multiplier."""
    if math.isinf(noise):
        raise ValueError("noise_multiplier is inf; give a number, such as 1")
    return Setting(
        noise,
        dim=records.dim,
        norm=records.norms[0],
        steps=command.steps,
        sampling_rate=command.sampling_rate,
        participation=command.participation,
    )


def thresholds_of(command: options.Bound) -> list[tuple[float, float]]:
    """(PSNR, eta) of every threshold, rising in PSNR."""
    width = _width(command.input_range)
    pairs = [(psnr, Target.of_psnr(psnr, 0.5, input_range=width).eta) for psnr in command.psnr]
    for eta in command.eta:
        positive("eta", eta)
        psnr = 20 * math.log10(width) - 10 * math.log10(eta)
        if not abs(psnr) < 300:
            raise ValueError(f"eta is {eta:g}, {psnr:.0f} dB; give a mean squared error like 0.01")
        pairs.append((psnr, eta))
    if not pairs:
        raise ValueError("psnr and eta are empty; give at least one threshold")
    return sorted(set(pairs))


def prior_of(name: str | None, records: Records) -> record_priors.RecordPrior | None:
    """The prior that is named, "mixture" by default where data are given; None is the sphere."""
    if name == "sphere" or (name is None and records.images is None):
        return None
    if records.images is None:
        raise ValueError(f"prior is {name!r}, which is taken from examples; give --data")
    try:
        return record_priors.from_images(records.images, name or DEFAULT)
    except ValueError as error:
        raise ValueError(
            f"prior {name or DEFAULT!r} cannot be taken from the data: {error}; give more data, or "
            "--prior sphere, under which nothing is called protected"
        ) from None


def _show_bound(found: dict[str, Any], edges: Corridor, records: Records) -> None:
    console.print(_setting_line(edges.setting, found["epsilon"], found["delta"], records))
    table = Table(show_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in found["thresholds"]:
        table.add_row(
            f"{row['psnr']:.1f}",
            f"{row['mse']:.3g}",
            _tiny(row["log10_blind"]),
            f"{row['lower']:.3g}",
            f"{row['upper']:.3g}",
            "" if row["alike"] is None else f"{row['alike']:.2%}",
            row["verdict"],
        )
    console.print(table)
    both = "attained and exceeded" if found["prior"] == UNIFORM else "exceeded"
    console.print(
        f"accepted probability: {found['accepted']:g}; {both} on average over the prior: "
        f"{escape(found['prior'])}"
    )
    if found["prior"] != UNIFORM:
        console.print(f"attained on average over another: {UNIFORM}")
    if records.images is not None:
        console.print("alike: the share of the data that one blind guess reaches without an update")
    _show_prior(found["prior"])
    _show_scopes(edges)


def _show_calibration(found: Calibration, records: Records) -> None:
    answer = {**asdict(found.setting), "clip_norm": found.clip_norm}[found.solved]
    console.print(f"{escape(str(found.target))}: [bold]{found.solved} = {answer:.6g}[/bold]")
    edges, private = found.edges, _finite(found.epsilon)
    console.print(_setting_line(found.setting, private, found.delta, records))
    table = Table(show_edge=False, show_header=False)
    table.add_row("no attacker exceeds (upper edge)", f"{edges.upper[0]:.6g}")
    table.add_row("attained on a linear trap (lower edge)", f"{edges.lower[0]:.3g}")
    table.add_row("blind guess under the prior", _tiny(_log10(edges.log_kappa[0])))
    table.add_row("noise standard deviation on the sum", f"{found.noise_std:.6g}")
    table.add_row("clip norm", f"{found.clip_norm:.6g}")
    if (blind := found.reach) is not None:
        share = f"{max(blind.constant, blind.mean):.2%}"
        table.add_row("records that a constant or the mean reaches", share)
        table.add_row("records that one other record reaches", f"{blind.record:.2%}")
    if found.records is not None:
        table.add_row(f"noise against naming 1 of {found.records} records", _less(found))
    console.print(table)
    if found.solved == "steps" and found.setting.steps == MOST_STEPS:
        console.print("more steps were not tried")
    console.print(f"prior: {escape(found.prior)}")
    if records.left_out:
        one = len(records.left_out) == 1
        console.print(
            f"[bold]{len(records.left_out)} example{' is' if one else 's are'} left out[/bold]: a "
            f"constant image matches {'it' if one else 'each of them'} within the threshold, and "
            "no amount of noise protects such an example. The answer is for the other "
            f"{records.count}. Left out: "
            f"{safe(_listed(records.left_out, np.ones(len(records.left_out))))}"
        )
    if blind is not None and blind.record > found.target.gamma:
        console.print(
            "[bold]These records are alike[/bold]: whoever has one reaches others without any "
            "update. The answer holds for the prior named, not for such an attacker (--prior "
            "gallery)."
        )
    _show_prior(found.prior)
    console.print(f"what `leakbound bound` says about this answer: [bold]{found.verdict}[/bold]")
    _show_scopes(edges)


def _show_prior(prior: str) -> None:
    """Say that a prior which knows nothing about the data bounds no attacker who does."""
    if prior == UNIFORM:
        console.print(f"[bold]{UNINFORMED}[/bold]. Give --data and take --prior mixture.")


def _less(found: Calibration) -> str:
    noise, share = found.identification_noise, found.less_noise
    if noise is None or share is None:
        return "none reaches the target" if noise is None else f"{noise:.6g}"
    return f"{noise:.6g} (this answer: {abs(share):.1%} {'less' if share >= 0 else 'more'})"


def _show_scopes(edges: Corridor) -> None:
    for name, scope in (("upper", edges.upper_scope), ("lower", edges.lower_scope)):
        console.print(f"[dim]{name} edge {escape(str(scope))}[/dim]")


def _setting_line(setting: Setting, epsilon: float | None, delta: float, records: Records) -> str:
    known = "" if records.source is None else f" of {safe(records.source)}"
    private = "infinite" if epsilon is None else f"{epsilon:.4g}"
    return (
        f"noise multiplier {setting.noise_multiplier:.6g}, {setting.steps} "
        f"step{'' if setting.steps == 1 else 's'} at rate {setting.sampling_rate:g} "
        f"({setting.participation} participation), {setting.dim} values a record, least norm "
        f"{setting.norm:.4g}{known}: epsilon {private} at delta {delta:g}"
    )


def _write(
    folder: Path,
    found: dict[str, Any],
    setting: Setting,
    command: options.Bound,
    prior: record_priors.RecordPrior | None,
) -> list[str]:
    """The same numbers as JSON and two plots; returns their names."""
    content = json.dumps(found, indent=1, sort_keys=True, allow_nan=False).encode()
    files = dict(zip(FILES, (content, *_plots(found, setting, command, prior)), strict=False))
    write_files(folder, files)
    return list(files)


def _plots(
    found: dict[str, Any],
    setting: Setting,
    command: options.Bound,
    prior: record_priors.RecordPrior | None,
) -> list[bytes]:
    from leakbound.report.risk import corridor_png, surface_png

    shown = [row["psnr"] for row in found["thresholds"]]
    psnr = np.linspace(shown[0] - AROUND, shown[-1] + AROUND, 61)
    eta = _width(command.input_range) ** 2 / 10 ** (psnr / 10)
    edges = under(prior, setting, eta)
    label, accepted = "PSNR threshold (dB)", command.accept
    corridor = corridor_png(psnr.tolist(), edges.lower, edges.upper, accepted, label=label)
    if setting.noise_multiplier == 0:
        return [corridor]
    noises: list[float] = (setting.noise_multiplier * np.logspace(-1, 1, 25)).tolist()
    grid = [
        under(prior, replace(setting, noise_multiplier=noise), eta[::2])
        for noise in track(noises, "risk surface", console=errors, transient=True)
    ]
    upper, lower = (np.stack(e, 1) for e in zip(*((g.upper, g.lower) for g in grid), strict=True))
    surface = surface_png(noises, psnr[::2].tolist(), upper, lower, accepted, label=label)
    return [corridor, surface]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _log10(log: float) -> float | None:
    return _finite(float(log) / math.log(10))


def _tiny(log10: float | None) -> str:
    """A probability from its base-10 logarithm, however small."""
    if log10 is None:
        return "0"
    return f"{10**log10:.3g}" if log10 > -300 else f"1e{log10:.0f}"
