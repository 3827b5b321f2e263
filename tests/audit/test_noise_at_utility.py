"""The noise at an accepted utility: by own trainings and an own Jacobian, and what is refused."""

import json
from statistics import fmean

import pytest
import torch
from torch.func import functional_call, grad, jacrev

from leakbound import audit
from leakbound.audit import experiment
from leakbound.audit.plan import TrainingUnit, build_defense
from leakbound.audit.utility import train
from leakbound.cli import main
from leakbound.protocol import resolve
from leakbound.registry import Spec

PLAN = {
    "name": "costs",
    "seeds": [0, 1],
    "data": {"source": "digits"},
    "models": [{"name": "mlp", "hidden": [6], "activation": "tanh"}],
    "attacks": [{"name": "linear_inversion"}],
    "defenses": [{"name": "none"}, {"name": "optimal_noise", "rule": "energy"}],
    "utility": {"rounds": 10, "repeats": 2, "clients": 2, "batch_size": 4, "learning_rate": 0.01},
}


def _plan(**changes):
    return audit.parse(PLAN | changes)


@pytest.fixture(scope="module")
def found():
    return audit.noise_at_utility(_plan(), "loss<=0.05")


def _loss(plan, links):
    context = audit.PlanContext(plan.data)
    units = [TrainingUnit(plan.data, plan.models[0], links, s, plan.utility) for s in plan.seeds]
    return [train(unit, context)["training_loss"] for unit in units]


def test_more_noise_costs_more_than_the_target(found):
    """By trainings outside of the search."""
    plain = _loss(found.plan, ())
    equal, optimal = found.noises
    assert (equal.defense, optimal.defense) == ("gaussian_noise", "optimal_noise,rule=energy")
    for one, links in zip(found.noises, found.plan.defenses[1:], strict=True):
        costs = [a - b for a, b in zip(_loss(found.plan, links), plain, strict=True)]
        assert dict(links[0].settings)["noise_std"] == one.noise_std
        assert one.cost.mean == pytest.approx(fmean(costs), abs=1e-5)
        assert one.cost.mean <= 0.05
        rest = [pair for pair in links[0].settings if pair[0] != "noise_std"]
        more = Spec(links[0].name, (*rest, ("noise_std", 1.12 * one.noise_std)))
        assert fmean(_loss(found.plan, (more,))) - fmean(plain) > 0.05
    assert found.plan.defenses[0] == ()


def test_the_information_is_that_of_the_whole_jacobian(found):
    context = audit.PlanContext(found.plan.data)
    ratios = []
    for seed in found.plan.seeds:
        task = context.task(found.plan.models[0], seed)
        (batch,) = context.batches(4, 1, seed)

        def gradient(x, task=task, batch=batch):
            def loss(flat):
                outputs = functional_call(task.model, task.unflatten(flat), (x,))
                return torch.nn.functional.cross_entropy(outputs, batch.labels)

            return grad(loss)(task.parameters)

        s = jacrev(gradient)(batch.inputs).flatten(1).square().sum(1)
        variances = [
            torch.as_tensor(resolve(build_defense(links), task, 4).links[0].covariance)
            for links in found.plan.defenses[2:]
        ]
        equal = found.noises[0].noise_std ** 2
        ratios.append(float((s / variances[0]).sum() / (s / equal).sum()))
    assert found.noises[1].information.mean == pytest.approx(fmean(ratios), rel=0.05)
    assert found.noises[0].information.mean == 1


@pytest.fixture
def priced(monkeypatch):
    """Trainings that cost what a curve says: optimal noise at four times the deviation of equal."""

    def priced(unit, context):
        (link,) = unit.defense or (Spec("none"),)
        std = dict(link.settings).get("noise_std", 0.0)
        std *= 1.0 if link.name == "gaussian_noise" else 0.25
        accuracy = 0.9 - min(0.5, std / 10)
        return {
            "training_loss": 1.0 + unit.seed + min(9.0, std**2),
            "curve": [[0, 1.0]],
            "accuracy": accuracy,
            "balanced_accuracy": accuracy,
            "majority": 0.1,
            "tested": 500,
            "auc": None,
            "auc_error": None,
        }

    monkeypatch.setattr(experiment, "train", priced)


@pytest.mark.parametrize(
    ("target", "std"), [("loss<=0.25", 0.5), ("points<=2", 0.2), ("loss<=1e-4", 0.01)]
)
def test_the_search_finds_what_a_known_curve_says(priced, target, std):
    equal, optimal = audit.noise_at_utility(_plan(), target).noises
    for one, wanted in ((equal, std), (optimal, 4 * std)):
        assert wanted / 1.1 <= one.noise_std <= wanted * (1 + 1e-9)
        assert one.cost.n == 2


def test_equal_noise_may_name_the_cost(priced):
    found = audit.noise_at_utility(_plan(), "noise<=0.03")
    equal, optimal = found.noises
    assert found.most == pytest.approx(0.03**2, abs=1e-6)
    assert equal.noise_std == 0.03
    assert 0.12 / 1.1 <= optimal.noise_std <= 0.12 * 1.01


def test_costs_that_no_noise_has_are_refused(priced, monkeypatch):
    with pytest.raises(ValueError, match="still costs less than the target"):
        audit.noise_at_utility(_plan(), "loss<=20")
    with pytest.raises(ValueError, match="so there is nothing to match"):
        audit.noise_at_utility(_plan(), "noise<=1e-9")
    real = experiment.train

    def diverged(unit, context):
        return real(unit, context) | ({"training_loss": None} if unit.defense else {})

    monkeypatch.setattr(experiment, "train", diverged)
    with pytest.raises(ValueError, match="still costs more than the target"):
        audit.noise_at_utility(_plan(), "loss<=20")
    monkeypatch.setattr(experiment, "train", lambda *given: real(*given) | {"majority": 0.9})
    with pytest.raises(ValueError, match="did not beat the majority class"):
        audit.noise_at_utility(_plan(), "points<=2")
    monkeypatch.setattr(experiment, "train", lambda *given: 1 / 0)
    with pytest.raises(ValueError, match="ended as failed: ZeroDivisionError"):
        audit.noise_at_utility(_plan(), "loss<=0.1")


def test_noise_that_leaks_the_batch_has_no_information(priced):
    plan = _plan(defenses=[{"name": "optimal_dp_sgd", "clamp": 1e-3}])
    equal, other = audit.noise_at_utility(plan, "loss<=0.01").noises
    assert equal.information.mean == 1
    assert other.information is None
    assert "which coordinates get no noise depends on private data" in other.why


def _ended(line):
    with pytest.raises(SystemExit) as ended:
        main(line)
    return ended.value.code


def test_the_command(priced, tmp_path, capsys):
    path = tmp_path / "plan.toml"
    path.write_text(
        """
        name = "costs"
        seeds = [0, 1]
        data = {source = "digits"}
        models = [{name = "mlp", hidden = [6]}]
        attacks = [{name = "linear_inversion"}]
        defenses = [{name = "optimal_noise"}, {name = "optimal_dp_sgd", clamp = 0.001}]
        utility = {rounds = 5, repeats = 2}
        """
    )
    line = ["calibrate", "--plan", str(path), "--target", "points<=2"]
    assert _ended(line) == 0
    shown = capsys.readouterr().out
    assert "at most 2 (points of accuracy) more than undefended" in shown
    assert "optimal_dp_sgd,clamp=0.001: which coordinates get no noise" in shown
    assert "over 2 seeds" in shown
    assert _ended([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["defense"] for one in found["noises"]][1:] == [
        "optimal_noise",
        "optimal_dp_sgd,clamp=0.001",
    ]
    assert found["most"] == 2
    assert _ended([*line, "--steps", "3"]) == 2
    assert "steps is 3, which changes nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "target", "message"),
    [
        ({}, "psnr>=20 with probability<=0.1", "a utility to keep; write it as in"),
        ({}, "loss<=0", "give a number above 0"),
        ({}, "loss<=1.2.3", "give a number above 0"),
        ({"models": [{"name": "mlp"}, {"name": "lenet"}]}, "loss<=0.1", "has 2 models; give one"),
        ({"seeds": [0]}, "loss<=0.1", "trains 1 times for 10 rounds"),
        ({"utility": {"rounds": 0}}, "loss<=0.1", "for 0 rounds; give"),
        ({"defenses": ["magnitude_pruning"]}, "loss<=0.1", "magnitude_pruning, with 0 settings"),
        ({"defenses": ["optimal_noise,utility_std=0.1"]}, "loss<=0.1", "they set the same level"),
    ],
)
def test_what_has_no_meaning_is_refused(changes, target, message):
    if "defenses" in changes:
        name, *settings = changes["defenses"][0].split(",")
        pairs = (one.split("=") for one in settings)
        changes = {"defenses": [{"name": name} | {key: float(v) for key, v in pairs}]}
    with pytest.raises(ValueError, match=message):
        audit.noise_at_utility(_plan(**changes), target)


def test_each_training_is_told():
    told = []
    audit.noise_at_utility(_plan(), "loss<=0.05", watch=lambda *now: told.append(now))
    assert [done for done, _, _ in told] == list(range(len(told)))
    assert all(done < total for done, total, _ in told)
    assert {"none", "gaussian_noise", "optimal_noise"} <= {
        now.partition(",")[0] for *_, now in told
    }
