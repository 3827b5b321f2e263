"""What a captured app declares: read from its strategy and mods while they run, and then used."""

import json

import pytest
import torch
from torch import nn

from leakbound.captured import capture, declared, load_all
from leakbound.defenses import Clip, GaussianNoise, LaplaceNoise, NoDefense, TopK, chain
from leakbound.flower import capture_app

from ..captured.flat import attack_update

RATE = 0.25
LOCAL_DP = "LocalDpMod(0.5, 0.5, 5.0, 1e-5)"
STD = 0.48448052626
"""0.5 sqrt(2 ln 125000) / 5."""
PROJECT = """
[project]
name = "quick"
version = "1.0.0"
[tool.flwr.app]
publisher = "someone"
[tool.flwr.app.components]
serverapp = "quick.server_app:app"
clientapp = "quick.client_app:app"
[tool.flwr.app.config]
lr = 0.25
"""
SERVER = """
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import *
from quick.task import Net

app = ServerApp()

@app.main()
def main(grid, context):
    start = ArrayRecord(Net().state_dict())
    STRATEGY.start(grid=grid, initial_arrays=start, num_rounds=3,
                   train_config=ConfigRecord({"lr": context.run_config["lr"]}))
"""
TASK = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(64, 10)
        SCALE

    def forward(self, x):
        return self.last(x.flatten(1))
"""
CLIENT = """
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import *
from leakbound.data import load
from leakbound.defenses import *
from leakbound.flower import DefenseMod, Setup, tap
from quick.task import Net

DIGITS = load("digits")
setup = Setup(Net, learning_rate=LEARNS)

def twice(msg, context, call_next):
    out = call_next(msg, context)
    arrays = out.content["arrays"].to_torch_state_dict()
    out.content["arrays"] = ArrayRecord({key: 2 * value for key, value in arrays.items()})
    return out

app = ClientApp()

@app.train(mods=[MODS])
def train(msg, context):
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    at = 4 * context.node_config["partition-id"]
    x, y = DIGITS.inputs[at : at + 4], DIGITS.labels[at : at + 4]
    tap(x, y)
    rule = TRAINS
    for _ in range(STEPS):
        if rule is not None:
            rule.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        if rule is not None:
            rule.step()
    if rule is None:
        with torch.no_grad():
            for p in net.parameters():
                p -= msg.content["config"]["lr"] * p.grad if p.grad is not None else 0.125
    metrics = MetricRecord({"num-examples": len(y)})
    content = {"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}
    return Message(RecordDict(content), reply_to=msg)
"""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(64, 10)

    def forward(self, x):
        return self.last(x.flatten(1))


@pytest.fixture
def captured(tmp_path):
    """Captures an app with these mods and this strategy; returns the updates and what was said."""

    def run(
        mods="",
        strategy="FedAvg()",
        *,
        learns=RATE,
        scale="",
        rounds=(1,),
        trains="None",
        steps=1,
    ):
        app = tmp_path / "app"
        (app / "quick").mkdir(parents=True)
        (app / "pyproject.toml").write_text(PROJECT)
        client = CLIENT.replace("MODS", mods).replace("LEARNS", repr(learns))
        client = client.replace("TRAINS", trains).replace("STEPS", str(steps))
        texts = {
            "__init__": "",
            "task": TASK.replace("SCALE", scale),
            "server_app": SERVER.replace("STRATEGY", strategy),
            "client_app": client,
        }
        for name, text in texts.items():
            (app / "quick" / f"{name}.py").write_text(text)
        said = []
        capture_app(app, tmp_path / "out", rounds=rounds, on_progress=said.append)
        return load_all(tmp_path / "out"), said

    return run


def attacked(update, **given):
    return attack_update(update, Net(), input_shape=(1, 8, 8), attacks="linear_inversion", **given)


def test_local_noise_is_known_without_typing(captured):
    (update, _), said = captured(LOCAL_DP)
    assert any(line.startswith("declared defense: ") for line in said)
    outcome = attacked(update)
    (seen,) = outcome.inferred
    clip, noise = seen.defense.links
    assert (clip.clip_norm, noise.noise_std) == pytest.approx((0.5 / RATE, STD / RATE))
    assert not seen.refuted, "the update has the declared noise's energy"
    finding = next(one for one in seen.findings if one.name == "defense")
    assert "Flower's LocalDpMod, seen in the app while it ran" in finding.how
    assert outcome.records[0].defense.name == "clip+gaussian_noise"
    share = min(1.0, 650 * STD**2 / float(change(update).square().sum()))
    assert outcome.records[0].release.noise_share == pytest.approx(share, rel=1e-3)


def change(update):
    return torch.cat(
        [(update.update[key] - update.before[key]).flatten() for key in update.before]
    ).double()


def test_an_explicit_defense_wins(captured):
    (update, _), _ = captured(LOCAL_DP)
    assert attacked(update, defense=NoDefense()).inferred[0].defense.links == ()
    own = attacked(update, defense=LaplaceNoise(1.0)).inferred[0]
    assert own.defense == chain(LaplaceNoise(1.0))
    assert all(one.name != "defense" for one in own.findings)


def test_another_learning_rate_keeps_the_levels_in_weights(captured):
    (update, _), _ = captured(LOCAL_DP)
    clip, noise = attacked(update, learning_rate=0.5).inferred[0].defense.links
    assert (clip.clip_norm, noise.noise_std) == pytest.approx((1.0, 2 * STD))


CLIENT_SIDE = {
    "fixed": (
        "fixedclipping_mod",
        "DifferentialPrivacyClientSideFixedClipping(FedAvg(), 1.0, 0.125, 2)",
        "[Clip(clip_norm=0.5)]",
    ),
    "adaptive": (
        "adaptiveclipping_mod",
        "DifferentialPrivacyClientSideAdaptiveClipping("
        "FedAvg(), 0.1, 2, initial_clipping_norm=0.25)",
        "[Clip(clip_norm=1.0)]",
    ),
    "both kinds of mods": (
        "DefenseMod(GaussianNoise(0.2), setup), fixedclipping_mod",
        "DifferentialPrivacyClientSideFixedClipping(FedAvg(), 1.0, 0.5, 2)",
        "[Clip(clip_norm=2.0), GaussianNoise(noise_std=0.2)]",
    ),
}


@pytest.mark.parametrize(("mods", "strategy", "links"), CLIENT_SIDE.values(), ids=list(CLIENT_SIDE))
def test_a_clients_clip_is_declared_and_the_servers_noise_is_not(captured, mods, strategy, links):
    updates, said = captured(mods, strategy)
    for update in updates:
        seen = attacked(update).inferred[0]
        assert repr(list(seen.defense.links)) == links
        assert any("adds noise after it has the updates" in note for note in seen.notes)
    own = change(updates[0]).norm()
    assert "noise" in links.lower() or float(own) == pytest.approx(
        RATE * seen.defense.links[0].clip_norm, rel=1e-4
    )
    assert any(line.startswith("example-weights") for line in said) == ("Noise" not in links)


@pytest.mark.parametrize("kind", ["Fixed", "Adaptive"])
def test_a_server_that_clips_sees_every_update(captured, kind):
    settings = "1.0, 0.5, 2" if kind == "Fixed" else "0.1, 2"
    rule = f"DifferentialPrivacyServerSide{kind}Clipping(FedAvg(), {settings})"
    (update, _), _ = captured("", rule)
    seen = attacked(update).inferred[0]
    assert seen.defense.links == ()
    assert any("the server sees each update without this" in note for note in seen.notes)


def test_an_adaptive_norm_is_that_of_the_round(captured):
    mods, strategy, _ = CLIENT_SIDE["adaptive"]
    updates, _ = captured(mods, strategy, rounds=(1, 2))
    norms = [json.loads(one.about["defense"])[0]["clip_norm"] for one in updates]
    assert norms[0] == norms[1] == 0.25
    assert norms[2] == norms[3] != 0.25


@pytest.mark.parametrize(
    ("mods", "words"),
    [
        (f"twice, {LOCAL_DP}", "LocalDpMod ran, but something changed the weights afterwards"),
        (f"{LOCAL_DP}, twice", None),
        ("DefenseMod(TopK(0.5), setup)", "not as a clip or noise of all weights"),
    ],
)
def test_what_cannot_be_known_is_not_declared(captured, mods, words):
    (update, _), _ = captured(mods)
    if words is None:
        assert "defense" in update.about, "the clip comes after what the other mod did"
    else:
        assert "defense" not in update.about
        assert words in update.about["defense_note"]


def test_a_scalar_without_noise_is_not_called_noisy(captured):
    (update, _), said = captured(LOCAL_DP, scale="self.scale = nn.Parameter(torch.tensor(1.0))")
    assert "defense" not in update.about
    assert float(update.update["scale"]) == 0.875, "exactly what the client sent"
    assert any(line.startswith("scalars-pass: the array 'scale'") for line in said)


def test_defense_mods_alone(captured):
    mods = "DefenseMod(GaussianNoise(0.4), setup), DefenseMod(Clip(2.0), setup)"
    (update, _), _ = captured(mods)
    assert attacked(update).inferred[0].defense == chain(Clip(2.0), GaussianNoise(0.4))


def test_nothing_is_declared_without_mods(captured):
    (update, _), _ = captured()
    assert not {"defense", "defense_from", "defense_note"} & update.about.keys()


def test_flower_is_put_back(captured):
    from flwr.clientapp.mod import localdp_mod
    from flwr.serverapp.strategy import Strategy

    before = localdp_mod.add_gaussian_noise_inplace, Strategy.start
    captured(LOCAL_DP)
    assert (localdp_mod.add_gaussian_noise_inplace, Strategy.start) == before


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        '[{"name": "optimal_noise"}]',
        '[{"name": "clip", "clip_norm": "1"}]',
        '[{"name": "clip", "clip_norm": -1}]',
        '[{"name": "clip", "clip_norm": 1e999}]',
        '[{"name": "clip", "other": 1}]',
        '{"name": "clip"}',
        "[1]",
        "[" * 3000,
        "[" + '{"name": "clip"},' * 400 + '{"name": "clip"}]',
    ],
)
def test_metadata_are_not_trusted(text):
    one = capture.Capture("u", "delta", {"w": torch.ones(2)}, about={"defense": text})
    with pytest.raises(ValueError, match="u: the metadata declare the defense"):
        declared.of(one, 1.0)


def test_text_and_back():
    links = [Clip(0.5), GaussianNoise(0.1)]
    about = {"defense": declared.text_of(links)}
    one = capture.Capture("u", "delta", {"w": torch.ones(2)}, about=about)
    assert declared.of(one, 0.5) == chain(Clip(1.0), GaussianNoise(0.2))
    with pytest.raises(ValueError, match="neither a clip nor noise"):
        declared.scaled(TopK(0.5), 1.0)


ADAM_W = "torch.optim.AdamW(net.parameters(), lr=2e-3, betas=(0.8, 0.99), weight_decay=0.125)"


def test_the_optimizer_that_trained_reaches_the_attack(captured):
    """What is known without typing is what one would have to type."""
    (update, _), said = captured(trains=ADAM_W, steps=3)
    assert any(line.startswith("the client trained with adamw") for line in said)
    (seen,) = attacked(update).inferred
    plan = seen.observation.task.plan
    assert (plan.optimizer, plan.betas, plan.epsilon) == ("adamw", (0.8, 0.99), 1e-8)
    assert (plan.steps, plan.learning_rate, seen.decay) == (3, 2e-3, "0.125")
    told = {one.name: one.how for one in seen.findings}
    assert told["optimizer"] == "the file's metadata"
    (given,) = attacked(update, optimizer="sgd").inferred
    assert given.observation.task.plan.optimizer == "sgd", "what is given wins"


def test_an_optimizer_that_is_not_simulated_is_named(captured):
    (update, _), _ = captured(trains="torch.optim.NAdam(net.parameters(), lr=2e-3)")
    assert "optimizer" not in update.about
    (seen,) = attacked(update).inferred
    assert any("trained with NAdam, which is not simulated" in note for note in seen.notes)


def test_an_update_that_a_mod_computes_anew_is_no_step_of_the_apps_optimizer(captured):
    mod = "DefenseMod(chain(ClipExamples(1.0), Mean(), GaussianNoise(0.5)), setup)"
    (update, _), _ = captured(mod, trains=ADAM_W)
    assert update.about["optimizer"] == "sgd"
    assert update.about["learning_rate"] == str(RATE)
    assert attacked(update).inferred[0].observation.task.plan.optimizer == "sgd"


def test_a_defended_update_keeps_its_decay(captured):
    (update, _), _ = captured("DefenseMod(Clip(9.0), setup)", trains=ADAM_W)
    (seen,) = attacked(update).inferred
    assert seen.decay is None
    assert seen.observation.task.plan.optimizer == "adamw"
