"""What the page offers to run one cell alone is that very cell."""

from __future__ import annotations

import json
import shlex
import tomllib

import pytest
import tyro

from leakbound import cli
from leakbound.cli import shared
from leakbound.audit.plan import Cell, Plan, plain
from leakbound.audit.plan_file import parse
from leakbound.report import write
from leakbound.report.rerun import FLOOR, RISK, THRESHOLD, cell_id, reruns

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
    "thresholds": {"psnr": 15},
    "floor": {"kind": "none"},
    "risk": {"probability": 0},
}
OTHERS = [
    {"threat": {"labels_known": False, "defense_known": False, "server": "malicious"}},
    {"threat": {"statistics_known": True}, "floor": {"kind": "full"}},
    {"metrics": {"lpips_weights": "a folder/it's.safetensors"}},
    {"data": {"source": "/pictures of $HOME/`me`"}},
]


def record(cell: Cell) -> dict:
    """What a report reads of a cell: its names, and the hash that must be found again."""
    joined = "+".join(link.name for link in cell.defense) or "none"
    return {
        "cell": cell.id,
        "model": {"name": cell.model.name},
        "defense": {"name": joined},
        "attack": {"name": cell.attack.name},
        "batch_size": cell.batch_size,
        "seed": cell.seed,
    }


def made(plan: Plan) -> dict:
    header = {"plan": json.loads(json.dumps(plain(plan)))}
    return reruns(header["plan"], [record(cell) for cell in plan.cells()])


def named(command: str) -> Plan:
    """The plan of a `leakbound attack` command, made as the command makes it."""
    words = shlex.split(command)
    assert words[:2] == ["leakbound", "attack"]
    given = tyro.cli(cli.Attack, args=words[2:], config=(tyro.conf.FlagCreatePairsOff,))
    path = given.lpips_weights
    return parse(
        {
            "data": {"source": given.data},
            "models": [shared.spec_of("model", given.model)],
            "attacks": [shared.spec_of("attack", given.attack[0])],
            "defenses": [shared.spec_of("defense", given.defense)],
            "batch_sizes": [given.batch_size],
            "seeds": [given.seed],
            "threat": {
                "labels_known": not given.labels_unknown,
                "defense_known": not given.defense_unknown,
                "server": "malicious" if given.malicious_server else "honest",
                "statistics_known": given.statistics_known,
            },
            "floor": {"kind": given.floor},
            "metrics": {} if path is None else {"lpips_weights": str(path)},
        }
    )


@pytest.mark.parametrize("more", [{}, *OTHERS], ids=str)
def test_a_command_names_the_same_cell(more):
    plan = parse(SMALL | more)
    found = made(plan)
    assert set(found) == {cell.id for cell in plan.cells()}
    for name in [*found][::5]:
        assert found[name].plan is None
        (cell,) = named(found[name].command).cells()
        assert cell.id == name


def test_what_no_command_can_name_comes_as_a_plan(tmp_path):
    plan = parse(RICH)
    found = made(plan)
    assert set(found) == {cell.id for cell in plan.cells()}
    for name, how in found.items():
        assert how.command == f"leakbound audit cell.toml --out cell-{name}"
        (cell,) = parse(tomllib.loads(how.plan)).cells()
        assert cell.id == name


@pytest.mark.parametrize(
    "more",
    [
        {"floor": {"kind": "full", "images": 4}},
        {"risk": {"prior": "gaussian"}},
        {"thresholds": {"psnr": 25}},
        {"data": {"channels": 3}},
    ],
    ids=str,
)
def test_each_setting_that_the_command_lacks_leads_to_a_plan(more):
    found = made(parse(SMALL | more))
    assert found
    assert all(how.plan for how in found.values())


def test_the_defaults_are_those_of_plans():
    plan = plain(parse(SMALL))
    assert (plan["floor"], plan["risk"], plan["threshold"]) == (FLOOR, RISK, THRESHOLD)
    for more in ({}, RICH, *OTHERS):
        for cell in parse(SMALL | more).cells()[::7]:
            assert cell_id(plain(cell)) == cell.id


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
def test_a_plan_that_is_none_offers_nothing(plan):
    cells = [record(cell) for cell in parse(SMALL).cells()]
    assert reruns(plan, cells) == {}


def test_a_cell_of_another_plan_is_not_guessed():
    plan, other = parse(SMALL), parse(SMALL | {"thresholds": {"psnr": 21}})
    header = {"plan": plain(other)}
    assert reruns(header["plan"], [record(c) for c in plan.cells()]) == {}


def test_what_a_terminal_acts_on_is_left_out():
    plan = parse(SMALL | {"data": {"source": "a\x1b]0;title\x07"}})
    assert made(plan) == {}


def test_the_page_shows_it_and_escapes_it(tmp_path, make_cell, make_run):
    plan = parse(SMALL | {"data": {"source": "a <b> & c"}})
    own = plan.cells()[0]
    cell = make_cell(attack=own.attack.name, batch_size=1, psnr=[30.0]) | {"cell": own.id}
    page = write(make_run(tmp_path / "run", [cell], plan=plain(plan))).read_text()
    assert "leakbound attack --attack linear_inversion --model mlp" in page
    assert "--data &#39;a &lt;b&gt; &amp; c&#39; --batch-size 1 --seed 0" in page
    assert own.id in page
