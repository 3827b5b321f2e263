"""What a policy may state, and whether audits, deployments and models meet it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from leakbound import models
from leakbound.assess.record import AttackerRow, Reidentification, Training
from leakbound.gate import policy, rules
from leakbound.randomness import stream

SPEC = importlib.util.spec_from_file_location(
    "made_up_for_gates", Path(__file__).parent.parent / "report" / "conftest.py"
)
made_up = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(made_up)
PRIVATE = """
unit = "client"
rounds = 4
clip = {norm = 1.0, kind = "l2", at = "client"}
noise = {multiplier = 4.0, at = "client", seeded = false}
participation = {law = "all"}
correlation = "none"
"""


@pytest.fixture
def decided(tmp_path):
    """The requirements of a policy text, by key; its folder holds two audits and a deployment."""
    made_up.bounded(tmp_path / "run", seeds=3)
    made_up.bounded(tmp_path / "before", seeds=3)
    (tmp_path / "deployment.toml").write_text(PRIVATE)

    def decide(text, **more):
        path = tmp_path / "policy.toml"
        path.write_text(text)
        found = rules.decide(policy.read(path), **more)
        for one in found:  # its numbers say what its answer says
            if one.answer != policy.UNSURE and one.found != "infinite":
                value, limit = one.numbers
                assert (value <= limit) == (one.answer == policy.HOLDS), one
        return [(one.key, one.answer, one) for one in found]

    return decide


def answers(found):
    return {key: answer for key, answer, _ in found}


WRONG = [
    ("", "checks nothing"),
    ("[audits]\nfolder = 'a'", "line 1: there is no table 'audits'; did you mean 'audit'"),
    ("[audit]\nfolder = 'a'", r"line 1: audit is no list of tables; write \[\[audit\]\]"),
    ("\n[[audit]]\nfolder = 'a'\nexpose = 0", "line 4: .*no key 'expose'; did you mean 'exposed'"),
    ("[[audit]]\nfolder = 'a'\nexposed = 'x'", "line 3: exposed: Expected `int"),
    ("[[audit]]\nfolder = 'a'\nexposed = true", "line 3: exposed: Expected `int"),
    ("[[audit]]\nfolder = 'a'\nexposed = -1", "line 3: exposed: Expected `int` >= 0"),
    ("[[audit]]\nplan = 'a'\n[[audit]]\nverdict = 'safe'", "line 4: verdict: Invalid enum"),
    ("[[deployment]]\nepsilon = 1.0", "line 1: .*missing required field `file`"),
    ("[[deployment]]\nfile = 'a'\nepsilon = nan", "line 3: epsilon"),
    ("[[deployment]]\nfile = 'a'\nsuccess = 2.0", "line 3: success: Expected `float` <= 1"),
    ("[[deployment]]\nfile = 'a'\nunit = ['patient']", "line 3: unit"),
    ("[[client]]\nrepeats = 7", "line 2: repeats: Expected `int`"),
    ("[[audit]\n", "is not valid TOML"),
    ("[[audit]]\nexposed = 0", "line 1: .*names no audit; give folder or plan"),
    ("[[audit]]\nfolder = 'a'\nhigher_scores = 0", "line 1: .*; give no_worse_than"),
    ("[[model]]\nmodel = 'mlp'\ninput_shape = [0]", "line 3: input_shape"),
    (
        "[[client]]\nmodel = 'a'\ninput_shape = [4]\nupdate = 'a:b'\ndeployment = 'd'\n"
        "reports = ['rounds']",
        "line 1: .*; give facts",
    ),
]


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_a_wrong_policy_is_refused_with_its_line(tmp_path, text, words):
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(ValueError, match=words):
        policy.read(tmp_path / "p.toml")


def test_an_audit(decided):
    found = decided(
        "[[audit]]\nfolder = 'run'\nexposed = 3\n"
        "[[audit]]\nfolder = 'run'\nexposed = 4\n"
        "[[audit]]\nfolder = 'run'\ndefenses = ['bounded_noise']\n"
        "verdict = 'protected from strangers'\n"
        "[[audit]]\nfolder = 'run'\ndefenses = ['adaptive_noise budget=1']\n"
        "verdict = 'protected from strangers'\n"
        "[[audit]]\nfolder = 'run'\nverdict = 'protected from strangers'\n"
    )
    exposed = [row for row in found if row[0] == "exposed"]
    count = int(exposed[0][2].found.split()[0])
    assert [row[1] for row in exposed] == [
        policy.BROKEN if count > most else policy.HOLDS for most in (3, 4)
    ]
    assert 0 < count < 7
    verdicts = [row[1] for row in found if row[0] == "verdict"]
    assert verdicts == [policy.HOLDS, policy.UNSURE, policy.BROKEN]
    assert [row[2].line for row in found] == [3, 6, 10, 14, 17]


def test_what_an_update_adds_for_who_knows_more(decided, tmp_path):
    text = "[[audit]]\nfolder = 'run'\n{}\n"
    found = decided(text.format("gain = 0.1"))
    assert answers(found) == {"gain": policy.UNSURE}
    assert "no bound" in found[0][2].found
    assert answers(decided(text.format("known = 'age,sex'"))) == {"known": policy.UNSURE}

    def edit(a):
        anyone = AttackerRow(attacker="anyone", goal="any goal", gain=0.08)
        threat = replace(a.threat, known="age,sex,zip")
        return {"attackers": (anyone,), "threat": threat}

    made_up.changed(tmp_path / "run", edit)
    assert answers(decided(text.format("gain = 0.1"))) == {"gain": policy.HOLDS}
    assert answers(decided(text.format("gain = 0.07"))) == {"gain": policy.BROKEN}
    # An attacker who has more is a stronger one, who has less a weaker one.
    assert answers(decided(text.format("known = 'age,sex'"))) == {"known": policy.HOLDS}
    assert answers(decided(text.format("known = 'age,job'"))) == {"known": policy.UNSURE}


def test_nobody_may_be_named_more_often(decided, tmp_path):
    """The bound decides that it holds, an attack that it is broken; few names show nothing."""
    text = "[[audit]]\nfolder = 'run'\nnamed = {}\n"
    found = decided(text.format(0.05))
    assert answers(found) == {"named": policy.UNSURE}
    assert "no bound" in found[0][2].found

    def edit(right, **bound):
        def edited(a):
            some = (right,) * len(a.matched)
            found = Reidentification(matcher="nearest", right=some, candidates=100, **bound)
            return {"reidentified": (found,)}

        return edited

    for right, bound, limit, answer in [
        (False, {"noise_multiplier": 2.0, "bound": 0.034}, 0.05, policy.HOLDS),
        (False, {"noise_multiplier": 1.0, "bound": 0.093}, 0.05, policy.UNSURE),
        (True, {"noise_multiplier": 1.0, "bound": 0.093}, 0.05, policy.BROKEN),
        (True, {}, 0.05, policy.BROKEN),
        (True, {}, 1, policy.HOLDS),
    ]:
        made_up.changed(tmp_path / "run", edit(right, **bound))
        assert answers(decided(text.format(limit))) == {"named": answer}


def test_what_a_training_adds(decided):
    text = "[[deployment]]\nfile = 'deployment.toml'\nunit = ['client']\ngain = {}\n"
    found = decided(text.format(0.2))
    # mu = sqrt(4) / 4 = 0.5: the total variation is 2 Phi(mu / 2) - 1 = 0.1974.
    assert [row[:2] for row in found][1:] == [("gain", "holds")] * 2
    assert found[1][2].found in ("at most 0.1974", "at most 0.1975")
    assert ("gain", "broken") in [row[:2] for row in decided(text.format(0.19))]


def test_failed_and_missing_experiments_cannot_be_told(decided, tmp_path):
    text = "[[audit]]\nfolder = 'run'\ndefenses = ['bounded_noise']\nexposed = 0\n"
    assert answers(decided(text)) == {"exposed": policy.HOLDS}

    def edit(a):
        if a.defense.name != "bounded_noise" or a.seed:
            return {}
        gone = {"metrics": {}, "baseline": (), "matched": (), "release": None, "objective": None}
        return gone | {"status": "failed", "reason": "killed", "verdict": "undecided"}

    made_up.changed(tmp_path / "run", edit)
    found = decided(text)
    assert answers(found) == {"exposed": policy.UNSURE}
    assert "2 experiments failed" in found[0][2].found
    made_up.changed(tmp_path / "before", lambda a: None if a.seed == 2 else {})
    found = decided(text.replace("'run'", "'before'"))
    assert answers(found) == {"exposed": policy.UNSURE}
    assert "14 experiments are missing" in found[0][2].found


def test_broken_counts_before_what_cannot_be_told(decided):
    found = decided("[[audit]]\nfolder = 'run'\nexposed = 0\nno_worse_than = 'nowhere'\n")
    assert answers(found) == {"exposed": policy.BROKEN, "audit": policy.UNSURE}
    assert "nowhere" in found[1][2].found
    assert rules.worst([row[1] for row in found]) == policy.BROKEN
    assert rules.worst([policy.HOLDS, policy.UNSURE]) == policy.UNSURE
    assert policy.CODES == {policy.HOLDS: 0, policy.BROKEN: 1, policy.UNSURE: 2}


def test_no_worse_than(decided, tmp_path):
    text = "[[audit]]\nfolder = 'run'\nno_worse_than = 'before'\nhigher_scores = 0\n"
    both = {"no_worse_than": policy.HOLDS, "higher_scores": policy.HOLDS}
    assert answers(decided(text)) == both

    def higher(a):
        return {"metrics": a.metrics | {"psnr": tuple(v + 2 + 0.1 * a.seed for v in a.scores)}}

    made_up.changed(tmp_path / "run", higher)
    found = decided(text)
    assert answers(found)["higher_scores"] == policy.BROKEN
    assert "14 of 14; about 0.4 by chance" in found[1][2].found

    def worse(a):
        return {"verdict": "exposed"} if a.defense.name == "adaptive_noise" else {}

    made_up.changed(tmp_path / "run", worse)
    found = decided(text)
    assert answers(found)["no_worse_than"] == policy.BROKEN
    assert "adaptive_noise" in found[0][2].found
    other = text.replace("\nno", "\ndefenses = ['bounded_noise']\nno")
    assert answers(decided(other))["no_worse_than"] == policy.HOLDS
    made_up.changed(tmp_path / "run", lambda a: {"threat": replace(a.threat, labels_known=False)})
    found = decided(text)
    assert set(answers(found).values()) == {policy.UNSURE}  # the attackers are not the same
    assert "threat models differ" in found[0][2].found


def test_accuracy(decided, tmp_path):
    text = "[[audit]]\nfolder = 'run'\ndefenses = ['bounded_noise']\naccuracy_cost = {}\n"

    def cost(value, spread=0.0):
        def edit(t):
            lost = 0.01 * value + spread * t.seed if t.defense.name == "bounded_noise" else 0.0
            return {"accuracy": 0.9 - lost}

        made_up.changed(tmp_path / "run", edit, Training)
        return answers(decided(text.format("2.0")))["accuracy_cost"]

    assert cost(1.0) == policy.HOLDS
    assert cost(3.0) == policy.BROKEN
    assert cost(1.9, 0.01) == policy.UNSURE  # the interval of two seeds is wide
    made_up.changed(tmp_path / "run", lambda t: {"status": "failed", "accuracy": None}, Training)
    assert answers(decided(text.format("2.0")))["accuracy_cost"] == policy.UNSURE
    every = "[[audit]]\nfolder = 'before'\naccuracy_cost = {}\n"
    assert answers(decided(every.format(60.0))) == {"accuracy_cost": policy.HOLDS}
    (tmp_path / "run" / "utility.jsonl").unlink()
    assert answers(decided(text.format("2.0")))["accuracy_cost"] == policy.UNSURE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[audit]]\nfolder = 'none'\nexposed = 0", "holds no run.json"),
        ("[[audit]]\nfolder = 'run'", "requires nothing"),
        ("[[audit]]\nfolder = 'run'\ndefenses = ['x']\nexposed = 0", "no configuration has"),
        ("[[audit]]\nfolder = 'run'\ndefenses = ['none', 'x']\nexposed = 0", "defense 'x'; known"),
        ("[[audit]]\nplan = 'no.toml'\nexposed = 0", "no.toml"),
        ("[[deployment]]\nfile = 'no.toml'", "cannot be read"),
        ("[[deployment]]\nfile = 'deployment.toml'\nunit = ['example']\nepsilon = 1.0",
         "says nothing of example"),
        ("[[deployment]]\nfile = 'deployment.toml'\nunit = ['client', 'example']\nepsilon = 9.0",
         "says nothing of client, example"),
        ("[[deployment]]\nfile = 'deployment.toml'\naudience = []\nepsilon = 9.0", "says nothing"),
        ("[[model]]\nmodel = 'mlpp'\ninput_shape = [4]", "did you mean 'mlp'"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_says_why(decided, text, words):
    (found,) = (row for row in decided(text) if row[1] == policy.UNSURE)
    assert words in found[2].found


def test_a_plan_runs_within_its_time(decided, tmp_path):
    (tmp_path / "plan.toml").write_text(
        "seeds = [0]\n[data]\nsource = 'digits'\n[[models]]\nname = 'mlp'\nhidden = [8]\n"
        "[[attacks]]\nname = 'linear_inversion'\n[[defenses]]\nname = 'none'\n"
    )
    text = "[[audit]]\nplan = 'plan.toml'\nexposed = {}\nseconds = {}\n"
    assert answers(decided(text.format(1, 60))) == {"exposed": policy.HOLDS}
    assert answers(decided(text.format(0, 60))) == {"exposed": policy.BROKEN}
    (found,) = decided(text.format(0, 0))
    assert found[1] == policy.UNSURE
    assert "give more seconds" in found[2].found
    kept = "folder = 'kept'\n" + text.format(0, 60)[len("[[audit]]\n") :]
    assert answers(decided("[[audit]]\n" + kept)) == {"exposed": policy.BROKEN}
    assert (tmp_path / "kept" / "records.jsonl").exists()


def test_a_deployment(decided, tmp_path):
    text = "[[deployment]]\nfile = 'deployment.toml'\nunit = ['client']\nepsilon = {}\n"
    rows = decided(text.format(4.38))
    assert [row[:2] for row in rows] == [("mistakes", "holds")] + [("epsilon", "holds")] * 2
    # of mu = sqrt(4) / 4 = 0.5: by the Gaussian mechanism's own curve
    assert "at most 1.9" in rows[1][2].found
    assert {row[1] for row in decided(text.format(1.8))[1:]} == {policy.BROKEN}
    near = text.format(4.38) + "success = {}\nprior = 0.01\naudience = ['server']\n"
    # by Neyman and Pearson: Phi(Phi^-1(0.01) + 0.5) = 0.0339
    assert answers(decided(near.format(0.034)))["success"] == policy.HOLDS
    assert answers(decided(near.format(0.0338)))["success"] == policy.BROKEN
    path = tmp_path / "deployment.toml"
    path.write_text(PRIVATE.replace("rounds = 4\n", ""))
    found = decided(text.format(4.38))
    assert {row[1] for row in found[1:]} == {policy.UNSURE}
    assert "not stated: rounds" in found[1][2].found
    path.write_text(PRIVATE.replace("seeded = false", "seeded = true"))
    found = decided(text.format(400.0))
    assert found[0][:2] == ("mistakes", policy.BROKEN)
    assert (found[0][2].file, found[0][2].line) == (str(path), 5)
    assert found[1][1] == policy.BROKEN


def test_a_deployment_without_a_requirement_cannot_be_decided(decided, tmp_path):
    text = "[[deployment]]\nfile = 'deployment.toml'\n"
    bare = PRIVATE.replace('kind = "l2"', 'kind = "none"')
    bare = re.sub("(?m)^noise = .*$", 'noise = {at = "none"}', bare)
    (tmp_path / "deployment.toml").write_text(bare)
    rows = decided(text)
    assert [row[1] for row in rows] == [policy.HOLDS, policy.UNSURE]
    assert "state epsilon, success or gain" in rows[1][2].found
    assert [row[1] for row in decided(text + "mistakes = 0\n")] == [policy.HOLDS]


FOUND = """{"claims": {"declared": 4.0, "noise_multiplier": 1.0}, "confidence": 0.95, "runs": 500,
"power": 5.0, "lower": [{"method": "a", "epsilon": 3.0, "assumes": "nothing", "shown": "b"}],
"code": 0}"""


def test_an_epsilon_audit(decided, tmp_path):
    text = "[[epsilon_audit]]\nfile = 'found.json'\n"
    (found,) = decided(text)
    assert found[1] == policy.UNSURE
    assert "give what leakbound audit-epsilon --json printed" in found[2].found
    path = tmp_path / "found.json"
    path.write_text(FOUND)
    (found,) = decided(text)
    assert found[:2] == ("file", policy.HOLDS)
    assert found[2].numbers == (3.0, 4.0)
    assert answers(decided(text + "epsilon = 3.1")) == {"file": policy.HOLDS}
    (found,) = decided(text + "epsilon = 2.9")
    assert found[1] == policy.BROKEN
    assert "epsilon is at least 3 " in found[2].found
    assert "the claim is 2.9" in found[2].found
    (found,) = decided(text + "epsilon = 9.0")  # the file's own claim counts, too
    assert found[2].numbers == (3.0, 4.0)
    path.write_text(FOUND.replace("4.0", "2.0"))  # and its "code" does not
    assert answers(decided(text)) == {"file": policy.BROKEN}
    path.write_text(FOUND.replace('"declared": 4.0, "noise_multiplier": 1.0', ""))
    assert answers(decided(text)) == {"file": policy.UNSURE}
    path.write_text(FOUND.replace('"power": 5.0', '"power": 3.0'))  # too few runs to show 4
    assert answers(decided(text)) == {"file": policy.UNSURE}


def test_a_model(decided, tmp_path):
    text = "[[model]]\nmodel = 'mlp,hidden=[64]'\ninput_shape = [1, 6, 6]\nclasses = 3\n"
    net = models.mlp(input_shape=(1, 6, 6), classes=3, generator=stream(0, "m"), hidden=(64,))
    save_file(net.state_dict(), tmp_path / "honest.safetensors")
    assert answers(decided(text)) == {"file": policy.HOLDS}
    found = decided(text + "file = 'honest.safetensors'\n")
    assert answers(found) == {"file": policy.HOLDS}
    assert "does not prove safety" in found[0][2].found
    bad = dict(net.state_dict())
    bad["1.weight"] = torch.ones_like(bad["1.weight"])  # all units measure one thing
    save_file(bad, tmp_path / "bad.safetensors")
    found = decided(text + "file = 'bad.safetensors'\n")
    assert answers(found) == {"file": policy.BROKEN}
    assert "units of '1'" in found[0][2].found
    save_file({"other": torch.ones(2)}, tmp_path / "other.safetensors")
    assert answers(decided(text + "file = 'other.safetensors'\n")) == {"model": policy.UNSURE}
