"""The five verbs and what they return, on real digits."""

import pydoc
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import leakbound as lb
from leakbound import captured
from leakbound.attacks.pace import noted
from leakbound.domains import NumberDomain

VERBS = ("simulate", "run_audit", "calibrate", "attack_update", "error_bound")
NOISE = "gaussian_noise,noise_std=0.3"


@pytest.fixture(scope="module")
def scene():
    torch.manual_seed(0)
    digits = lb.data.load("digits")
    layers = nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)
    public, batch = digits.batch(torch.arange(500)), digits.batch(torch.tensor([1000]))
    return nn.Sequential(*layers), batch, public


def simulated(scene):
    model, batch, public = scene
    return lb.simulate(model, batch, attack="linear_inversion", public=public)


def audited(_):
    return lb.run_audit(
        "mlp,hidden=[16]",
        "digits",
        attacks=["linear_inversion"],
        defenses=["none", lb.defenses.GaussianNoise(1.0)],
        seeds=[0],
    )


def calibrated(_):
    return lb.calibrate("psnr>=30 with probability<=0.001", dim=64, norm=[2.0], prior="sphere")


def attacked(scene):
    model, batch, _ = scene
    task = lb.Task.of(model)
    gradient = lb.client.gradient(task, batch.inputs, batch.labels)
    names = [name for name, *_ in task.layout]
    update = dict(zip(names, task.unflatten(gradient.detach()).values(), strict=True))
    before = {name: value.detach() for name, value in model.named_parameters()}
    return lb.attack_update(
        captured.load(update, before, kind="gradient"), model,
        captured.Settings((1, 8, 8), attacks="linear_inversion"), truth=batch,
    )  # fmt: skip


def bounded(scene):
    model, batch, public = scene
    return lb.error_bound(model, batch, NOISE, public=public)


MADE = {
    "simulate": (simulated, "exposed"),
    "run_audit": (audited, "exposed"),
    "calibrate": (calibrated, "undecided"),
    "attack_update": (attacked, "exposed"),
    "error_bound": (bounded, "undecided"),
}


@pytest.fixture(scope="module", params=VERBS)
def made(request, scene):
    make, verdict = MADE[request.param]
    return make(scene), verdict


def test_every_result_has_a_verdict_a_figure_and_a_page(made, tmp_path):
    found, verdict = made
    assert found.verdict == verdict
    found.plot().savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000
    assert "<script" not in found._repr_html_()
    page = found.to_html(tmp_path / "page.html").read_text("utf-8")
    assert page.lower().startswith("<!doctype html>")
    assert "http-equiv" in page
    assert found.to_html(tmp_path / "page.html") == tmp_path / "page.html"  # ours: written anew


def test_a_page_never_replaces_a_file_of_the_users(made, tmp_path):
    path = tmp_path / "mine.html"
    path.write_text("mine")
    with pytest.raises(ValueError, match=r"mine\.html"):
        made[0].to_html(path)
    assert path.read_text() == "mine"


def test_help_shows_the_five_verbs_first():
    text = pydoc.plain(pydoc.render_doc(lb))
    places = [text.index(f"{verb}(") for verb in VERBS]
    assert places == sorted(places)
    assert places[-1] < 1500
    assert tuple(lb.__all__[:5]) == VERBS


def test_a_simulation_is_a_round_played_by_hand(scene):
    model, batch, _ = scene
    found = lb.simulate(model, batch, attack="inverting_gradients,steps=5", seed=3)
    task = lb.Task.of(model)
    sources = [lb.stream(3, "defense", 0), lb.stream(3, "defense", 1)]
    played = lb.play(task, [batch], lb.defenses.NoDefense(), sources)
    attack = lb.attacks.inverting_gradients(5)
    answer = noted(attack(played.observation, lb.stream(3, "attack", "inverting_gradients")))
    assert torch.equal(found.answer.inputs, answer.inputs)
    error = float((lb.pair(batch, answer).inputs - batch.inputs).square().mean())
    assert found.scores[0] == pytest.approx(-10 * torch.tensor(error).log10().item(), abs=1e-3)
    assert found.round.update.rows.shape == played.update.rows.shape


def test_the_bound_holds_for_the_best_attack(scene):
    """No search may be better on average than the bound under the prior it rests on."""
    model, _, public = scene
    digits = lb.data.load("digits")
    bound = bounded(scene).error.value
    errors = []
    for index in range(600, 612):
        found = lb.simulate(
            model, digits.batch(torch.tensor([index])), defense=NOISE, public=public, seed=index,
            attack="inverting_gradients,steps=200", error_bound="none",
        )  # fmt: skip
        errors.append(10 ** (-found.scores[0] / 10))
    assert sum(errors) / len(errors) > bound > 0


@dataclass(frozen=True)
class Worst(NumberDomain):
    """Values, near if none is far off."""

    @property
    def distance_is_rmse(self):
        return False

    def distance(self, a, b):
        return (a.detach().cpu().double() - b.detach().cpu().double()).abs().flatten(1).amax(1)


def test_a_domain_of_ones_own(scene):
    model, batch, public = scene
    given = {"attack": "inverting_gradients,steps=60", "defense": NOISE, "public": public}
    plain = lb.simulate(model, batch, **given)
    own = lb.simulate(model, batch, **given, domain=Worst((1, 8, 8)))
    assert torch.equal(plain.reconstruction, own.reconstruction)
    assert plain.assessment.bounds
    assert own.assessment.bounds == ()
    assert "none is known" in own.assessment.bounds_note


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch": "digits"}, "batch is a str"),
        ({"attack": "inverting_gradient"}, "did you mean"),
        ({"defense": "gaussian_noise,noise_std=[0.1, 0.2]"}, "defense names 2 settings"),
        ({"attack": "dlg,steps=[1, 2]"}, "attack names 2 settings"),
        ({"psnr": -1.0}, "psnr"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(scene, change, words):
    model, batch, _ = scene
    given = {"batch": batch, "attack": "linear_inversion"} | change
    with pytest.raises(ValueError, match=words):
        lb.simulate(model, **given)


def test_an_audit_continues_in_its_folder(tmp_path):
    given = {"attacks": ["linear_inversion"], "seeds": [0], "out": tmp_path / "run"}
    first = lb.run_audit("mlp,hidden=[16]", "digits", **given)
    again = lb.run_audit("mlp,hidden=[16]", "digits", **given)
    assert first.assessments == again.assessments
    with pytest.raises(ValueError, match="another plan"):
        lb.run_audit("mlp,hidden=[17]", "digits", **given)


def test_an_object_that_no_name_describes_is_refused():
    with pytest.raises(ValueError, match="which no name and settings describe"):
        lb.run_audit("mlp", "digits", defenses=[object()])
