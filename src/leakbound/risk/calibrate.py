"""Find noise, clip norm, steps or sampling rate for an accepted risk, and build the defense."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leakbound._util import pictures
from leakbound._util.formats import format_lower, format_upper, format_upper_log, rounded
from leakbound.assess.record import Verdict
from leakbound.assess.sentences import unit_of
from leakbound.bounds import composition
from leakbound.bounds.attainable import Attainable
from leakbound.bounds.counting import PublicSample
from leakbound.bounds.record_priors import Baseline
from leakbound.report.template import Presented
from leakbound.risk.attackers import goal_of_intruder, refuse_model
from leakbound.risk.correlation import standardized
from leakbound.risk.corridor import (
    MOST_STEPS,
    Corridor,
    Participation,
    TrainingSetting,
    around,
    bound_law,
    corridor,
    epsilon,
    scope_notes,
    success_bound,
    uninformed_note,
    upper_bound,
)
from leakbound.risk.examples import Examples, person_sizes, width_of
from leakbound.risk.gain import GainCalibration, calibrate_gain, fixed_answer
from leakbound.risk.kappa import BaselineMatches, refuse_matched
from leakbound.risk.solve import (
    DIGITS,
    NEAR,
    Solve,
    SolvedSetting,
    check_solved,
    finished,
    solved_for,
)
from leakbound.risk.target import GainTarget, Target

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNIFORM = "direction uniform on a sphere"
LEAST = 1e-12
"""Smallest probability that a target may accept: no prior is known to a higher precision."""
KAPPA_ERROR = 1e-8
GAMMA_ERROR = 1e-9
"""Bounds on the relative errors of log kappa and gamma; the check moves both to the unsafe side."""


@dataclass(frozen=True, eq=False)
class Calibration(SolvedSetting, Presented):
    """A setting whose upper bound meets a target, and what it means.

    Attributes:
        target: the requested risk.
        corridor: attained success and upper bound at the target's eta, with prior and attacks.
        prior: the examples for which the upper bound holds.
        matches: what the prior-only baselines match in the data, if data were given.
        identification_noise: the multiplier that protects against identifying one of `examples`
            examples with the target's probability; None if no noise does.
        examples: number of examples used.
        source: the data source of the examples.
        left_out: names of examples that no amount of noise protects; the result excludes them.
        input_width: width of the input range.
        rare: how many public rows of a table no candidate matches together with another row, and
            names of some; None for other data.
        known: the parts of an example that the attacker knows, of which the target counts none.
    """

    target: Target
    corridor: Corridor
    prior: str
    matches: BaselineMatches | None = None
    identification_noise: float | None = None
    examples: int | None = None
    source: str | None = None
    left_out: tuple[str, ...] = ()
    input_width: float = 1.0
    rare: tuple[int, tuple[str, ...]] | None = None
    known: str | None = None

    @property
    def verdict(self) -> Verdict:
        """The verdict of `corridor` on this result; never "protected" for a uniform direction."""
        share = None if self.matches is None else self.matches.most
        return self.corridor.verdict(0, self.target.gamma, share)

    @property
    def less_noise(self) -> float | None:
        """The share of noise saved against calibrating for identification only; None if none."""
        if not self.identification_noise or not math.isfinite(self.identification_noise):
            return None
        return 1 - self.noise_multiplier / self.identification_noise

    @property
    def public(self) -> dict[str, Any] | None:
        """What the result rests on without a model: public examples, and how many are needed."""
        sample = self.corridor.prior
        if not isinstance(sample, PublicSample) or sample.basis == "examples":
            return None
        limit = math.exp(float(self.corridor.log_kappa[0]))
        # How much denser private examples may be before the bound exceeds the target.
        margin = max(self._most_kappa / limit, self.target.gamma / float(self.corridor.bound[0]))
        return {
            "examples": sample.n,
            "needed": sample.needed(self.target.gamma, parts=2),
            "largest_ball": sample.largest(self.target.eta),
            "confidence": sample.confidence,
            "density_margin": float(f"{margin:.4g}"),
        }

    @property
    def _most_kappa(self) -> float:
        """The prior-only success at which the upper bound equals the accepted probability."""
        # On logarithms: kappa spans hundreds of decades.
        low = math.log(1e-300)
        high = math.log(self.target.gamma)
        while high - low > 1e-6:
            middle = (low + high) / 2
            if float(success_bound(self.setting, middle)) <= self.target.gamma:
                low = middle
            else:
                high = middle
        return math.exp(low)

    def plain(self) -> dict[str, Any]:
        """All fields as JSON values; infinite ones are None."""
        edges = self.corridor
        blind = float(edges.log_kappa[0]) / math.log(10)

        def finite(value: float | None) -> float | None:
            return value if value is not None and math.isfinite(value) else None

        return {
            "target": {**asdict(self.target), "words": str(self.target)},
            "solved": self.solved,
            "setting": asdict(self.setting),
            "clip_norm": self.clip_norm,
            "noise_std": self.noise_std,
            "epsilon": finite(self.epsilon),
            "delta": self.delta,
            "prior": self.prior,
            "known": self.known,
            "verdict": self.verdict,
            "attained": float(edges.attained[0]),
            "bound": float(edges.bound[0]),
            "log10_blind": finite(blind),
            "matches": None if self.matches is None else asdict(self.matches),
            "identification_noise": finite(self.identification_noise),
            "examples": self.examples,
            "left_out": list(self.left_out),
            "rare_rows": None if self.rare is None else self.rare[0],
            "rare": [] if self.rare is None else list(self.rare[1]),
            "public": self.public,
            "attained_scope": asdict(edges.attained_scope),
            "bound_scope": asdict(edges.bound_scope),
        }

    def _figure(self) -> Figure:
        from leakbound.report import figures

        prior = self.corridor.prior
        correlated = self.target.ncc is not None
        places, eta, name = around(
            prior, self.target.eta, self.input_width, 41, correlated=correlated
        )
        edges = self.corridor.at(eta)
        return figures.corridor(places, edges.attained, edges.bound, self.target.gamma, name)

    def _repr_html_(self) -> str:
        """The target, the setting that meets it, and its meaning."""
        edges = self.corridor
        setting = self.setting
        saved = self.less_noise
        private = f"{self.epsilon:.3g}" if math.isfinite(self.epsilon) else "infinite"
        pairs: list[tuple[str, object]] = [
            ("noise multiplier", f"{setting.noise_multiplier:g}"),
            ("clip norm", f"{self.clip_norm:g}"),
            ("noise standard deviation", f"{self.noise_std:.5g} on the sum of clipped gradients"),
            ("steps", setting.steps),
            ("sampling rate", f"{setting.sampling_rate:g}"),
            ("unit", unit_of(setting.people)),
            ("who takes part", f"{setting.participation} to the attacker"),
            ("differential privacy", f"epsilon {private} at delta {self.delta:g}"),
            ("a prior-only baseline meets it with", format_upper_log(float(edges.log_kappa[0]))),
            ("attained", format_lower(float(edges.attained[0]))),
            ("no attacker exceeds", format_upper(float(edges.bound[0]))),
            ("prior of the examples", self.prior),
            ("verdict", self.verdict),
        ]
        marked = [
            (f"{k} (solved for)" if k.replace(" ", "_") == self.solved else k, v) for k, v in pairs
        ]
        if saved is not None:
            marked.append(
                ("less noise than against identification", f"{saved:.0%} (among {self.examples})")
            )
        return pictures.block(
            f"{self.target}", pictures.facts(marked), uninformed_note(edges), scope_notes(edges)
        )


def calibrate_setting(
    target: Target | str,
    setting: TrainingSetting,
    *,
    solve: Solve = "noise_multiplier",
    clip_norm: float = 1.0,
    noise_std: float | None = None,
    delta: float = 1e-5,
    input_range: float = 1.0,
    prior: Baseline | None,
    matches: BaselineMatches | None = None,
    examples: int | None = None,
    attacks: Attainable | None = None,
) -> Calibration:
    """Solve for the quantity that makes the upper bound of `corridor` meet the target.

    The result is rounded to the safe side, and checked with every function's error moved to the
    unsafe side.

    Args:
        target: the accepted risk, as text or as a `Target`. Of an NCC, `setting` and `prior` are
            those of standardized examples: N - 1 values of norm sqrt(N - 1).
        setting: the known quantities; its value of the solved quantity is ignored.
        solve: "noise_multiplier", "clip_norm", "steps" (the most, up to 2^30) or "sampling_rate".
        clip_norm: bound on the gradient norm per example, or
        noise_std: noise standard deviation on the sum, if the clip norm is solved for.
        delta: the delta at which epsilon is reported.
        input_range: width of the input range, for a target as text that names a PSNR.
        prior: of the examples, for the upper bound, such as `record_priors.from_images(public)`.
            None is a uniform direction, which knows nothing about the data. The result then does
            not hold for attackers who do, and its verdict is never "protected".
        matches: what the prior-only baselines match in the data; too much rejects the target.
        examples: number of examples for the comparison with identification.
        attacks: counted on data, for the attained success next to the upper bound.

    Raises:
        ValueError: nothing meets the target, with the reason, such as a baseline that meets it; or
            the target's probability is below 1e-12.

    Source: this project; the bounds: docs/errata.md, "the valid corridor".

    Example:
        >>> goal = "mse<=0.0006 with probability<=0.001"
        >>> result = calibrate_setting(goal, TrainingSetting(1.0, dim=784), prior=None)
        >>> round(result.noise_multiplier, 3), result.verdict
        (0.047, 'undecided')
    """
    if isinstance(target, str):
        target = Target.parse(target, input_range=input_range)
    if target.gamma < LEAST:
        raise ValueError(
            f"target is {target}; no statement about data has such a precision: accept a "
            f"probability of at least {LEAST:g}"
        )
    check_solved(solve, clip_norm=clip_norm, noise_std=noise_std, delta=delta)
    blind = _log_baseline(target, setting, prior, matches)
    # The bound's own error moves to the unsafe side, so the target is that much stricter.
    gamma = target.gamma / (1 + 2 * GAMMA_ERROR)

    def over(tried: TrainingSetting, rough: bool) -> float:
        bound = float(success_bound(tried, blind, rough=rough))
        # Its error moves to the unsafe side. Python's logarithm of 0 is an error.
        return math.log(max(bound, 1e-300)) + GAMMA_ERROR - math.log(gamma)

    def first(name: str, known: Mapping[str, Any]) -> float:
        law = composition.visible
        inverses: dict[str, Callable[..., Any]] = {
            "noise_multiplier": law.noise_for,
            "sampling_rate": law.rate_for,
            "steps": law.steps_for,
        }
        return float(inverses[name](gamma, log_kappa=blind, **known))

    solved = solved_for(solve, setting.of_person, over, first)
    if isinstance(prior, PublicSample):
        solved = _sharpened(prior, solve, solved, target.eta, gamma)
    solved, clip_norm = finished(solve, solved, setting, clip_norm=clip_norm, noise_std=noise_std)
    return Calibration(
        target=target,
        solved=solve,
        setting=solved,
        clip_norm=clip_norm,
        epsilon=epsilon(solved, delta),
        delta=delta,
        corridor=corridor(solved, target.eta, prior=prior, attacks=attacks),
        prior=_name(prior),
        matches=matches,
        identification_noise=_identification(solved, target, examples),
        examples=examples,
        input_width=input_range,
    )


def calibrate(
    target: Target | GainTarget | str,
    *,
    data: str | None = None,
    dim: int | None = None,
    norm: Sequence[float] | None = None,
    steps: int = 1,
    sampling_rate: float = 1.0,
    people: int | None = None,
    people_mean: float | None = None,
    participation: Participation = "visible",
    solve: Solve = "noise_multiplier",
    noise_multiplier: float | None = None,
    clip_norm: float = 1.0,
    noise_std: float | None = None,
    delta: float = 1e-5,
    prior: str | None = None,
    labels_known: bool = False,
    known: str | None = None,
    radius: float = 1.0,
    size: int | None = None,
    channels: int | None = None,
    schema: str | Path | None = None,
    person: str | None = None,
    exclude: Sequence[str] = (),
    input_range: tuple[float, float] = (0.0, 1.0),
) -> Calibration | GainCalibration:
    """The noise, clip norm, steps or sampling rate at which DP-SGD meets an accepted risk.

    Args:
        target: such as "psnr>=30 with probability<=0.001", or "ncc>=0.9 with ...", which ignores
            brightness and contrast (`norm` then changes nothing); for tables "columns>=0.9 with
            ...". Or
            "gain<=0.1": what the training adds to the success of anyone, whatever they know; it
            needs no data. Or "gain<=0.1 for diagnosis", one column of a table whose other columns
            are known; "the label" in place of a column.
        data: a data source (`leakbound list`) of examples of the same kind, or
        dim: number of values of one example, and
        norm: the smallest norm of an example, or the smallest and the largest, and prior="sphere".
        steps: number of training steps.
        sampling_rate: the probability that an example takes part in a step.
        people: the largest number of one person's examples in a training; by default counted in
            the data if they say who is who, otherwise 1. Private data may hold more.
        people_mean: the mean number of one person's examples in a training. The result is then for
            a random example instead of a random person's; `people` must be declared.
        participation: whether the attacker sees who takes part: "visible" or "hidden".
        solve: "noise_multiplier", "clip_norm", "steps" (the most) or "sampling_rate".
        noise_multiplier: noise standard deviation / clip norm, unless it is solved for.
        clip_norm: bound on the gradient norm per example.
        noise_std: noise on the sum of clipped gradients, if the clip norm is solved for.
        delta: the delta at which epsilon is reported.
        prior: "sample" (the default with data): no model, only what the data show as independent
            public examples. "these": the data are the private examples themselves, and the result
            holds on average over them. "mixture", "gaussian" and "gallery" are models fitted to
            the data; their result is at best called protected under a model. "sphere" needs no
            data and knows nothing about them; its result is never called protected.
        labels_known: whether the attacker knows the label, and so chooses candidates by class.
        known: parts that an intruder knows, as `domains.known_parts` reads them; the target then
            counts the unknown part.
        radius: for a column: of a ball that holds the gradients of its values / clip norm; 1 for
            any model.
        size: the size to which images are resized.
        channels: the number of channels to which images are converted.
        schema: the file of a table's schema; by default the one of its name that ends in .toml.
        person: what names the person in an image's path, as in `data.load`.
        exclude: names or numbers of examples of the data to leave out.
        input_range: lowest and highest value of an input.

    Returns:
        The result; `.defense()` returns it as DP-SGD, ready to use. A `GainCalibration` for a gain.

    Raises:
        ValueError: nothing meets the target, with the reason; or arguments do not fit together, or
            neither data nor a prior are given.

    Source: this project; docs/risk.md, and the bounds in docs/errata.md, "the valid corridor".

    Example:
        >>> target = "psnr>=32 with probability<=0.01"
        >>> found = calibrate(target, dim=784, norm=[9.0], prior="sphere")
        >>> round(found.noise_multiplier, 3), found.defense()
        (0.016, ClipExamples(clip_norm=1.0) → Mean() → GaussianMechanism(noise_multiplier=0.016436))
    """
    sought = solve in ("steps", "sampling_rate")
    if noise_multiplier is None and sought:
        raise ValueError(f"noise_multiplier is not given, and solve is {solve!r}, which needs it")
    if noise_multiplier is not None and not sought:
        raise ValueError(
            f"noise_multiplier is {noise_multiplier:g}, but solve is {solve!r}, which finds it; "
            "leave it out"
        )
    if noise_multiplier is not None and math.isinf(noise_multiplier):
        raise ValueError("noise_multiplier is inf; give a number, such as 1")
    given = TrainingSetting(
        1.0 if noise_multiplier is None else noise_multiplier,
        1 if dim is None else dim,
        steps=steps,
        sampling_rate=sampling_rate,
        participation=participation,
        people=people or 1,
    )
    whole = partial(
        Examples.of,
        data,
        size=size,
        channels=channels,
        schema=schema,
        person=person,
        exclude=exclude,
        input_range=input_range,
        person_sizes=person_sizes(people, people_mean),
    )
    gain = GainTarget.parse(target) if isinstance(target, str) else target
    if isinstance(gain, GainTarget):
        unused: dict[str, Any] = {"dim": dim, "norm": norm, "prior": prior, "known": known}
        unused |= {"labels_known": labels_known or None, "people_mean": people_mean}
        if gain.column is None:
            unused |= {"data": data, "radius": None if radius == 1 else radius}
        refuse_given(unused, gain)
        share = None
        if gain.column is not None and data is not None:
            examples = whole()
            given = replace(given, people=examples.people(people))
            share = fixed_answer(examples, gain.column)
        return calibrate_gain(
            gain,
            given,
            solve=solve,
            clip_norm=clip_norm,
            noise_std=noise_std,
            delta=delta,
            share=share,
            radius=radius,
        )
    assert not isinstance(target, GainTarget)  # it was returned
    refuse_given({"radius": None if radius == 1 else radius}, target)
    examples = whole(dim=dim, norm=norm)
    known = examples.known(known)
    width = width_of(input_range)
    basis: Baseline | None
    if known is None:
        if isinstance(target, str):
            target = Target.parse(target, input_range=width, domain=examples.domain)
        if target.ncc is None:
            examples = examples.without_constants(target)
        else:
            examples = standardized(examples)
        basis = examples.prior(prior, labels_known=labels_known)
    else:
        refuse_model(known, prior)
        target, examples, basis = goal_of_intruder(
            examples, known, target, labels_known=labels_known, input_width=width
        )
    setting = replace(
        given, dim=examples.dim, norm=examples.norms[0], people=examples.people(people)
    )
    result = calibrate_setting(
        target,
        setting,
        solve=solve,
        clip_norm=clip_norm,
        noise_std=noise_std,
        delta=delta,
        input_range=width,
        prior=basis,
        matches=examples.matches([target.eta])[0],
        examples=examples.count,
        attacks=examples.attacks(),
    )
    rare = None if known else examples.rare(basis, target.eta)
    return replace(
        result,
        source=examples.source,
        left_out=examples.left_out,
        rare=rare,
        known=known,
    )


def refuse_given(given: Mapping[str, Any], target: object) -> None:
    """Reject arguments that change nothing for this target: they would mislead."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name} is {value!r}, which changes nothing for {target}; leave it out"
            )


def _sharpened(
    prior: PublicSample,
    solve: Solve,
    solved: TrainingSetting,
    eta: float,
    gamma: float,
) -> TrainingSetting:
    """Go from the result by kappa's limit to that by the profile bound, if it needs less noise."""

    def holds(setting: TrainingSetting) -> bool:
        return bool(upper_bound(prior, setting, eta)[0][0] <= gamma)

    if solve in ("noise_multiplier", "clip_norm"):
        low = 0.0
        high = solved.noise_multiplier
        # Each evaluation counts neighbors anew, so the search stops at a relative tolerance.
        while high - low > NEAR * high:
            middle = (low + high) / 2
            tried = rounded(middle, DIGITS, up=True)
            # Rounded up, the middle may be `high` itself; then the lower end must rise.
            if tried < high and holds(replace(solved, noise_multiplier=tried)):
                high = tried
            else:
                low = middle
        return replace(solved, noise_multiplier=high)
    if solve == "steps":
        low = solved.steps
        high = solved.steps
        while high < MOST_STEPS and holds(replace(solved, steps=high)):
            low = high
            high = min(MOST_STEPS, 2 * high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(replace(solved, steps=middle)) else (low, middle)
        return replace(solved, steps=low)
    return solved


def _log_baseline(
    target: Target,
    setting: TrainingSetting,
    prior: Baseline | None,
    matches: BaselineMatches | None,
) -> float:
    """The logarithm of the prior-only success; rejects a target that the baseline meets."""
    if target.goal is None and target.eta * setting.dim >= setting.norm**2:
        raise ValueError(
            f"target is {target}, but the zero image alone has an error of norm^2 / N = "
            f"{setting.norm**2 / setting.dim:.6g} to an example of norm {setting.norm:g}: it "
            f"always reaches eta = {target.eta:.6g}, and no noise helps; ask for a smaller error"
        )
    squared = prior is None or prior.distance.squared
    if squared is not (target.goal is None):
        raise ValueError(
            f"target is {target}, but the thresholds of the prior ({_name(prior)}) are measured "
            "in another way; give a target and a prior for the same kind of data"
        )
    if matches is not None:
        refuse_matched(matches, target)
    if prior is not None and prior.dim != setting.dim:
        raise ValueError(f"prior has {prior.dim} values per example, but dim is {setting.dim}")
    log_kappa = float(upper_bound(prior, setting, target.eta)[1][0])
    # With its error moved to the unsafe side.
    blind = min(0.0, log_kappa + abs(log_kappa) * KAPPA_ERROR)
    if blind >= math.log(target.gamma) - 3 * GAMMA_ERROR:
        if isinstance(prior, PublicSample) and prior.basis != "examples":
            raise ValueError(_too_few(target, prior, math.exp(blind)))
        raise ValueError(
            f"target is {target}, but a guess that sees no update succeeds with probability "
            f"{math.exp(blind):.3g} under the prior ({_name(prior)}), and no finite noise brings "
            f"that lower: no noise helps; {target.harder} or accept a larger probability"
        )
    return blind


def _name(prior: Baseline | None) -> str:
    return UNIFORM if prior is None else prior.name


def _too_few(
    target: Target,
    sample: PublicSample,
    limit: float,
) -> str:
    """Why public examples show too little for a target, and how many would suffice."""
    held = sample.largest(target.eta)
    least = sample.needed(target.gamma, parts=2)
    if held == 1:
        more = f"give {least} examples or more"
    elif held / sample.n >= target.gamma:
        more = f"no number of examples like these is enough; {target.harder}"
    else:
        more = f"give more than {least} examples, or {target.harder}"
    model = (
        ', or take a model of the data (prior "mixture"), under which the answer is protected '
        "under a model alone"
    )
    return (
        f"target is {target}, but {sample.n} public examples, of which one guess may match {held}, "
        f"only show that a guess without the update succeeds with a probability below {limit:.3g} "
        f"({sample.confidence:.0%} confidence), and no noise brings any attacker lower: {more}, or "
        "accept a larger probability" + (model if target.goal is None else "")
    )


def _identification(
    setting: TrainingSetting,
    target: Target,
    examples: int | None,
) -> float | None:
    if examples is None or examples < 2 or 1 / examples >= target.gamma:
        return None
    person = setting.of_person
    noise = bound_law(person).noise_for(
        target.gamma,
        sampling_rate=person.sampling_rate,
        steps=person.steps,
        kappa=1 / examples,
    )
    return float(noise) * setting.people
