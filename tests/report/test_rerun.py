"""What the page offers to run one experiment alone is that very experiment."""

from __future__ import annotations

import json
import shlex
import tomllib

import pytest
from msgspec.structs import replace

from leakbound.audit.plan import Experiment, Plan, defense_name, plain
from leakbound.audit.plan_file import parse
from leakbound.cli.attack import _plan
from leakbound.cli.options import AttackOptions
from leakbound.cli.parser import parse as parse_options
from leakbound.report import write
from leakbound.report.rerun import CRITERION, DATA, ERROR_BOUND, RISK, digest, reruns

SMALL = {
    "models": [{"name": "mlp", "train_steps": [0, 5]}, {"name": "lenet"}],
    "attacks": [
        {"name": "linear_inversion"},
        {"name": "inverting_gradients", "steps": [20, 40]},
    ],
    "defenses": [{"name": "none"}, {"name": "gaussian_noise", "noise_std": [0.1, 1e-05]}],
    "batch_sizes": [1, 3],
    "seeds": [0, 7],
}
RICH = {
    **SMALL,
    "data": {"source": "mnist5k", "size": 16, "limit": 400},
    "defenses": [
        {"name": "none"},
        {
            "links": [
                {"name": "clip", "clip_norm": 1.0},
                {"name": "gaussian_noise", "noise_std": [0.1, 1.0]},
            ]
        },
    ],
    "threat": {"labels_known": False, "server": "malicious", "statistics_known": True},
    "criterion": {"psnr": 15},
    "error_bound": {"kind": "none"},
    "risk": {"probability": 0},
}
OTHERS = [
    {"risk": {"people": 3}},
    {"threat": {"labels_known": False, "defense_known": False, "server": "malicious"}},
    {"threat": {"statistics_known": True}, "error_bound": {"kind": "full"}},
    {"metrics": {"lpips_weights": "a folder/it's.safetensors"}},
    {"data": {"source": "/pictures of $HOME/`me`"}},
    {"data": {"source": "table:t.csv", "schema": "it's.toml"}},
]


@pytest.fixture
def record(make_assessment):
    """What a report reads of an experiment: its names, and the hash that must be found again."""

    def make(own: Experiment):
        whole = make_assessment(
            attack=own.attack.name, batch_size=own.batch_size, seed=own.seed, experiment=own.id
        )
        defense = replace(whole.defense, name=defense_name(own.defense))
        return replace(whole, model=replace(whole.model, name=own.model.name), defense=defense)

    return make


@pytest.fixture
def made(record):
    def make(plan: Plan) -> dict:
        return reruns(json.loads(json.dumps(plain(plan))), map(record, plan.experiments()))

    return make


def named(command: str) -> Plan:
    """The plan of a `leakbound attack` command."""
    words = shlex.split(command)
    assert words[:2] == ["leakbound", "attack"]
    given = parse_options(AttackOptions, words[2:], "attack")
    return _plan(given, given.attack[0], given.batch_size)


@pytest.mark.parametrize("more", [{}, *OTHERS], ids=str)
def test_a_command_names_the_same_experiment(made, more):
    plan = parse(SMALL | more)
    found = made(plan)
    assert set(found) == {own.id for own in plan.experiments()}
    for name in [*found][::5]:
        assert found[name].plan is None
        (own,) = named(found[name].command).experiments()
        assert own.id == name


def test_what_no_command_can_name_comes_as_a_plan(made):
    plan = parse(RICH)
    found = made(plan)
    assert set(found) == {own.id for own in plan.experiments()}
    for name, how in found.items():
        assert how.command == f"leakbound audit experiment.toml --out experiment-{name}"
        (own,) = parse(tomllib.loads(how.plan)).experiments()
        assert own.id == name


@pytest.mark.parametrize(
    "more",
    [
        {"error_bound": {"kind": "full", "images": 4}},
        {"risk": {"prior": "gaussian"}},
        {"criterion": {"psnr": 25}},
        {"criterion": {"share": 0.8}},
        {"data": {"channels": 3}},
    ],
    ids=str,
)
def test_each_setting_that_the_command_lacks_leads_to_a_plan(made, more):
    found = made(parse(SMALL | more))
    assert found
    assert all(how.plan for how in found.values())


def test_the_defaults_are_those_of_plans():
    plan = plain(parse(SMALL))
    assert (plan["error_bound"], plan["risk"]) == (ERROR_BOUND, RISK)
    assert {name: plan[name] for name in CRITERION} == CRITERION
    assert plan["data"] == {"source": "mnist5k", "schema": None} | DATA
    for more in ({}, RICH, *OTHERS):
        for own in parse(SMALL | more).experiments()[::7]:
            assert digest(plain(own)) == own.id


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"models": 3},
        {"models": [{}], "defenses": [[]], "attacks": [None]},
        {"models": [{"name": "mlp"}], "defenses": [[{"name": 3}]], "attacks": []},
    ],
    ids=str,
)
def test_a_plan_that_is_none_offers_nothing(record, plan):
    own = [record(one) for one in parse(SMALL).experiments()]
    assert reruns(plan, own) == {}


def test_an_experiment_of_another_plan_is_not_guessed(record):
    plan, other = parse(SMALL), parse(SMALL | {"criterion": {"psnr": 21}})
    header = {"plan": plain(other)}
    assert reruns(header["plan"], [record(one) for one in plan.experiments()]) == {}


def test_what_a_terminal_acts_on_is_left_out(made):
    plan = parse(SMALL | {"data": {"source": "a\x1b]0;title\x07"}})
    assert made(plan) == {}


def test_the_page_shows_it_and_escapes_it(tmp_path, make_assessment, make_run):
    plan = parse(SMALL | {"data": {"source": "a <b> & c"}})
    own = plan.experiments()[0]
    known = {"attack": own.attack.name, "batch_size": 1, "psnr": [30.0]}
    one = make_assessment(**known, experiment=own.id)
    page = write(make_run(tmp_path / "run", [one], plan=plain(plan))).read_text()
    assert "leakbound attack --attack linear_inversion --model mlp" in page
    assert "--data &#39;a &lt;b&gt; &amp; c&#39; --batch-size 1 --seed 0" in page
    assert own.id in page
