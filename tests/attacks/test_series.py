"""Attacks on series and on models of pixels: they run, and what they reconstruct."""

from statistics import median

import pytest
import torch
from torch import nn

import leakbound as lb
from leakbound import models
from leakbound.assess.measure import guesses
from leakbound.attacks import (
    Attack,
    GradientMatching,
    dlg,
    idlg,
    inverting_gradients,
    inverting_gradients_large_steps,
    sparse_gradient_inversion,
    strong_matching,
)
from leakbound.attacks.across_rounds import AcrossRounds
from leakbound.attacks.matching.images import NEAR, images_for
from leakbound.attacks.mixed_start import MixedStart
from leakbound.client import example_gradients
from leakbound.core import Batch, NotApplicable, Task, ThreatModel
from leakbound.data.packaged import photo_masks
from leakbound.data.raw import Options, fit
from leakbound.data.series import ecg
from leakbound.defenses import DpSgd, GaussianNoise, NoDefense
from leakbound.domains import SeriesDomain, of_shape
from leakbound.pairing import pair
from leakbound.randomness import permutation, stream


class OwnConvolutions(nn.Module):
    """A user's network, with names and a flow of its own."""

    def __init__(self, channels=2):
        super().__init__()
        self.first = nn.Conv1d(channels, 6, 3, padding="same")
        self.norm = nn.GroupNorm(2, 6)
        self.second = nn.Conv1d(6, 6, 3, padding=1, groups=2)
        self.out = nn.Linear(6 * 12, 3)

    def forward(self, x):
        h = torch.tanh(self.norm(self.first(x)))
        h = nn.functional.max_pool1d(h + torch.tanh(self.second(h)), 2)
        return self.out(h.flatten(1))


class OwnRecurrent(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.out = layer, nn.Linear(layer.hidden_size, 3)

    def forward(self, x):
        return self.out(self.layer(x.transpose(1, 2))[0].mean(1))


class OwnLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(2, 5), nn.Linear(5, 3)

    def forward(self, x):
        state = None
        for now in x.unbind(2):
            state = self.cell(now, state)
        return self.out(state)


OWN = {
    "convolutions": OwnConvolutions,
    "lstm": lambda: OwnRecurrent(nn.LSTM(2, 5, num_layers=2, batch_first=True, dropout=0.2)),
    "gru": lambda: OwnRecurrent(nn.GRU(2, 5, batch_first=True)),
    "loop": OwnLoop,
}
SMALL = {
    "inverting_gradients": inverting_gradients(3),
    "large steps": inverting_gradients_large_steps(3, restarts=1),
    "dlg": dlg(1, restarts=1),
    "idlg": idlg(1, restarts=1),
    "strong": strong_matching(2),
    "sparse": sparse_gradient_inversion(3),
    "rounds": AcrossRounds(steps=3),
    "start": MixedStart(steps=3),
    "along time": GradientMatching(steps=3, total_variation=0.1),
}


def own_model(name):
    torch.manual_seed(0)
    return OWN[name]().eval()


def see(task, batch, defense=None, known=True, public=None):
    sources = [stream(0, "defense", i) for i in range(2)]
    threat = ThreatModel(labels_known=known)
    played = lb.play(
        task, [batch], defense or NoDefense(), sources, threat=threat, auxiliary=public
    )
    return played.observation


@pytest.mark.parametrize("attack", SMALL)
def test_presets_run_on_series_without_settings(attack):
    task = Task.of(own_model("convolutions"), classes=3, domain=SeriesDomain((2, 24)))
    batch = Batch(torch.rand(2, 2, 24, generator=stream(1)), torch.tensor([0, 2]))
    for defense in (NoDefense(), GaussianNoise(0.1)):
        seen = see(task, batch, defense)
        if attack == "strong" and seen.noise_share > 0.3:
            with pytest.raises(NotApplicable, match="a deep image prior needs images"):
                SMALL[attack](seen, stream(0))
            continue
        answer = SMALL[attack](seen, stream(0))
        assert isinstance(SMALL[attack], Attack)
        assert answer.inputs.shape == (2, 2, 24)
        assert bool(answer.inputs.isfinite().all())


@pytest.mark.parametrize("name", OWN)
def test_users_own_modules(name):
    task = Task.of(own_model(name), classes=3, domain=SeriesDomain((2, 24)))
    batch = Batch(torch.rand(2, 2, 24, generator=stream(1)), torch.tensor([0, 2]))
    answer = inverting_gradients(25)(see(task, batch), stream(0))
    assert min(answer.trace) < 0.7 * answer.trace[0]
    if name == "loop":  # PyTorch's cells have no gradient of single examples
        return
    seen = see(task, batch, DpSgd(1.0, 0.1))
    assert GradientMatching(steps=3)(seen, stream(0)).inputs.shape == (2, 2, 24)
    assert len(example_gradients(task, batch.inputs, batch.labels)) == 2


def test_presets_have_no_variation_along_time_and_the_setting_does():
    task = Task.of(own_model("convolutions"), classes=3)
    seen = see(task, Batch(torch.rand(1, 2, 24), torch.tensor([1])))
    noisy = see(task, Batch(torch.rand(1, 2, 24), torch.tensor([1])), GaussianNoise(0.1))
    for own in (seen, noisy):
        search = inverting_gradients(2).search(own, stream(0))
        assert not search.objective.terms
    asked = GradientMatching(steps=2, total_variation=0.5).search(seen, stream(0))
    (term,) = asked.objective.terms
    x = torch.rand(1, 2, 24)
    assert float(term(x, {})) == pytest.approx(float((x[..., 1:] - x[..., :-1]).abs().mean()))
    rows = see(Task.of(nn.Linear(5, 3)), Batch(torch.rand(1, 5), torch.tensor([1])))
    with pytest.raises(NotApplicable, match="total variation needs"):
        GradientMatching(total_variation=0.5).search(rows, stream(0))


def test_series_start_near_the_public_mean():
    public = Batch(3 + 2 * torch.randn(500, 2, 24, generator=stream(2)), torch.zeros(500).long())
    task = Task.of(own_model("convolutions"), classes=3)
    batch = Batch(torch.rand(1, 2, 24), torch.tensor([1]))
    settings = GradientMatching(steps=2)
    for seen in (see(task, batch, public=public), see(task, batch)):
        x = images_for(settings, task, seen, stream(0))().detach()
        near = seen.auxiliary is not None
        assert float(x.mean()) == pytest.approx(3 if near else 0, abs=0.5)
        assert float(x.std()) == pytest.approx(2 * NEAR if near else 1, rel=0.3)


def series(times):
    raw = ecg(Options(size=times))
    return Batch(raw.inputs, raw.labels)


def attacked(model, times, size, attack, seed, **settings):
    """Errors in standard deviations: of the attack, and of the prior-only baseline."""
    data = series(times)
    order = permutation(len(data.labels), stream(seed, "split"))
    taken = [
        Batch(data.inputs[at], data.labels[at]) for at in (order[:300], order[300 : 300 + size])
    ]
    public, batch = taken
    given = {"input_shape": (1, times), "classes": 2, "generator": stream(seed, "model")}
    domain = SeriesDomain((1, times)).fitted(public.inputs)
    task = Task.of(getattr(models, model)(**given, **settings), classes=2, domain=domain)
    answer = attack(see(task, batch, public=public), stream(seed, "attack"))
    found = pair(batch, answer, domain.costs)
    blind = pair(batch, lb.Reconstruction(guesses(domain, batch, public)), domain.costs)
    return [median(domain.distance(batch.inputs, own.inputs).tolist()) for own in (found, blind)]


def test_a_series_behind_a_flat_head_is_exact():
    errors = [attacked("conv1d", 128, 1, idlg(restarts=1), seed)[0] for seed in range(3)]
    assert max(errors) < 1e-3


def test_what_pooling_hides():
    """The objective falls, the series stays unknown: no success is claimed of a small objective."""
    pooled = [attacked("conv1d", 64, 1, idlg(3, restarts=1), s, pooling="mean") for s in range(3)]
    flat = [attacked("conv1d", 64, 1, idlg(3, restarts=1), s) for s in range(3)]
    assert all(error > 0.3 * blind for error, blind in pooled)
    assert all(error < 0.01 * blind for error, blind in flat)


@pytest.mark.parametrize("model", ["lstm", "gru"])
def test_recurrent_networks_are_no_worse_than_the_baseline(model):
    found = [attacked(model, 24, 1, idlg(3, restarts=1), seed) for seed in range(3)]
    ratios = [error / blind for error, blind in found]
    print(f"\n{model}: error over the baseline's {ratios}")
    assert median(ratios) < 1.2


def test_series_are_judged_by_their_own_metric():
    data = series(48)
    public = Batch(data.inputs[:300], data.labels[:300])
    model = models.conv1d(input_shape=(1, 48), classes=2, generator=stream(0))
    found = lb.simulate(
        model,
        (data.inputs[300:302], data.labels[300:302]),
        attack=idlg(8, restarts=1),
        public=public,
        domain=SeriesDomain((1, 48)).fitted(public.inputs),
        defense="gaussian_noise,noise_std=1.0",
    )
    assert found.verdict != "exposed"
    assert set(found.metrics) == {"snr"}
    assert found._repr_html_()


def pixels(loss, attack, seed, known, size=24):
    raw = photo_masks(Options(32))
    mixed = (raw.labels.float().mean((1, 2)) - 0.5).abs() < 0.3
    order = permutation(int(mixed.sum()), stream(seed, "split"))[:200]
    inputs = fit(raw.inputs[mixed][order], Options(size, 1))
    masks = nn.functional.interpolate(raw.labels[mixed][order][:, None].float(), size)[:, 0]
    masks = masks if loss == "dice" else masks.long()
    public, batch = Batch(inputs[1:], masks[1:]), Batch(inputs[:1], masks[:1])
    given = {"input_shape": (1, size, size), "generator": stream(seed, "model")}
    task = Task.of(models.unet(classes=1 if loss == "dice" else 2, **given), loss=loss, classes=2)
    answer = attack(see(task, batch, known=known, public=public), stream(seed, "attack"))
    domain = of_shape((1, size, size))
    baseline = guesses(domain, batch, public)
    scores = [float(domain.score(batch.inputs, own)[0]) for own in (answer.inputs, baseline)]
    return *scores, float((answer.labels.reshape(masks[:1].shape) == masks[:1]).float().mean())


@pytest.mark.parametrize("loss", ["dense_cross_entropy", "dice"])
def test_a_known_mask_shows_the_image(loss):
    attack = inverting_gradients(250)
    found = [pixels(loss, attack, seed, known=True) for seed in range(3)]
    print(f"\n{loss}: PSNR {[f'{a:.1f} against {b:.1f}' for a, b, _ in found]}")
    assert median(psnr - blind for psnr, blind, _ in found) > 2


@pytest.mark.parametrize("loss", ["dense_cross_entropy", "dice"])
def test_a_mask_may_be_searched(loss):
    attack = lb.attacks.BestOf(GradientMatching(steps=20, labels="joint"), 2)
    _, _, right = pixels(loss, attack, 0, known=False)
    assert 0 <= right <= 1
