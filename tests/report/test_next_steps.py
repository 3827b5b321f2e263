"""Every next step that a command or a page prints is a command that works."""

import html
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from leakbound import audit, report
from leakbound.assess.record import Attained, CriterionInfo
from leakbound.captured import capture
from leakbound.cli import captured, deployment, main
from leakbound.cli.options import VERBS
from leakbound.cli.parser import parse
from leakbound.models.custom import missing_arguments
from leakbound.report import overview

SOURCE = Path(deployment.__file__).parents[1]
CAPITALS = {"SHAPE": "1,8,8", "EXAMPLES": "1", "DIR": "out", "VALUE": "64"}
"""Words that the reader replaces, and what this reader knows."""


def call(words):
    with pytest.raises(SystemExit) as caught:
        main(words)
    return caught.value.code


def filled(command):
    """The words of a command, as a reader completes them."""
    for word, value in CAPITALS.items():
        command = re.sub(rf"\b{word}\b", value, command)
    verb, *rest = shlex.split(command)[1:]
    return [verb, *rest]


def read(command):
    """The options that a printed command gives; it has to be one that exists."""
    verb, *rest = shlex.split(command)[1:]
    return parse(VERBS[verb][0], rest, verb)


def printed(text):
    """The commands in what was printed, each on a line of its own."""
    return [line.strip() for line in text.splitlines() if line.startswith("  leakbound ")]


# --- after a capture -----------------------------------------------------------------------------


class Net(nn.Module):
    """A model as MONAI's, which needs to be told its sizes."""

    def __init__(self, features, classes=10):
        super().__init__()
        self.layer = nn.Linear(features, classes)

    def forward(self, x):
        return self.layer(x.flatten(1))


def one_update(place, about):
    """A captured round of one client that took one step."""
    model = Net(64)
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    digits = load_digits()
    inputs = torch.tensor(digits.images[:1], dtype=torch.float32) / 16
    label = torch.tensor(digits.target[:1])
    nn.functional.cross_entropy(model(inputs), label).backward()
    update = {name: -0.1 * value.grad for name, value in model.named_parameters()}
    known = {"round": 1, "client": 1, "kind": "delta", **about}
    return capture.write(place / "captured", before, update, known)


MODELS = [
    {"model": "own_net:Net,features=64", "input_shape": "1,8,8", "examples": 1},  # NVFlare's args
    {"model": "own_net:Net", "model_needs": "features", "input_shape": "1,8,8", "examples": 1},
    {"model": "own_net:Net,features=64"},  # NVFlare sends no number of examples, and no shape
]


@pytest.mark.parametrize("about", MODELS)
def test_the_attack_after_a_capture_runs(tmp_path, monkeypatch, about):
    """Without the settings of a model or the batch size, the printed command failed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    source = f"from torch import nn\n\n\n{CODE}"
    (tmp_path / "own_net.py").write_text(source)
    path = one_update(tmp_path, about)
    kept = {f"leakbound.{key}": str(value) for key, value in about.items()}
    command = captured.next_command(path.parents[1], kept)
    assert call([*filled(command), "--attack", "linear_inversion"]) == captured.EXPOSED_CODE


CODE = """class Net(nn.Module):
    def __init__(self, features, classes=10):
        super().__init__()
        self.layer = nn.Linear(features, classes)

    def forward(self, x):
        return self.layer(x.flatten(1))
"""


def test_a_folder_with_a_space_is_one_word():
    _, *rest = filled(captured.next_command(Path("my runs/captured"), {}))
    assert parse(VERBS["attack"][0], rest, "attack").update == Path("my runs/captured")


def local():
    """A class that no import finds."""

    class Hidden(nn.Module):
        pass

    return Hidden


def test_what_a_captured_model_still_needs():
    assert missing_arguments(Net) == ["features"]
    assert missing_arguments(nn.Flatten) == []
    assert missing_arguments(local()) is None


# --- pages ---------------------------------------------------------------------------------------


def plan(**more):
    return audit.parse(
        {
            "data": {"source": "mnist5k", "limit": 1200},
            "models": [{"name": "mlp", "hidden": [16]}],
            "attacks": [{"name": "linear_inversion"}],
            "defenses": [{"name": "dp_sgd", "noise_multiplier": 1.0}],
            "seeds": [0],
            "error_bound": {"kind": "none"},
            **more,
        }
    )


def command_of(page):
    text = page.read_text("utf-8")
    return html.unescape(re.search(r'<code class="command">(.*?)</code>', text)[1]), text


@pytest.mark.parametrize(
    ("psnr", "accepted", "verb"), [(20.0, 0.001, "bound"), (30.0, 0.05, "calibrate")]
)
def test_the_next_step_of_a_report_runs(tmp_path, monkeypatch, psnr, accepted, verb):
    """`calibrate psnr>=20` stood beside "no amount of noise protects at this threshold"."""
    monkeypatch.chdir(tmp_path)
    own = plan(criterion={"psnr": psnr}, risk={"probability": accepted})
    audit.audit(own, tmp_path / "run")
    command, text = command_of(report.write(tmp_path / "run"))
    assert read(command)
    assert shlex.split(command)[1] == verb
    assert call(shlex.split(command)[1:]) == 0
    assert ("it seldom meets:" in text) == (verb == "bound")


def attained(low, high):
    return Attained(
        attack="codebook",
        success=0.0,
        baseline=(low, high),
        accepted=0.01,
        confidence=0.95,
        public_examples=100,
    )


@pytest.mark.parametrize(
    ("baseline", "words"),
    [((0.02, 0.05), "no amount of noise helps"), ((0.0, 0.05), "do not show"), ((0.0, 0.005), "")],
)
def test_what_guesses_meet_is_no_target_of_noise(make_assessment, baseline, words):
    own = [make_assessment(attained=attained(*baseline), verdict="exposed")]
    assert words in (overview._guessed(own) or "")
    assert bool(words) == (overview._guessed(own) is not None)


@pytest.mark.parametrize(
    ("info", "levels"),
    [
        (CriterionInfo(value=25.0, within=0.05623), "--psnr 25 30 35 40 45"),
        (CriterionInfo(metric="columns", value=90.0, within=2.0, of=20), "--share 0.9 1"),
        (CriterionInfo(metric="tokens", value=90.0, within=2.0, of=20), "--share 0.9 1"),
    ],
)
@pytest.mark.parametrize("guessed", [False, True])
def test_the_next_command_of_every_domain_is_understood(info, levels, guessed):
    given = {"data": {"source": "table:my rows.csv", "schema": "my.toml"}}
    command = overview.next_command(given, info, guessed=guessed)
    known = read(command)
    assert known.data == "table:my rows.csv"
    assert str(known.schema) == "my.toml"
    assert (levels in command) == guessed
    public = overview.next_command({"public": "digits"}, info, guessed=guessed)
    assert read(public).data == "digits"


# --- bounds of a deployment ----------------------------------------------------------------------

FACTS = """
title = "lungs"
rounds = 1
clip = {norm = 1.0, kind = "l2", at = "client"}
noise = {multiplier = 0.5, at = "client", seeded = false}
participation = {law = "all", population = 4}
record = {examples_per_client = 10}
weights = "uniform"
correlation = "none"
sends = []
secure_aggregation = {on = false}
local = {coupled = false}
"""


def next_of(text):
    flat = " ".join(text.split())
    return re.search(r"leakbound calibrate .*? --data \S+", flat)[0]


@pytest.mark.parametrize("more", [[], ["--data", "mnist5k", "--psnr", "25"]])
def test_the_next_step_of_a_deployment_runs(tmp_path, monkeypatch, capsys, more):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my facts.toml").write_text(FACTS)
    assert call(["bound", "--deployment", "my facts.toml", *more]) == deployment.OPEN
    command = next_of(capsys.readouterr().out).replace("SOURCE", "mnist5k")
    assert read(command).deployment == Path("my facts.toml")
    assert call(shlex.split(command)[1:]) == 0


def test_the_next_step_of_other_settings_is_for_a_deployment_file(tmp_path, monkeypatch, capsys):
    """`--deployment config_fed_client.json` was printed, which is no deployment file."""
    monkeypatch.chdir(tmp_path)
    args = {"defense": ["clip,clip_norm=1.0", "gaussian_noise,noise_std=0.5"], "model": "net:Net"}
    own = {"path": "leakbound.nvflare.LeakboundFilter", "args": args}
    chain = [{"tasks": ["train"], "filters": [own]}]
    table = {"format_version": 2, "executors": [], "task_result_filters": chain}
    place = tmp_path / "job" / "app" / "config"
    place.mkdir(parents=True)
    (place / "config_fed_client.json").write_text(json.dumps(table))
    call(["bound", "--nvflare", str(place / "config_fed_client.json"), "--out", "facts"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "config_fed_client.json --target" not in shown
    assert "deployment file (facts/deployment.toml)" in shown


# --- schema, and what names a command elsewhere --------------------------------------------------


def test_the_next_step_of_a_schema_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [f"{20 + n % 40},{n % 3},{'yes' if n % 2 else 'no'}" for n in range(200)]
    (tmp_path / "my rows.csv").write_text("age,visits,sick\n" + "\n".join(rows))
    assert call(["schema", "my rows.csv", "--target", "sick", "--out", "own.toml"]) == 0
    (command,) = printed(capsys.readouterr().out)
    text = (tmp_path / "own.toml").read_text()
    (tmp_path / "own.toml").write_text(text.replace("confirmed = false", "confirmed = true"))
    given = [*filled(command), "--attack", "linear_inversion"]
    assert call(given) == 0


MENTIONED = re.compile(r"leakbound ([a-z][a-z-]+)((?: --[a-z-]+)*)")
NO_COMMANDS = {"does", "report", "keeps", "that", "filter", "has", "comparison", "evidence"}
"""Words that follow the name in sentences (two of them are commands as well)."""


def strings():
    """Every text in the package's code and templates that names a command and options."""
    for path in sorted([*SOURCE.rglob("*.py"), *SOURCE.rglob("*.j2")]):
        for found in MENTIONED.finditer(path.read_text("utf-8")):
            yield path.relative_to(SOURCE), found[1], found[2].split()


def test_every_command_that_a_text_names_exists():
    seen = 0
    known = {verb: set(listing_of(kind)) for verb, (kind, _) in VERBS.items()}
    for path, verb, flags in strings():
        if verb in VERBS:
            seen += 1
            assert set(flags) <= known[verb] | {"--help", "--help-all"}, (path, verb, flags)
        elif flags:
            assert verb in ("reproduce",), (path, verb)
    assert seen > 40


def listing_of(kind):
    from leakbound.cli.parser import arguments

    return [one.option for one in arguments(kind).values()]
