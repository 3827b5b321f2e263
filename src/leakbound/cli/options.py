"""The options of every command: one dataclass each, from which the command line is made.

`--help` shows the first sentence of each docstring under the titles in `GROUPS`, without the fields
named in `RARE`; `--help-all` shows everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from leakbound.cli.parser import Option

Directory = Annotated[Path | None, Option("DIR")]
File = Annotated[Path | None, Option("FILE")]
Source = Annotated[str | None, Option("DATA")]
Data = Annotated[str, Option("DATA")]
Name = Annotated[str, Option("NAME")]
Range = Annotated[tuple[float, float], Option("LOW HIGH")]
Audiences = Annotated[tuple[Literal["server", "clients"], ...], Option("WHO ...")]
EVERYONE: Final = ("server", "clients")
Persons = Literal["first", "last", "outer_folder", "inner_folder"]
Prior = Literal["sample", "these", "sphere", "gaussian", "mixture", "gallery", "bigram"]


@dataclass(frozen=True)
class Audit:
    """Attack real batches under each defense, and write a report.

    Without a plan, a built-in plan runs on MNIST, or on the data that you name. To continue
    after a stop, run the same command again.

      leakbound audit --quick
      leakbound audit --data patients.csv --out runs/patients
      leakbound audit my_plan.toml --out runs/mine
    """

    RESUMES: ClassVar = True
    GROUPS: ClassVar = {
        "What to run": "plan quick data schema diagnose",
        "Output": "out no_examples",
        "Machine": "workers device engine address",
    }

    plan: Annotated[Path | None, Option("PLAN", positional=True)] = None
    """A plan in TOML (docs/plans.md). It can name Python code to import."""
    out: Directory = None
    """Folder for the results. Built-in plans write to runs/demo or runs/quick by default; your own
    plan needs a folder."""
    quick: bool = False
    """Run the small built-in plan (under a minute)."""
    data: Annotated[str | None, Option("SOURCE")] = None
    """Run a built-in plan on this data: a table, or images (`leakbound list data`)."""
    schema: File = None
    """Schema of a table; by default the table's path with the ending .toml."""
    diagnose: bool = False
    """Also say why configurations are undecided: a few seconds to a minute for each."""
    workers: int = 0
    """Processes; 0 uses one per core. The number does not change the records."""
    engine: Literal["local", "ray"] = "local"
    """Where experiments run: in local processes, or on Ray. The records are the same."""
    address: Annotated[str | None, Option("ADDRESS")] = None
    """A running Ray cluster: "auto" or HOST:PORT. Without it Ray starts on this machine."""
    device: Annotated[str, Option("DEVICE")] = "cpu"
    """Where models and batches live: "cpu", or "cuda" for a GPU."""
    no_examples: bool = False
    """Keep no picture, row or text of the data, neither in files nor in the report."""


@dataclass(frozen=True)
class AttackOptions:
    """Run one attack on one batch under one defense, or on a captured update.

    Settings follow a name after a comma. See `leakbound list attacks`.

      leakbound attack --attack inverting_gradients,steps=200 --data digits
      leakbound attack --update FILE --model my.module:build --input-shape 1,28,28
    """

    GROUPS: ClassVar = {
        "Experiment": "attack model data schema loss batch_size people defense seed time",
        "Attacker": "known labels_unknown defense_unknown malicious_server statistics_known",
        "Captured update": "update before adapter kind input_shape input_range vocabulary "
        "tokenizer padding classes labels known_values local_steps learning_rate "
        "local_batch_size optimizer weight_decay steps_search truth public round memory device",
        "Output": "error_bound explain diagnose lpips_weights out no_examples json",
    }
    RARE: ClassVar = (
        "schema loss people time known known_values statistics_known adapter kind input_range "
        "vocabulary tokenizer padding classes labels local_steps learning_rate local_batch_size "
        "optimizer weight_decay steps_search round memory device lpips_weights no_examples"
    )
    UNUSED: ClassVar = {
        "describes a captured update; give --update FILE too": "before adapter kind input_shape "
        "known_values tokenizer padding classes labels local_steps learning_rate "
        "local_batch_size optimizer weight_decay steps_search truth public round memory device "
        "no_examples",
        "is for a simulated experiment; leave it out with --update": "labels_unknown "
        "defense_unknown malicious_server statistics_known lpips_weights",
        "is not for trees; leave it out with --kind xgboost": "attack batch_size input_shape "
        "classes labels local_steps no_examples local_batch_size optimizer steps_search round "
        "memory device malicious_server statistics_known adapter known known_values",
    }
    """Why options are refused, and which: an option that changes nothing would mislead."""

    attack: Annotated[tuple[str, ...], Option("NAME")] = ()
    """The attack; by default inverting_gradients. With --update you can name several; by default
    all that fit run, cheapest first."""
    model: Name = "mlp"
    """A name, or package.module:build."""
    data: Data = "mnist5k"
    """The data source."""
    schema: File = None
    """Schema of a table; by default the file of its name that ends in .toml."""
    loss: Name = "cross_entropy"
    """What the client trains on. One of cross_entropy, bce, mse, l1, poisson, dense_cross_entropy,
    dice, next_token, token_cross_entropy (docs/label_inference.md), or your own:
    package.module:name of a loss or of what builds one, as in my.losses:Dice,sigmoid=true."""
    defense: Annotated[str | None, Option("NAME")] = None
    """The defense; by default none. With --update, by default what `leakbound capture` saw."""
    batch_size: int | None = None
    """Examples per client; by default 1. With --update, inferred where the update shows it."""
    people: int | None = None
    """Most examples of one person in an update, for bounds. Counted where the schema names the
    person of a row; otherwise 1."""
    seed: int = 0
    """Seed of weights, batch and noise."""
    known: Annotated[str, Option("PARTS")] = ""
    """What the attacker has of every example from elsewhere: columns, as in age,sex, or region:top,
    mask:FILE, past:24, prefix:10. Only the rest counts as reconstructed; after all, the label."""
    labels_unknown: bool = False
    """The attacker does not know the labels."""
    defense_unknown: bool = False
    """The attacker does not know the defense. This attacker is weaker than the default."""
    malicious_server: bool = False
    """The server may change the model it sends. Some attacks need this."""
    statistics_known: bool = False
    """The attacker knows the batch's statistics in every batch norm."""
    error_bound: Annotated[Literal["none", "trace", "full", "weiss_weinstein"], Option("KIND")] = (
        "trace"
    )
    """Lower bound: none, trace, full or weiss_weinstein. "trace" estimates it. "full" estimates a
    tighter one, takes longer and draws a leak map. "weiss_weinstein" proves one, also for
    non-smooth activations (ReLU, max pooling)."""
    diagnose: bool = False
    """Also test why it is undecided (up to a minute)."""
    explain: bool = False
    """Print the scope and the assumptions of the bounds."""
    lpips_weights: File = None
    """Also measure LPIPS, with the weights of this .safetensors file (docs/how_to/lpips.md)."""
    out: Directory = None
    """Write pictures (PNG) to this folder. With --update: records and a report."""
    json: bool = False
    """Print the record as JSON."""
    update: Annotated[Path | None, Option("PATH")] = None
    """Update file, or a folder of `leakbound capture`. The file is .safetensors or .npz; for trees
    also a model in JSON."""
    before: File = None
    """Weights sent to the client. With a file of `leakbound capture` they are found beside it."""
    adapter: Annotated[Path | None, Option("PATH")] = None
    """Adapter sent to the client: PEFT's folder or .safetensors file. --update is the client's, in
    the same form, and --model the base of both; for other kinds than LoRA, PEFT's own model."""
    kind: Literal["auto", "gradient", "delta", "weights", "xgboost"] = "auto"
    """What the update holds. A gradient, a delta (after - before), the weights after, or trees of
    XGBoost (docs/trees.md), for which no model is needed."""
    input_shape: Annotated[str, Option("SHAPE")] = ""
    """Shape of one input, such as 1,28,28. Needed where the update's file does not state it."""
    input_range: Range = (0.0, 1.0)
    """Range of the model's inputs."""
    vocabulary: int | None = None
    """Tokens of a language model: inputs are sequences of them, of the length --input-shape. With
    --classes, the model classifies sequences."""
    tokenizer: File = None
    """The model's tokenizer.json: words in place of numbers, and --vocabulary by default."""
    padding: Annotated[str | None, Option("ID")] = None
    """The token that fills shorter sequences. It stands behind them; 0,left: before them."""
    classes: int | None = None
    """Classes of the model; by default its number of outputs."""
    labels: Annotated[str, Option("LABELS")] = ""
    """Labels of the examples, such as 3,5, or a file that holds `labels`. Other losses than
    cross_entropy take numbers."""
    known_values: File = None
    """The values of --known, a row for each example: a table's columns (CSV), or tensors named
    `known` or `inputs`. By default those of --truth."""
    local_steps: int | None = None
    """Local steps behind the update. Without it, a search runs if the learning rate is known."""
    steps_search: float | None = None
    """Seconds for the search of one update's local steps (30); 0 skips the search."""
    learning_rate: float | None = None
    """Learning rate of the client. Without it, only the direction of SGD's update counts."""
    optimizer: str | None = None
    """The client's optimizer: sgd, adam, adamw, rmsprop, adagrad, lion, lars or lamb, with settings
    as in sgd,momentum=0.9. Without it, the update is searched for its traces."""
    local_batch_size: int | None = None
    """Examples per local step; by default all of them."""
    weight_decay: float | None = None
    """Weight decay of the client's optimizer. Without it, the update is searched for one."""
    truth: File = None
    """The true batch, to measure results: a file with `inputs` and `labels`, or a data source.
    No attack sees it."""
    public: Source = None
    """Public examples, for attacks and bounds. They should be of the same kind."""
    round: int | None = None
    """Attack only this round of a folder of updates."""
    no_examples: bool = False
    """Keep no picture, row or text of what was reconstructed from the update."""
    time: Annotated[float | None, Option("SECONDS")] = None
    """Time limit for all attacks. A search that is stopped keeps its best candidate."""
    memory: Annotated[float | None, Option("GB")] = None
    """Memory limit in gigabytes for all of it; by default what is free. Searches that need more
    save memory and take longer, or do not run."""
    device: Annotated[str, Option("DEVICE")] = "cpu"
    """cpu, or cuda for a GPU."""


@dataclass(frozen=True)
class CaptureOptions:
    """Run a Flower or NVFlare app as its server sees it.

    This command runs the app's code. Then attack what it kept:

      leakbound capture my_app --out captured
      leakbound attack --update captured --model my.module:build
    """

    GROUPS: ClassVar = {"App": "app run_config clients", "Output": "out rounds"}

    app: Annotated[Path, Option("APP_DIR", positional=True)]
    """Folder of the app (pyproject.toml with [tool.flwr.app]) or of the job (meta.json)."""
    out: Annotated[Path, Option("DIR")]
    """Folder for the captured updates."""
    rounds: tuple[int, ...] = (1,)
    """Rounds to keep, counted from 1."""
    clients: int = 4
    """The number of clients; an NVFlare job may name them itself."""
    run_config: Annotated[str, Option("KEY=VALUE")] = ""
    """Replaces values of [tool.flwr.app.config]. Example: "learning-rate=0.1 epochs=1"."""


@dataclass(frozen=True)
class Train:
    """Train under each defense, and show what it costs.

    Only the plan's [utility] table runs. To continue after a stop, run the same command again.

      leakbound train my_plan.toml
    """

    RESUMES: ClassVar = True
    GROUPS: ClassVar = {"What to run": "plan", "Output": "out json", "Machine": "workers"}

    plan: Annotated[Path, Option("PLAN", positional=True)]
    """A plan in TOML with a [utility] table. It can name Python code to import."""
    out: Directory = None
    """Folder for the results; by default runs/NAME-training. A later audit of the plan can continue
    in it."""
    workers: int = 0
    """Processes; 0 uses one per core."""
    json: bool = False
    """Print the table as JSON."""


@dataclass(frozen=True)
class TrainPrior:
    """Learn a prior for the attack learned_prior.

    It trains a small denoiser on the public part of the data, in minutes on a CPU. Ctrl-C keeps
    what was reached.

      leakbound train-prior --data mnist5k --out digits.safetensors
    """

    GROUPS: ClassVar = {
        "Examples": "data schema size channels",
        "Training": "steps width seed",
        "Output": "out",
    }

    data: Data
    """The data source. Only the public part is used, which `leakbound audit` gives attackers."""
    out: Annotated[Path, Option("FILE")]
    """The .safetensors file to write. It is replaced only if leakbound wrote it."""
    schema: File = None
    """Schema of a table; by default the file of its name that ends in .toml."""
    size: int | None = None
    """Resize images to this many pixels per side."""
    channels: int | None = None
    """1 for gray, 3 for color."""
    steps: int = 2400
    """Training steps."""
    width: int = 0
    """Channels for images, units for others; by default 32 and 128."""
    seed: int = 0
    """Seed of weights and draws."""


@dataclass(frozen=True)
class Report:
    """Write report.html again from the records of a run.

    leakbound report runs/demo
    """

    folder: Annotated[Path, Option("RUN", positional=True)]
    """Output folder of the run."""
    no_examples: bool = False
    """Leave out all pictures."""
    log: Literal["mlflow", "wandb"] | None = None
    """Also log the results to MLflow or Weights & Biases, without examples. They stay on this
    machine unless you configured a server (docs/how_to/log.md)."""


@dataclass(frozen=True)
class Reidentify:
    """Is it this person? Name one of M candidates.

    The other candidates are examples of the run's data that no attack saw, with the same label.
    The report shows the share that is named right, chance (1 of M), and what no attacker exceeds.

      leakbound reidentify runs/mine --embedding my_faces:embed
    """

    folder: Annotated[Path, Option("RUN", positional=True)]
    """Output folder of an audit of images."""
    matcher: Name = "nearest"
    """nearest (pixels), edges, or package.module:function. Your function gets reconstructions
    (N, C, H, W) and candidates (P, C, H, W) and returns scores (N, P), higher for the same
    person."""
    embedding: Annotated[str | None, Option("NAME")] = None
    """Instead of a matcher package.module:function, which maps images (N, C, H, W) to vectors
    (N, D): the nearest by angle is named."""
    by_person: bool = False
    """The true candidate is another image of the person, as an attacker may have one. The run's
    data say who is who (--person)."""
    candidates: int = 100
    """M, the true one included; fewer if the data leave fewer."""


@dataclass(frozen=True)
class Compare:
    """Compare two runs: which verdicts changed, and which differences are visible.

    leakbound compare runs/before runs/after
    """

    GROUPS: ClassVar = {"Runs": "first second", "Output": "out"}

    first: Annotated[Path, Option("RUN_A", positional=True)]
    """Output folder of the first run."""
    second: Annotated[Path, Option("RUN_B", positional=True)]
    """Output folder of the second run."""
    out: File = None
    """The page, a name that ends in .html; by default RUN_B/compare.html. It holds no pictures."""


@dataclass(frozen=True)
class CheckOptions:
    """Say whether a policy holds: a gate for pipelines.

    It states requirements of audits, deployments, models and a client's own code. Exit code 0: all
    hold; 1: one is broken; 2: one cannot be decided. The command imports and runs the client code
    that the policy names.

      leakbound check policy.toml --markdown check.md --sarif check.sarif
    """

    GROUPS: ClassVar = {
        "What to check": "policy",
        "Output": "junit sarif markdown log",
        "Machine": "workers",
    }

    policy: Annotated[Path, Option("POLICY", positional=True)]
    """A policy in TOML (docs/how_to/gate.md)."""
    junit: File = None
    """Write a JUnit file (.xml)."""
    sarif: File = None
    """Write what does not hold as SARIF 2.1.0 (.sarif)."""
    markdown: File = None
    """Write a table for a pull request (.md)."""
    log: Literal["mlflow", "wandb"] | None = None
    """Log the answers to MLflow or Weights & Biases. They stay on this machine unless you
    configured a server (docs/how_to/log.md)."""
    workers: int = 1
    """Processes of a plan's audit; 0 uses one per core."""


@dataclass(frozen=True)
class EvidenceCommand:
    """Write a sign-off page for approvers: measured, bounded and declared risk, kept apart.

    Also writes model-card.md, a section for the model's card.

    leakbound evidence runs/demo --declare accepted_by="A. Reader, 1 March"
    """

    GROUPS: ClassVar = {
        "What to cover": "runs declare audited deployment delta",
        "Output": "out no_examples",
    }

    runs: Annotated[tuple[Path, ...], Option("RUN ...", positional=True)] = ()
    """Output folders of runs."""
    declare: Annotated[tuple[str, ...], Option("NAME=TEXT ...")] = ()
    """Statements of yours that leakbound cannot check. For the names see docs/evidence.md."""
    audited: Annotated[tuple[Path, ...], Option("FILE ...")] = ()
    """What "leakbound audit-epsilon --json" printed of your client; at most 2."""
    deployment: File = None
    """A deployment file: the bound over all rounds of the training. Without it, a defense is at
    most enough for one update."""
    out: Annotated[Path | None, Option("PATH")] = None
    """The page, or a folder for it; by default the run's folder. report.json and the plan go to the
    same folder."""
    delta: float = 1e-5
    """Delta at which the epsilon of one release is stated."""
    no_examples: bool = False
    """Leave out all pictures of the data."""


@dataclass(frozen=True)
class SchemaOptions:
    """Draft the schema of a table: its columns and label.

    Check the draft, set confirmed = true in it, and give the table as --data.

      leakbound schema patients.csv --target diagnosis
    """

    GROUPS: ClassVar = {"Table": "table target", "Output": "out"}

    table: Annotated[Path, Option("TABLE", positional=True)]
    """A CSV or Parquet file."""
    target: Annotated[str | None, Option("COLUMN")] = None
    """The label's column; by default the last that can be one."""
    out: File = None
    """The schema; by default the table's name with the ending .toml."""


@dataclass(frozen=True)
class LedgerCommand:
    """What have a node's trainings cost so far?

    Checks the chain of a ledger, and prints what all of its rounds together reveal at most.

      leakbound ledger ledger.jsonl
      leakbound ledger ledger.jsonl --out cost
    """

    GROUPS: ClassVar = {"Ledger": "ledger last", "Output": "out json"}

    ledger: Annotated[Path, Option("FILE", positional=True)]
    """The node's ledger; its key and its head lie beside it."""
    last: int = 10
    """How many of the last lines are shown."""
    out: Annotated[Path | None, Option("DIR")] = None
    """Folder for ledger.json and ledger.png."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class List:
    """List or describe attacks, defenses, other names.

    leakbound list
    leakbound list attacks
    leakbound list inverting_gradients
    """

    what: Annotated[str | None, Option("NAME", positional=True)] = None
    """A kind (attacks, defenses, models, schemes, metrics, data), or one name."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """What `bound` and `calibrate` need to know about the data and the training."""

    data: Source = None
    """Examples like yours: a data source. It gives the number of values and the norms."""
    schema: File = None
    """Schema of a table; by default the file of its name that ends in .toml."""
    dim: int | None = None
    """Values per example. Needed without --data."""
    norm: Annotated[tuple[float, ...] | None, Option("LEAST [MOST]")] = None
    """Norm of the examples, the least first. Needed without --data."""
    steps: int = 1
    """Training steps."""
    sampling_rate: float = 1.0
    """Probability that a step holds an example."""
    people: int | None = None
    """Most examples of one person. By default counted in --data if persons are known, else 1."""
    people_mean: float | None = None
    """Mean examples of one person: state the risk of a random example, not of a random person.
    Needs --people."""
    person: Annotated[Persons | None, Option("RULE")] = None
    """What names the person in an image's path: first, last (part of the file's name),
    outer_folder or inner_folder. A table names its column in the schema."""
    participation: Annotated[Literal["visible", "hidden"], Option("WORD")] = "visible"
    """Are the example's steps visible or hidden? A server that selects clients sees them."""
    prior: Annotated[Prior | None, Option("PRIOR")] = None
    """Assumption about the data; by default "sample". "sample" uses no model,
    only --data as public examples. "these": --data are the private examples themselves. "mixture",
    "gaussian", "gallery" and, for text, "bigram" are models fitted to --data (protected under a
    model). "sphere" is a uniform direction that needs no --data; under it nothing is called
    protected."""
    labels_known: bool = False
    """The attacker knows the label. They choose a candidate per class."""
    known: Annotated[str | None, Option("PARTS")] = None
    """What an intruder knows of the example. Names of columns (birth_date,sex,zip), region:top,
    region:0-13,0-27 or mask:FILE of images, channels:0,2 or past:24 of series, prefix:10 of text.
    `bound` shows what the training adds for a stranger, for the intruder, and for anyone; in
    `calibrate` the target counts the unknown part."""
    input_range: Range = (0.0, 1.0)
    """Range of the inputs."""
    delta: float = 1e-5
    """Delta at which epsilon is shown."""
    size: int | None = None
    """Resize images to this many pixels per side."""
    channels: int | None = None
    """1 for gray, 3 for color."""
    exclude: Annotated[tuple[str, ...], Option("EXAMPLE ...")] = ()
    """Leave out these examples of --data. Give numbers from 0, or names of image files."""
    explain: bool = False
    """Print the scope and the assumptions of the bounds."""
    json: bool = False
    """Print JSON."""


_DATA = "data schema person dim norm size channels exclude input_range"


@dataclass(frozen=True, kw_only=True)
class BoundOptions(TrainingOptions):
    """With this noise, how likely is a reconstruction?

    Prints the success that an attack attains and the upper bound for all attackers.

      leakbound bound --noise-multiplier 1 --data mnist5k --psnr 25 30
      leakbound bound --deployment deployment.toml
    """

    GROUPS: ClassVar = {
        "Federated training": "deployment flower nvflare audience",
        "Training": "noise_multiplier steps sampling_rate people people_mean participation",
        "Data": _DATA,
        "Risk": "psnr ncc share eta accept prior labels_known known",
        "Output": "explain delta out json",
    }
    RARE: ClassVar = (
        "schema person people_mean dim norm size channels exclude ncc eta delta audience share "
        "labels_known"
    )

    deployment: File = None
    """Who clips, adds noise, takes part."""
    flower: File = None
    """pyproject.toml of a Flower app. Only its run config is read; no code runs."""
    nvflare: File = None
    """config_fed_client.json of an NVFlare job. Or its .conf, or privacy.json. No code runs."""
    audience: Audiences = EVERYONE
    """Who must not reconstruct: server, clients (and outsiders), or both."""
    noise_multiplier: float | None = None
    """Noise standard deviation / clip norm."""
    psnr: Annotated[tuple[float, ...], Option("DB ...")] = (10.0, 15.0, 20.0, 25.0, 30.0)
    """Thresholds in dB."""
    ncc: Annotated[tuple[float, ...], Option("NCC ...")] = ()
    """Thresholds in place of dB: correlations with the image, whatever its brightness and contrast.
    """
    share: Annotated[tuple[float, ...], Option("SHARE ...")] = (0.8, 0.85, 0.9, 0.95, 1.0)
    """Thresholds of tables and text, in place of dB: shares of columns or tokens that are right."""
    eta: Annotated[tuple[float, ...], Option("MSE ...")] = ()
    """More thresholds, as mean squared errors."""
    accept: float = 0.001
    """The probability that you accept."""
    out: Directory = None
    """Write bound.json and a plot to this folder."""


@dataclass(frozen=True, kw_only=True)
class Calibrate(TrainingOptions):
    """Find the noise, clip norm, steps or sampling rate for a risk that you accept.

    leakbound calibrate --target "psnr>=30 with probability<=0.01" --data mnist5k
    leakbound calibrate --target "gain<=0.1"
    leakbound calibrate --target "points<=2" --plan my_plan.toml
    """

    GROUPS: ClassVar = {
        "Target": "target solve plan",
        "Federated training": "deployment audience unit",
        "Training": "steps sampling_rate people people_mean participation noise_multiplier "
        "noise_std clip_norm",
        "Data": _DATA,
        "Risk": "prior labels_known known radius",
        "Output": "explain delta json",
    }
    RARE: ClassVar = (
        "schema person people_mean dim norm size channels exclude input_range delta audience unit "
        "labels_known noise_std radius"
    )

    target: Annotated[str, Option("TARGET")]
    """The risk that you accept. Write "psnr>=20 with probability<=0.001", or "mse<=0.01 with ..."
    or "ncc>=0.9 with ..." instead; for tables "columns>=0.9 with ...". "gain<=0.1" is what the
    training adds for anyone, whatever they know; "gain<=0.1 for diagnosis" for one column.
    "words<=0.1 at fpr<=0.01": how often anyone finds a word who names a false one so often."""
    solve: Annotated[
        Literal["noise_multiplier", "clip_norm", "steps", "sampling_rate"], Option("NAME")
    ] = "noise_multiplier"
    """The quantity to find: noise_multiplier, clip_norm, steps or sampling_rate."""
    plan: File = None
    """A plan with a [utility] table. Find the noise_std of each of its defenses at a utility that
    you accept. The target is "loss<=0.05", "points<=2" (of test accuracy) or "noise<=0.01" (what
    equal noise of this standard deviation costs)."""
    deployment: File = None
    """A deployment file. Find the noise multiplier for all its rounds."""
    audience: Audiences = EVERYONE
    """With --deployment: who must not reconstruct."""
    unit: Annotated[
        Literal["client", "example", "any example", "person"] | None, Option("UNIT")
    ] = None
    """With --deployment: client, example, "any example" of a client, or person; by default the
    file's."""
    noise_multiplier: float | None = None
    """Noise standard deviation / clip norm. Needed with --solve steps or sampling_rate."""
    noise_std: float | None = None
    """Noise standard deviation on the sum. Needed with --solve clip_norm."""
    clip_norm: float = 1.0
    """Bound on an example's gradient norm."""
    radius: float = 1.0
    """For "gain ... for COLUMN": of a ball that holds the gradients of its values / clip norm."""


@dataclass(frozen=True)
class AuditEpsilon:
    """Does your client leak more than its epsilon claims?

    Finds a lower bound on the epsilon of a DP-SGD, Opacus or Flower client. It runs your code with
    and without a canary, and sees only the updates. Exit code 0: consistent with the claim; 1: it
    leaks more than it claims; 2: cannot tell.

      leakbound audit-epsilon my.client:update --noise-multiplier 1
      leakbound audit-epsilon my.client:train --client training --declared 4
    """

    GROUPS: ClassVar = {
        "Client": "function client model weight_scale data examples",
        "Claim": "declared delta deployment noise_multiplier sampling_rate steps rounds neighbors",
        "Audit": "runs one_run canaries confidence seed",
        "Output": "json",
    }
    RARE: ClassVar = "weight_scale examples delta deployment confidence seed canaries"

    function: Annotated[str, Option("MODULE:FUNCTION", positional=True)]
    """Your client. The code is imported and runs."""
    client: Literal["function", "training", "flower"] = "function"
    """What it is. "function" takes weights, batch and seed and returns the update; "training" takes
    model and dataset and trains the model, such as with Opacus; "flower" takes the batch and
    returns a NumPyClient."""
    model: Name = "mlp"
    """The client's model: a name, or package.module:build."""
    weight_scale: float = 3.0
    """Factor of the model's first weights. Large weights give canaries gradients above the clip
    norm."""
    data: Data = "mnist5k"
    """The client's examples: a data source."""
    examples: int = 8
    """Number of the client's other examples."""
    declared: float | None = None
    """The epsilon that the program claims."""
    delta: float = 1e-5
    """Delta of every epsilon."""
    deployment: File = None
    """A deployment file that states noise, sampling and claim (docs/federated_privacy.md)."""
    noise_multiplier: float | None = None
    """Noise standard deviation / clip norm."""
    sampling_rate: float = 1.0
    """Probability that a step holds an example."""
    steps: int = 1
    """Training steps in one update."""
    rounds: int = 1
    """Updates that the claim covers. The client is run so often, and the audit sees all."""
    neighbors: Literal["add-remove", "replace"] = "add-remove"
    """What the canary does. "replace" keeps the number of examples, and counts twice the
    sensitivity."""
    runs: int = 500
    """Runs with the canary, and as many without."""
    one_run: bool = False
    """Run the client once, with many canaries. The bound is weaker."""
    canaries: int = 500
    """Canaries of --one-run."""
    confidence: float = 0.95
    """Confidence of all bounds together."""
    seed: int = 0
    """Seed of model, examples and runs."""
    json: bool = False
    """Print JSON."""


OF_EXPERIMENTS, OF_UPDATES, OF_TREES = AttackOptions.UNUSED
"""The three uses of `leakbound attack`: what each says of options that it does not take."""


def refuse_unused(command: AttackOptions, why: str) -> None:
    """Reject an option that this use of `leakbound attack` does not take."""
    for name in AttackOptions.UNUSED[why].split():
        if getattr(command, name) != getattr(AttackOptions, name):
            raise ValueError(f"--{name.replace('_', '-')} {why}")


VERBS: dict[str, tuple[type, str]] = {
    "schema": (SchemaOptions, "leakbound.cli.schema:schema"),
    "audit": (Audit, "leakbound.cli.audit:audit"),
    "audit-epsilon": (AuditEpsilon, "leakbound.cli.epsilon:audit_epsilon"),
    "attack": (AttackOptions, "leakbound.cli.attack:attack"),
    "capture": (CaptureOptions, "leakbound.cli.captured:capture"),
    "bound": (BoundOptions, "leakbound.cli.deployment:bound"),
    "calibrate": (Calibrate, "leakbound.cli.deployment:calibration"),
    "train": (Train, "leakbound.cli.audit:train"),
    "train-prior": (TrainPrior, "leakbound.cli.prior:train"),
    "report": (Report, "leakbound.cli.report:report"),
    "reidentify": (Reidentify, "leakbound.cli.reidentification:reidentify"),
    "compare": (Compare, "leakbound.cli.compare:compare"),
    "check": (CheckOptions, "leakbound.cli.check:check"),
    "evidence": (EvidenceCommand, "leakbound.cli.evidence:evidence"),
    "ledger": (LedgerCommand, "leakbound.cli.ledger:ledger"),
    "list": (List, "leakbound.cli.listing:listing"),
}
"""Our own verbs: their options, and the function that takes them and returns the exit code."""
