"""The options of every command: one dataclass each, from which the command line is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from tyro.conf import Positional, arg

Whole = Annotated[int | None, arg(metavar="INT", help_behavior_hint="")]
Number = Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")]
Text = Annotated[str | None, arg(metavar="STR", help_behavior_hint="")]
Norm = Annotated[tuple[float, ...] | None, arg(metavar="LEAST [MOST]", help_behavior_hint="")]
Priors = Literal["sample", "these", "sphere", "gaussian", "mixture", "gallery"] | None
Prior = Annotated[Priors, arg(metavar="PRIOR", help_behavior_hint="")]
"""Options that may be left out, whose default their help tells."""


@dataclass(frozen=True)
class Audit:
    """Attack real batches under defenses and write a report.

    Without a plan the built-in one runs on MNIST. Run the same command again to go on after a stop.
    """

    RESUMES: ClassVar = True

    plan: Annotated[Positional[Path | None], arg(metavar="[PLAN]", help_behavior_hint="")] = None
    """A plan in TOML (see docs); it may name Python code to import."""
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """Output folder; runs/demo or runs/quick for the built-in plans, required for your own."""
    quick: bool = False
    """Run the small built-in plan instead (under a minute)."""
    workers: int = 0
    """Processes; 0 takes one a core. The records are the same for any number."""
    engine: Literal["local", "ray"] = "local"
    """Run the experiments in processes here, or on a Ray cluster. The records are the same."""
    address: Text = None
    """Of a Ray cluster that runs: "auto" or HOST:PORT; without it Ray is started here."""
    device: str = "cpu"
    """Where models and batches live: "cpu", or "cuda" for a GPU."""
    no_images: bool = False
    """Keep no picture of the data, neither in files nor in the report."""


@dataclass(frozen=True)
class AttackOptions:
    """Run one experiment: one attack on one batch under one defense. Or attack a captured --update.

    Settings follow a name after commas, as in --defense gaussian_noise,noise_std=0.01
    """

    attack: Annotated[tuple[str, ...], arg(help_behavior_hint="")] = ()
    """Which attack (see `leakbound list`); inverting_gradients by default. Of an --update several
    may be named; by default those that fit, cheap to strong."""
    model: str = "mlp"
    """Which model, or package.module:build."""
    data: str = "mnist5k"
    """Which data source."""
    defense: str = "none"
    """Which defense."""
    batch_size: Whole = None
    """Examples a client, 1 by default; of an --update inferred where it shows them."""
    seed: int = 0
    """Names the weights, the batch and the noise."""
    labels_unknown: bool = False
    """The attacker does not know the labels."""
    defense_unknown: bool = False
    """The attacker does not know the defense (a weaker attacker than the default)."""
    malicious_server: bool = False
    """The server may change the model that it sends, as some attacks need."""
    statistics_known: bool = False
    """The attacker knows the batch's statistics in every batch norm."""
    error_bound: Literal["none", "trace", "full", "weiss_weinstein"] = "trace"
    """Lower bound on the mean error: "trace" estimates it, "full" too (tighter, slower, draws a
    leak map); "weiss_weinstein" proves it, also for non-smooth activations (ReLU, max pools)."""
    lpips_weights: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Measure LPIPS too, with the weights of this .safetensors file (see docs/how_to/lpips.md)."""
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """Write the true and the reconstructed images here as PNG; of an --update records and a
    report."""
    json: bool = False
    """Print the record as JSON."""
    update: Annotated[Path | None, arg(metavar="FILE|DIR", help_behavior_hint="")] = None
    """A captured update (.safetensors, .npz), or a folder that `leakbound capture` wrote."""
    before: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """The weights that the client was sent; found beside a file of `leakbound capture`."""
    kind: Literal["auto", "gradient", "delta", "weights"] = "auto"
    """What the update holds: a gradient, after - before, or the weights after."""
    input_shape: str = ""
    """Shape of one input, such as 1,28,28; with --update, where the file does not say it."""
    input_range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest value of an input, as the model is fed (with --update)."""
    classes: Whole = None
    """Classes of the model; its outputs by default (with --update)."""
    labels: str = ""
    """Labels of the update's examples, such as 3,5, or a file that holds `labels`."""
    local_steps: Whole = None
    """Local steps behind the update; searched for where the rate is known."""
    steps_search: Number = None
    """Seconds that the search for one update's local steps may take (30); 0 skips it."""
    learning_rate: Number = None
    """Of the client's SGD; without it the update's direction counts alone."""
    local_batch_size: Whole = None
    """Examples a local step; all of them by default."""
    truth: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """The true batch (`inputs`, `labels`), to measure what was reconstructed; no attack sees it."""
    public: Text = None
    """Public examples of the same kind, a data source: for attacks, and for bounds."""
    round: Whole = None
    """Of a folder of updates only this round."""
    no_images: bool = False
    """Keep no picture of what was reconstructed from the --update."""
    time: Number = None
    """Seconds for all attacks, cheapest first; a search that is cut keeps its best candidate."""


@dataclass(frozen=True)
class CaptureOptions:
    """Run a Flower app in this process and keep what its server sees of some rounds.

    This runs the app's code. What is kept can be attacked: leakbound attack --update DIR
    """

    app: Annotated[Positional[Path], arg(metavar="APP_DIR")]
    """Folder of the app, with pyproject.toml and [tool.flwr.app]."""
    out: Annotated[Path, arg(metavar="DIR")]
    """Folder for the captured updates."""
    rounds: tuple[int, ...] = (1,)
    """Which rounds, from 1."""
    clients: int = 4
    """How many clients there are."""
    run_config: str = ""
    """Values over those of [tool.flwr.app.config], such as "learning-rate=0.1 epochs=1"."""


@dataclass(frozen=True)
class Train:
    """Train under each defense of a plan and show what the defenses cost.

    Only the plan's [utility] is run. Run the same command again to go on after a stop.
    """

    RESUMES: ClassVar = True

    plan: Positional[Path]
    """A plan in TOML with a [utility] table; it may name Python code to import."""
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """Output folder; runs/NAME-training if not given. A later audit of the plan can go on in it."""
    engine: Literal["local", "flower"] = "local"
    """Train in processes here, or through messages in Flower's simulation. The numbers are the
    same."""
    workers: int = 0
    """Processes; 0 takes one a core."""
    json: bool = False
    """Print the table as JSON."""


@dataclass(frozen=True)
class Report:
    """Write report.html again from a run's records."""

    folder: Positional[Path]
    """The run's output folder."""
    no_images: bool = False
    """Leave all pictures out."""


@dataclass(frozen=True)
class Compare:
    """Compare two runs: which verdicts changed, and which differences can be seen.

    Example: leakbound compare runs/before runs/after
    """

    first: Annotated[Positional[Path], arg(metavar="RUN_A")]
    """Output folder of the first run."""
    second: Annotated[Positional[Path], arg(metavar="RUN_B")]
    """Output folder of the second run."""
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Where the page goes, a name that ends in .html; RUN_B/compare.html by default. It holds no
    pictures."""


@dataclass(frozen=True)
class Evidence:
    """Evidence for people who must sign: measured, bounded and declared risk, kept apart.

    Example: leakbound evidence runs/demo --declare accepted_by="A. Reader, 1 March"
    """

    runs: Annotated[Positional[tuple[Path, ...]], arg(help_behavior_hint="")] = ()
    """Output folders of runs."""
    training: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE", help_behavior_hint="")] = ()
    """A training configuration to bound, as in noise_multiplier=1.1 data=mnist5k"""
    declare: Annotated[tuple[str, ...], arg(metavar="NAME=TEXT", help_behavior_hint="")] = ()
    """What you state and nothing here can check (names: docs/evidence.md)."""
    out: Annotated[Path | None, arg(metavar="FILE|DIR", help_behavior_hint="")] = None
    """Where the page goes, with report.json and the plan beside it; the run's folder by default."""
    delta: float = 1e-5
    """At which the epsilon of one release is stated."""
    no_images: bool = False
    """Leave all pictures of the data out."""


@dataclass(frozen=True)
class List:
    """Every attack, defense, metric, model and data source, with its settings."""

    json: bool = False
    """Print JSON instead of tables."""


@dataclass(frozen=True)
class BoundOptions:
    """How likely is a reconstruction with this noise: what is attained, and what none exceeds.

    The lower edge is attained by the best attack on a linear trap, the upper one exceeded by none.
    """

    noise_multiplier: float
    """Noise standard deviation / clip norm."""
    data: Text = None
    """Take the number of values and the norms from this data source."""
    dim: Whole = None
    """Values of one example; needed without --data."""
    norm: Norm = None
    """Norm of the examples, the least first; needed without --data."""
    steps: int = 1
    """Steps of the training."""
    sampling_rate: float = 1.0
    """Chance that a step holds a given example."""
    participation: Literal["visible", "hidden"] = "visible"
    """Whether the attacker sees which steps hold the example (a server that picks clients does)."""
    psnr: tuple[float, ...] = (10.0, 15.0, 20.0, 25.0, 30.0)
    """Thresholds in dB."""
    eta: Annotated[tuple[float, ...], arg(help_behavior_hint="")] = ()
    """More thresholds, as mean squared errors."""
    accept: float = 0.001
    """The probability that you accept."""
    prior: Prior = None
    """What the upper bound rests on: "sample" (default with --data), no model, only what --data
    shows as public examples; "these", --data are the private examples themselves; "mixture",
    "gaussian" or "gallery", models fitted to --data (protected under a model); "sphere" (default
    without), which protects nothing."""
    labels_known: bool = False
    """The attacker knows the label and guesses by class."""
    input_range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest value of an input."""
    delta: float = 1e-5
    """At which epsilon is shown."""
    size: Whole = None
    """Resize the data's images."""
    channels: Whole = None
    """1 for gray, 3 for color."""
    exclude: Annotated[tuple[str, ...], arg(metavar="EXAMPLE", help_behavior_hint="")] = ()
    """Leave these examples of --data out: numbers from 0, or names of image files."""
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """Write bound.json and plots here."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Calibrate:
    """Which noise (clip norm, steps, sampling rate) makes a risk acceptable?

    Example: leakbound calibrate --target "psnr>=30 with probability<=0.01" --data mnist5k
    """

    target: str
    """The accepted risk, as in "psnr>=20 with probability<=0.001" (or "mse<=0.01 with ...")."""
    data: Text = None
    """Take the number of values and the norms from this data source."""
    dim: Whole = None
    """Values of one example; needed without --data."""
    norm: Norm = None
    """Norm of the examples, the least first; needed without --data."""
    steps: int = 1
    """Steps of the training."""
    sampling_rate: float = 1.0
    """Chance that a step holds a given example."""
    participation: Literal["visible", "hidden"] = "visible"
    """Whether the attacker sees which steps hold the example (a server that picks clients does)."""
    solve: Literal["noise_multiplier", "clip_norm", "steps", "sampling_rate"] = "noise_multiplier"
    """What to solve for."""
    noise_multiplier: Number = None
    """Noise standard deviation / clip norm, where steps or sampling_rate are solved for."""
    noise_std: Number = None
    """Noise standard deviation on the sum, where the clip norm is solved for."""
    clip_norm: float = 1.0
    """Bound on the norm of an example's gradient."""
    model: Text = None
    """Also ask which noise is enough if the server is honest and sends this model with random
    weights: a built-in one, or package.module:build. For one full-batch step."""
    prior: Prior = None
    """What the upper bound rests on: "sample" (default with --data), no model, only what --data
    shows as public examples; "these", --data are the private examples themselves; "mixture",
    "gaussian" or "gallery", models fitted to --data (protected under a model); "sphere" (default
    without), which protects nothing."""
    labels_known: bool = False
    """The attacker knows the label and guesses by class."""
    input_range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest value of an input."""
    delta: float = 1e-5
    """At which epsilon is shown."""
    size: Whole = None
    """Resize the data's images."""
    channels: Whole = None
    """1 for gray, 3 for color."""
    exclude: Annotated[tuple[str, ...], arg(metavar="EXAMPLE", help_behavior_hint="")] = ()
    """Leave these examples of --data out: numbers from 0, or names of image files."""
    json: bool = False
    """Print JSON."""


VERBS: dict[str, tuple[type, str]] = {
    "audit": (Audit, "leakbound.cli.audit:audit"),
    "attack": (AttackOptions, "leakbound.cli.attack:attack"),
    "capture": (CaptureOptions, "leakbound.cli.captured:capture"),
    "bound": (BoundOptions, "leakbound.cli.risk:bound"),
    "calibrate": (Calibrate, "leakbound.cli.risk:calibration"),
    "train": (Train, "leakbound.cli.audit:train"),
    "report": (Report, "leakbound.cli.report:report"),
    "compare": (Compare, "leakbound.cli.compare:compare"),
    "evidence": (Evidence, "leakbound.cli.evidence:evidence"),
    "list": (List, "leakbound.cli.listing:listing"),
}
"""Our own verbs: their options, and the function that takes them and returns the exit code."""
