"""A defense that a model refuses is said before the start, and counts as not run."""

import pytest

from leakbound import audit
from leakbound.assess.record import (
    NOT_RUN,
    PROTECTED,
    UNDECIDED,
    VERDICTS,
    Training,
    decode,
)
from leakbound.assess.verdict import MEANINGS, of_configuration, of_run, together
from leakbound.audit import experiment
from leakbound.cli import main
from leakbound.gate import policy, rules
from leakbound.report import folder

MODELS = """
from torch import nn


def normed(input_shape, classes):
    layers = [nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, classes)]
    return nn.Sequential(*layers).train()


def breaks(input_shape, classes):
    raise RuntimeError("no model")
"""
PLAN = """
seeds = [0, 1]
batch_sizes = [4]
[data]
source = "digits"
[[models]]
name = "refusing:normed"
[[models]]
name = "mlp"
[[attacks]]
name = "inverting_gradients"
steps = 3
[[defenses]]
name = "none"
[[defenses]]
name = "dp_sgd"
noise_multiplier = 1.0
[error_bound]
kind = "none"
[risk]
probability = 0
"""
pytestmark = pytest.mark.filterwarnings("default:dp_sgd on refusing")  # pytest makes them errors
REASON = "the model has batch norm in training mode, so no example has a separate gradient"


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "refusing.py").write_text(MODELS)
    (tmp_path / "plan.toml").write_text(PLAN)
    return tmp_path / "plan.toml"


def call(*words):
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    return caught.value.code


def test_a_refused_defense_is_known_before_the_start(plan, capsys):
    """ "8 configurations: 8 undecided" was said of 20 experiments that failed of 32."""
    assert call("audit", plan, "--out", "run", "--workers", 1) == 0
    shown = capsys.readouterr()
    warned = f"dp_sgd on refusing:normed is not run (2 experiments): {REASON}"
    assert warned in " ".join(shown.err.split())
    summary = " ".join(shown.out.split())
    assert "defense): 2 facts exposed, 1 not run, 1 undecided" in summary
    run = folder.read(plan.parent / "run")
    ends = {a.status for a in run.assessments if a.model.name != "mlp" and a.defense.parameters}
    assert ends == {"not_applicable"}
    page = (plan.parent / "run" / "report.html").read_text()
    assert "1 configuration was not run." in page
    assert "3 of 3 are not protected (2 facts exposed and 1 undecided)" in page
    assert 'class="badge not-run"' in page


def test_it_is_said_before_any_experiment_runs(plan, monkeypatch):
    def never(*given, **named):
        raise AssertionError("an experiment runs")
        yield

    with pytest.warns(UserWarning, match=REASON), pytest.raises(AssertionError, match="runs"):
        audit.audit(audit.load(plan), plan.parent / "run", run=never)


def test_a_training_under_a_refused_defense_did_not_fail(plan, capsys):
    plan.write_text(PLAN + "[utility]\nrounds = 2\nrepeats = 1\nclients = 2\nbatch_size = 4\n")
    assert call("train", plan, "--out", "run", "--workers", 1) == 0
    lines = (plan.parent / "run" / "utility.jsonl").read_bytes().splitlines(keepends=True)
    trainings = [decode(line, Training) for line in lines]
    ends = {(t.model.name, t.defense.name): t.status for t in trainings}
    assert ends.pop(("refusing:normed", "dp_sgd")) == "not_applicable"
    assert set(ends.values()) == {"ok"}
    assert "failed" not in capsys.readouterr().err


def test_experiments_that_fail_are_counted_as_failed(plan, monkeypatch, capsys):
    def broken(*given, **named):
        raise RuntimeError("broken")

    monkeypatch.setattr("leakbound.attacks.GradientMatching.many", broken)
    assert call("audit", plan, "--out", "run", "--workers", 1) == 1
    summary = " ".join(capsys.readouterr().out.split())
    assert "defense): 4 not run; 6 of 8 experiments failed" in summary
    page = (plan.parent / "run" / "report.html").read_text()
    assert "Nothing is known: 4 configurations were not run." in page


def test_a_gate_cannot_decide_what_did_not_run(plan):
    noisy = 'name = "gaussian_noise"\nnoise_std = 1.0'  # without noise, updates reveal facts
    plan.write_text(PLAN.replace('name = "none"', noisy))
    call("audit", plan, "--out", "run", "--workers", 1)
    gate = plan.parent / "policy.toml"
    gate.write_text('[[audit]]\nfolder = "run"\nexposed = 0\nverdict = "undecided"\n')
    answers = {one.key: one for one in rules.decide(policy.read(gate))}
    assert {one.answer for one in answers.values()} == {policy.UNSURE}
    assert "1 configurations were not run" in answers["exposed"].found


def test_what_did_not_run_is_no_evidence_of_protection(make_assessment):
    assert together([PROTECTED, NOT_RUN]) == UNDECIDED
    assert together([NOT_RUN]) == NOT_RUN
    assert together(["exposed", NOT_RUN]) == "exposed"
    idle = make_assessment(batch_size=3, status="not_applicable", reason="no", verdict=None)
    assert of_configuration([idle]) == NOT_RUN
    assert of_run([make_assessment(verdict=PROTECTED, psnr=[1.0]), idle]) == UNDECIDED
    assert VERDICTS.index(NOT_RUN) < VERDICTS.index(UNDECIDED)
    assert set(MEANINGS) == set(VERDICTS)


def test_nothing_is_tried_for_longer_than_its_time(plan, monkeypatch):
    known = audit.load(plan)
    monkeypatch.setattr(experiment, "TRIAL", -1.0)
    assert experiment.refused(known.experiments(), audit.PlanContext(known.data)) == []
