"""The learned prior: what its denoiser learns, its files, and the attack that uses it."""

import json
import sys
import types

import numpy as np
import pytest
import torch

import leakbound as lb
from leakbound import cli, models, tensors
from leakbound.attacks import LearnedPrior, inverting_gradients, load_prior, save_prior, train_prior
from leakbound.attacks.matching.objective import Objective
from leakbound.attacks.prior import attack as module
from leakbound.attacks.prior import files
from leakbound.core import Batch, NotApplicable, Task
from leakbound.defenses import GaussianNoise, GradientDropout, NoDefense, chain
from leakbound.protocol import play
from leakbound.randomness import normal, stream


def flat_public(count=400, size=6, seed=0):
    """Rows near a plane: their best denoiser is linear and known."""
    source = stream(seed, "rows")
    axes = normal((2, size), source)
    rows = normal((count, 2), source) @ axes + 0.05 * normal((count, size), source)
    return Batch(rows, torch.zeros(count, dtype=torch.long))


def strokes(count, seed):
    """Images (count, 1, 8, 8) of one bright row and one bright column each."""
    places = torch.randint(0, 8, (2, count), generator=stream(seed, "places"))
    images = torch.zeros(count, 1, 8, 8)
    images[torch.arange(count), 0, places[0]] = 1.0
    images[torch.arange(count), 0, :, places[1]] = 1.0
    return Batch(images, torch.arange(count) % 3)


def waves(count, seed):
    """Images (count, 1, 6, 6) that are mixtures of two: a prior that is easy to learn."""
    axes = normal((2, 36), stream(0, "axes"))
    mixed = normal((count, 2), stream(seed, "shares")) @ axes
    return Batch((0.5 + 0.12 * mixed).clamp(0, 1).view(-1, 1, 6, 6), torch.arange(count) % 3)


def seen(defense, batch, public, model=None):
    model = model or models.mlp(
        input_shape=batch.inputs.shape[1:], classes=3, generator=stream(0, "model")
    )
    task = Task.of(model, classes=3)
    sources = [stream(0, "defense", k) for k in range(2)]
    return play(task, [batch], defense, sources, auxiliary=public).observation


def test_the_denoiser_is_near_the_best_one():
    """For Gaussian rows the mean given a noisy copy is linear in it (the Wiener filter)."""
    public, held = flat_public(), flat_public(seed=0)
    prior = train_prior(public, steps=300, width=64)
    known = (public.inputs - prior.center) / prior.scale
    covariance = torch.cov(known.T)
    for sigma in (0.3, 1.0):
        clean = known[: held.size]
        noisy = clean + sigma * normal(clean.shape, stream(1, "noise"))
        best = noisy @ torch.linalg.solve(covariance + sigma**2 * torch.eye(6), covariance)
        found = prior(noisy, torch.full((len(noisy),), sigma))
        errors = [float((x - clean).square().mean()) for x in (found, best, noisy)]
        assert errors[0] < 1.3 * errors[1]
        assert errors[0] < 0.6 * errors[2]


def test_labels_help_the_denoiser():
    labels = torch.arange(300) % 3
    rows = 3 * torch.eye(3)[labels] + 0.1 * normal((300, 3), stream(0, "rows"))
    prior = train_prior(Batch(rows, labels), classes=3, steps=200, width=128)
    noisy, sigma = 4 * normal((300, 3), stream(1, "noise")), torch.full((300,), 4.0)
    clean = (rows - prior.center) / prior.scale
    with_labels = (prior(clean + noisy, sigma, labels) - clean).square().mean()
    assert with_labels < 0.3 * (prior(clean + noisy, sigma) - clean).square().mean()


def test_training_is_deterministic_and_may_end_early():
    public = strokes(40, 0)
    before = torch.get_rng_state()
    one, two = (train_prior(public, classes=3, steps=3, width=8) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(map(torch.equal, one.state_dict().values(), two.state_dict().values()))
    steps = []
    short = train_prior(
        public, classes=3, steps=100, width=8, watch=lambda s, loss: steps.append(s) or s == 2
    )
    assert steps == [1, 2]
    assert bool(short(torch.zeros(1, 1, 8, 8), torch.ones(1)).isfinite().all())


def test_a_file_keeps_the_prior(tmp_path):
    prior = train_prior(strokes(40, 0), classes=3, steps=3, width=8)
    path = tmp_path / "prior.safetensors"
    save_prior(path, prior, {"domain": "images"})
    again, about = load_prior(path)
    assert about["domain"] == "images"
    assert about["shape"] == [1, 8, 8]
    x, sigma = torch.rand(2, 1, 8, 8), torch.tensor([0.1, 2.0])
    assert torch.equal(prior(x, sigma, torch.tensor([0, 2])), again(x, sigma, torch.tensor([0, 2])))


@pytest.mark.parametrize(
    "change", [{"width": 9}, {"width": 2**40}, {"shape": [0, 8, 8]}, {"classes": -1}, {"shape": 3}]
)
def test_a_file_with_other_sizes_is_refused(tmp_path, change):
    prior = train_prior(strokes(40, 0), classes=3, steps=1, width=8)
    about = {"shape": [1, 8, 8], "classes": 3, "width": 8, **change}
    text = {"leakbound.kind": files.KIND, "leakbound.prior": json.dumps(about)}
    tensors.write(tmp_path / "p.safetensors", prior.state_dict(), text)
    with pytest.raises(ValueError, match="damaged"):
        load_prior(tmp_path / "p.safetensors")


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "p.safetensors"
    tensors.write(path, {"a": torch.ones(2)})
    with pytest.raises(ValueError, match="no learned prior"):
        load_prior(path)
    prior = train_prior(strokes(40, 0), steps=1, width=8)
    state = {k: torch.full_like(v, float("nan")) for k, v in prior.state_dict().items()}
    text = {
        "leakbound.kind": files.KIND,
        "leakbound.prior": json.dumps({"shape": [1, 8, 8], "classes": 0, "width": 8}),
    }
    tensors.write(path, state, text)
    with pytest.raises(ValueError, match="not finite"):
        load_prior(path)
    for other in (torch.int32, torch.float64):  # the first cannot be loaded, the second computed
        tensors.write(path, {k: torch.ones_like(v, dtype=other) for k, v in state.items()}, text)
        with pytest.raises(ValueError, match="damaged: shapes or types"):
            load_prior(path)
    users = tmp_path / "mine.safetensors"
    users.write_bytes(b"mine")
    with pytest.raises(ValueError, match="did not write"):
        save_prior(users, prior, {})
    assert users.read_bytes() == b"mine"


def test_it_reconstructs_where_matching_alone_fails():
    public, private = waves(200, 0), waves(3, 5)
    ours, theirs = [], []
    for k in range(3):
        batch = Batch(private.inputs[k : k + 1], private.labels[k : k + 1])
        observation = seen(GaussianNoise(0.2), batch, public)
        for attack, scores in (
            (LearnedPrior(steps=150, restarts=1, training=200), ours),
            (inverting_gradients(steps=150), theirs),
        ):
            answer = attack(observation, stream(k, "attack"))
            error = float((answer.inputs - batch.inputs).square().mean())
            scores.append(-10 * np.log10(error))
    assert np.mean(ours) > np.mean(theirs) + 5


def rows_of_numbers(count, seed):
    """Rows of six independent numbers: public ones say little about the private one."""
    rows = 0.5 + 0.12 * normal((count, 6), stream(seed, "rows"))
    return Batch(rows.clamp(0, 1), torch.arange(count) % 3)


def test_few_rows_are_not_learned_by_heart():
    """Without the decay of weights, the errors after denoising are 1.8 times the noise."""
    public, held = rows_of_numbers(30, 0), rows_of_numbers(300, 1)
    prior = train_prior(public, steps=800)
    clean = (held.inputs - prior.center) / prior.scale
    noisy = clean + 0.1 * normal(clean.shape, stream(1, "noise"))
    found = prior(noisy, torch.full((300,), 0.1))
    assert float((found - clean).square().mean().sqrt()) < 1.4 * 0.1


def test_small_noise_is_used_to_its_end():
    """The update says more than `lowest`, where a denoiser would only add errors."""
    public, private = rows_of_numbers(60, 0), rows_of_numbers(3, 5)
    ours, theirs = [], []
    for k in range(3):
        batch = Batch(private.inputs[k : k + 1], private.labels[k : k + 1])
        observation = seen(GaussianNoise(0.001), batch, public)
        for attack, errors in (
            (LearnedPrior(steps=800, restarts=1, training=100), ours),
            (inverting_gradients(steps=800), theirs),
        ):
            answer = attack(observation, stream(k, "attack"))
            errors.append(float((answer.inputs - batch.inputs).square().mean()))
    assert np.sqrt(np.mean(ours)) < 1.1 * np.sqrt(np.mean(theirs))


def test_the_lowest_level_falls_with_the_noise():
    """It is the noise over the root mean square of the Jacobian's columns, by differences."""
    batch, public = rows_of_numbers(1, 5), rows_of_numbers(60, 0)
    found, settings = {}, LearnedPrior()
    for noise in (1e-6, 0.004, 0.008, 10.0):
        objective = Objective.of(settings._settings(), seen(GaussianNoise(noise), batch, public))
        prior = files.prior_for("", objective.observation, stream(0, "attack"), steps=1)
        link = module._Chain(settings, objective, prior, stream(0, "attack"))
        found[noise] = link._lowest()
    assert (found[1e-6], found[10.0]) == (0.01, 0.1)
    assert found[0.008] == pytest.approx(2 * found[0.004], rel=1e-4)
    columns = []
    for j in range(6):
        step = 0.01 * torch.eye(6)[j]
        ends = [prior.natural(link.images.start.detach() + s * step) for s in (1, -1)]
        rows = [objective.rows(end, batch.labels).detach() for end in ends]
        columns.append(float((rows[0] - rows[1]).norm()) / 0.02)
    root = np.sqrt(np.mean(np.square(columns)))
    assert found[0.008] == pytest.approx(0.008 / root, rel=0.5)


def test_the_likelihood_is_that_of_the_known_noise():
    """Against SciPy's normal density, with a mask and noise of its own for every coordinate."""
    from scipy import stats

    public, batch = strokes(60, 0), strokes(1, 5)
    observation = seen(chain(GaussianNoise(0.1), GradientDropout(0.5)), batch, public)
    attack = LearnedPrior(steps=1, restarts=1, levels=1, training=1)
    objective = Objective.of(attack._settings(), observation)
    prior = files.prior_for("", observation, stream(0, "attack"), steps=1)
    link = module._Chain(attack, objective, prior, stream(0, "attack"))
    some, none = (torch.full((1, 1, 8, 8), v) for v in (0.2, 0.7))
    mask = observation.update.mask
    logs = []
    for images in (some, none):
        rows = objective.rows(images, batch.labels)
        apart = (rows - observation.update.rows)[mask].detach().double().numpy()
        logs.append(-stats.norm.logpdf(apart, scale=0.1).sum())
    assert link._nats(some) - link._nats(none) == pytest.approx(logs[0] - logs[1], rel=1e-4)
    assert link.seen == int(mask.sum())


def test_softened_clients_come_close_to_the_real_one():
    model = models.mlp(
        input_shape=(1, 8, 8), classes=3, activation="relu", generator=stream(0, "model")
    )
    task, batch = Task.of(model, classes=3), strokes(2, 5)
    rows = lb.client.example_gradients(task, batch.inputs, batch.labels)
    apart = []
    for hardness in (2.0, 8.0, 1e4):
        own = module.softened(task, strokes(20, 0).inputs, hardness)
        found = lb.client.example_gradients(own, batch.inputs, batch.labels)
        apart.append(float((found - rows).norm() / rows.norm()))
    assert apart[0] > apart[1] > apart[2]
    assert apart[2] < 0.01
    assert not any(isinstance(m, torch.nn.Softplus) for m in task.model.modules())


def test_no_public_examples_is_not_applicable():
    batch = strokes(1, 5)
    with pytest.raises(NotApplicable, match="give public examples"):
        LearnedPrior(steps=5)(seen(NoDefense(), batch, None), stream(0, "attack"))


def test_a_prior_of_another_shape_is_not_applicable(tmp_path):
    path = tmp_path / "rows.safetensors"
    save_prior(path, train_prior(flat_public(20), steps=1, width=8), {})
    with pytest.raises(NotApplicable, match="train-prior"):
        LearnedPrior(str(path), steps=5)(seen(NoDefense(), strokes(1, 5), None), stream(0, "a"))


def test_the_users_denoiser_is_used(monkeypatch):
    truth, asked = strokes(1, 5), []

    def build(input_shape):
        def denoise(x, sigma):
            asked.append(sigma)
            return truth.inputs.expand_as(x).to(x)

        assert input_shape == (1, 8, 8)
        return denoise

    monkeypatch.setitem(sys.modules, "own_prior", types.SimpleNamespace(build=build))
    attack = LearnedPrior("own_prior:build", steps=20, restarts=1, levels=3)
    answer = attack(seen(GaussianNoise(1.0), truth, None), stream(0, "attack"))
    assert torch.allclose(answer.inputs, truth.inputs, atol=1e-5)
    assert min(asked) == pytest.approx(module.FINAL * attack.lowest / 4)
    wrong = types.SimpleNamespace(build=lambda input_shape: lambda x, sigma: x[0])
    monkeypatch.setitem(sys.modules, "own_prior", wrong)
    with pytest.raises(ValueError, match="returned no tensor of the shape"):
        attack(seen(NoDefense(), truth, None), stream(0, "attack"))


def test_one_public_set_is_learned_once(monkeypatch):
    calls = []
    real = files.train_prior
    monkeypatch.setattr(files, "train_prior", lambda *a, **k: calls.append(1) or real(*a, **k))
    public, attack = strokes(31, 9), LearnedPrior(steps=4, restarts=1, levels=1, training=2)
    for k in range(2):
        attack(seen(NoDefense(), strokes(1, k), public), stream(0, "attack"))
    assert calls == [1]


def test_noise_alone_is_reported():
    observation = seen(GaussianNoise(100.0), strokes(1, 5), strokes(60, 0))
    answer = LearnedPrior(steps=30, restarts=1, training=20)(observation, stream(0, "attack"))
    assert "proves little" in answer.problem


def ran(*arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["train-prior", *map(str, arguments)])
    return ended.value.code


def test_the_command_writes_a_prior(tmp_path, capsys):
    out = tmp_path / "new" / "digits.safetensors"
    arguments = "--data", "digits", "--steps", "2", "--width", "8", "--out"
    assert ran(*arguments, out) == 0
    prior, about = load_prior(out)
    assert prior.shape == (1, 8, 8)
    assert (about["domain"], about["steps_done"]) == ("images", 2)
    assert len(about["public_sha256"]) == 64
    assert ran(*arguments, out) == 0, "it replaces its own file"
    users = tmp_path / "mine.safetensors"
    users.write_bytes(b"mine")
    assert ran(*arguments, users) == 2
    assert users.read_bytes() == b"mine"
    assert ran(*arguments, tmp_path / "prior.pt") == 2
    assert "safetensors" in capsys.readouterr().err


@pytest.mark.linux
def test_ctrl_c_keeps_what_was_reached(tmp_path, monkeypatch):
    import os
    import signal

    from leakbound.cli import prior as command

    real = command.Bar.__call__

    def interrupted(self, done, total, current, left=None):
        real(self, done, total, current, left)
        if done == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(command.Bar, "__call__", interrupted)
    out = tmp_path / "digits.safetensors"
    assert ran("--data", "digits", "--steps", "500", "--width", "8", "--out", out) == 0
    assert load_prior(out)[1]["steps_done"] in (3, 4)
