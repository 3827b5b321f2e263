"""Gradient matching and restarts: same bits, honest problems, own objectives."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from leakbound.attacks import Attack, BestOf, GradientMatching, dlg, idlg, inverting_gradients
from leakbound.attacks.base import boxed
from leakbound.core import NotApplicable, Observation, Reconstruction, Task
from leakbound.defenses import (
    ClipExamples,
    GaussianNoise,
    GradientDropout,
    HiddenDropout,
    LaplaceNoise,
    MagnitudePruning,
)
from leakbound.randomness import stream, uniform

SHORT = {
    "adam": inverting_gradients(8),
    "restarts": inverting_gradients(4, restarts=2),
    "layers": GradientMatching("cosine_layers", steps=4, schedule="cosine", signed=False),
    "manhattan": GradientMatching("manhattan", steps=4, initialization="uniform"),
    "dlg": dlg(2, restarts=1),
    "idlg": idlg(2, restarts=1),
}


@pytest.mark.parametrize(
    ("name", "defense"),
    [
        *((name, None) for name in SHORT),
        *(("adam", defense) for defense in (MagnitudePruning(0.5), LaplaceNoise(0.01))),
    ],
    ids=repr,
)
def test_the_same_observation_and_stream_give_the_same_bits(scene, name, defense):
    played = scene.play(scene.task("lenet"), scene.batch(0, 2), defense)
    first, second = (SHORT[name](played.observation, stream(5)) for _ in range(2))
    assert torch.equal(first.inputs, second.inputs)
    assert torch.equal(first.labels, second.labels)
    assert (first.objective, first.trace) == (second.objective, second.trace)
    assert first.inputs.shape == (2, 1, 28, 28)
    assert bool(((first.inputs >= 0) & (first.inputs <= 1)).all())
    other = SHORT[name](played.observation, stream(6))
    assert not torch.equal(first.inputs, other.inputs)


def test_the_observation_is_left_alone(scene):
    played = scene.play(scene.task("lenet"), scene.batch(0))
    rows, labels = played.observation.update.rows.clone(), played.observation.labels.clone()
    for attack in SHORT.values():
        attack(played.observation, stream(0))
    assert torch.equal(rows, played.observation.update.rows)
    assert torch.equal(labels, played.observation.labels)


def test_many_is_each_alone(scene):
    seen = [scene.play(scene.task("lenet"), scene.batch(i)).observation for i in range(2)]
    attack = SHORT["adam"]
    both = attack.many(seen, [stream(i) for i in range(2)])
    for i, answer in enumerate(both):
        assert torch.equal(answer.inputs, attack(seen[i], stream(i)).inputs)


@pytest.mark.parametrize("attack", [inverting_gradients(5), dlg(5)], ids=["ig", "dlg"])
def test_a_zero_update_is_called_vanished(scene, attack):
    played = scene.play(scene.task("lenet"), scene.batch(0), GradientDropout(1.0))
    answer = attack(played.observation, stream(0))
    assert answer.problem == "gradient vanished: the update is zero everywhere"
    assert bool((answer.inputs == 0.5).all())


def _linear(weight=0.0, hidden=()):
    model = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(784, 10))
    for parameter in model.parameters():
        nn.init.constant_(parameter, weight)
    return Task.of(model, classes=10)


@pytest.mark.parametrize("attack", [inverting_gradients(5), idlg(5)], ids=["ig", "idlg"])
def test_an_objective_without_slope_is_called_vanished(scene, attack):
    """ReLU units that are dead for every image hide the input."""
    wide = nn.Linear(784, 784)
    task = _linear(0.01, (wide, nn.ReLU()))
    parameters = task.parameters.clone()
    parameters[: 784 * 785] = -1.0
    attack = attack if isinstance(attack, GradientMatching) else attack.attack
    attack = replace(attack, total_variation=0.0, smoothing=0.0)
    task = task.with_parameters(parameters)
    played = scene.play(task, scene.batch(0))
    answer = replace(attack, initialization="uniform")(played.observation, stream(0))
    assert answer.problem == "gradient vanished: the objective does not change with the inputs"


def test_an_objective_that_is_no_number_is_called_so(scene):
    played = scene.play(scene.task("lenet"), scene.batch(0))
    update = played.observation.update
    broken = replace(update, rows=update.rows * float("inf"))
    for attack in (inverting_gradients(5), dlg(5, restarts=1)):
        answer = attack(replace(played.observation, update=broken), stream(0))
        assert answer.problem == "not finite: the objective was never a number"
        assert bool(torch.isfinite(answer.inputs).all())


def test_an_objective_that_does_not_fall_is_called_so(scene):
    played = scene.play(scene.task("lenet"), scene.batch(0))
    answer = GradientMatching(steps=2, learning_rate=1e-9, box=False)(played.observation, stream(0))
    assert answer.problem.startswith("objective did not fall: ")


def test_one_good_outer_step_of_lbfgs_is_no_problem(scene):
    """The fall is measured from the start, not from the end of the first outer step."""
    played = scene.play(scene.task("lenet"), scene.batch(0))
    answer = GradientMatching("euclidean", optimizer="lbfgs", learning_rate=1.0, steps=1)(
        played.observation, stream(0)
    )
    assert answer.problem is None
    assert answer.trace[-1] < 0.5 * answer.trace[0]


def test_the_best_iterate_is_the_answer(scene):
    played = scene.play(scene.task("lenet"), scene.batch(0))
    wild = GradientMatching(steps=30, learning_rate=5.0, schedule="constant")
    answer = wild(played.observation, stream(0))
    assert answer.objective <= min(answer.trace) + 1e-6


def test_enough_stops_early(scene):
    played = scene.play(scene.task("lenet"), scene.batch(0))
    answer = GradientMatching(steps=50, enough=10.0)(played.observation, stream(0))
    assert len(answer.trace) == 1


def test_labels_are_told_inferred_or_optimized(scene):
    batch = scene.batch(0)
    told = scene.play(scene.task("lenet"), batch).observation
    wrong = replace(told, labels=(batch.labels + 1) % 10)
    hidden = replace(told, labels=None)
    search = GradientMatching(steps=2)
    assert search(wrong, stream(0)).labels.tolist() == wrong.labels.tolist()
    assert search(hidden, stream(0)).labels.tolist() == batch.labels.tolist()
    assert replace(search, labels="inferred")(wrong, stream(0)).labels.tolist() == (
        batch.labels.tolist()
    )
    joint = dlg(30, restarts=1)(hidden, stream(0))
    assert joint.labels.tolist() == batch.labels.tolist()
    unknown = replace(told, task=replace(told.task, label_range=None))
    with pytest.raises(NotApplicable, match="number of classes is not known"):
        dlg()(unknown, stream(0))


def test_total_variation_wants_images_or_series():
    """Presets leave it out elsewhere; rows that ask for it are refused."""
    task = Task.of(nn.Linear(5, 3), classes=3)
    rows = torch.ones(1, 18)
    update = _observation_of(task, rows)
    with pytest.raises(NotApplicable, match=r"needs images .* or series, .* is \(5,\)"):
        GradientMatching(steps=2, total_variation=0.1)(update, stream(0))
    inverting_gradients(2)(update, stream(0))


def _observation_of(task, rows):
    from leakbound.core import Unit, Update

    return Observation(Update(rows, Unit.CLIENT, (1,)), task, (1,), (5,), labels=torch.tensor([0]))


def test_withheld_coordinates_of_the_update_change_nothing(scene):
    played = scene.play(scene.task("lenet"), scene.batch(0), MagnitudePruning(0.7))
    update = played.observation.update
    noise = uniform(update.rows.shape, stream(9)) * ~update.mask
    other = replace(played.observation, update=replace(update, rows=update.rows + noise))
    search = inverting_gradients(5)
    first, second = (search(seen, stream(0)) for seen in (played.observation, other))
    torch.testing.assert_close(first.inputs, second.inputs)
    blind = replace(other, threat=replace(other.threat, defense_known=False), defense=None)
    assert not torch.allclose(search(blind, stream(0)).inputs, first.inputs)


@pytest.mark.parametrize("known", [True, False])
def test_rows_of_single_examples(scene, known):
    """Clipped rows that nobody averages: each is matched by its own example."""
    played = scene.play(
        scene.task("lenet"), scene.batch(0, 2), ClipExamples(0.1), defense_known=known
    )
    assert played.observation.update.rows.shape[0] == 2
    answer = inverting_gradients(100)(played.observation, stream(0))
    assert answer.objective < 0.2


def test_noise_raises_the_prior_only_where_it_is_known(scene):
    seen = scene.play(scene.task("lenet"), scene.batch(0), GaussianNoise(0.1)).observation
    unknown = replace(seen, threat=replace(seen.threat, defense_known=False), defense=None)
    plain, aware = (inverting_gradients(3, noise_variation=v) for v in (0.0, 0.04))
    assert aware(seen, stream(0)).objective > plain(seen, stream(0)).objective
    assert aware(unknown, stream(0)).objective == plain(unknown, stream(0)).objective


def test_known_hidden_dropout_is_read_from_the_update(scene):
    played = scene.play(scene.task("mlp"), scene.batch(0), HiddenDropout(0.5))
    answer = inverting_gradients(60)(played.observation, stream(0))
    assert answer.objective < 0.05


def test_boxed():
    task = Task.of(nn.Linear(2, 2), input_range=(-1.0, 3.0))
    given = torch.tensor([[float("nan"), float("inf"), float("-inf"), 5.0, 0.5]])
    assert boxed(given, task).tolist() == [[1.0, 3.0, -1.0, 3.0, 0.5]]


@dataclass(frozen=True)
class Scripted(Attack):
    answers: tuple = ()
    calls: list = None

    def __call__(self, observation, generator):
        self.calls.append(generator)
        return self.answers[len(self.calls) - 1]


def _answer(objective, problem=None):
    return Reconstruction(torch.zeros(1, 1), objective=objective, problem=problem)


@pytest.mark.parametrize(
    ("given", "best", "calls"),
    [
        ([3.0, 1.0, 2.0], 1, 3),
        ([float("nan"), 2.0, 3.0], 1, 3),
        ([2.0, 2.0, 2.0], 0, 3),
        ([0.4, 0.1, 0.0], 0, 1),
        ([3.0, 0.5, 0.1], 1, 2),
        ([(0.0, "stuck"), 5.0, 6.0], 1, 3),
        ([(0.2, "stuck"), (0.1, "stuck"), (0.3, "stuck")], 1, 3),
    ],
)
def test_best_of_picks_by_its_own_objective(given, best, calls):
    answers = tuple(_answer(*a) if isinstance(a, tuple) else _answer(a) for a in given)
    attack, generator = Scripted(answers, []), stream(0)
    assert BestOf(attack, restarts=3, enough=0.5)(None, generator) is answers[best]
    assert attack.calls == [generator] * calls


def test_best_of_refuses_and_hands_on():
    with pytest.raises(ValueError, match="restarts is 0"):
        BestOf(Attack(), 0)
    with pytest.raises(TypeError, match="Attack defines no __call__"):
        Attack()(None, stream(0))

    @dataclass(frozen=True)
    class Planter(Attack):
        def plant(self, task):
            return "planted"

    assert BestOf(Planter()).plant("task") == "planted"
    assert BestOf(Attack()).plant("task") == "task"


def test_an_answer_that_explains_too_little_is_called_so(scene):
    """DLG on a ReLU MLP gets stuck: the objective falls a lot and the picture is still noise."""
    noted = right = 0
    for seed in range(3):
        task, batch = scene.task("mlp", seed), scene.batch(seed, 4)
        played = scene.play(task, batch, seed=seed)
        answer = dlg(steps=10, restarts=1)(played.observation, stream(seed))
        far = (answer.problem or "").startswith("objective did not fall far enough")
        bad = max(scene.decibels(played, answer)) < 12
        noted, right = noted + far, right + (far or not bad)
    assert noted >= 1
    assert right == 3


def test_an_update_of_noise_alone_is_called_so(scene):
    """A net with so many weights fits noise too; the declared law tells the attacker."""
    task, batch = scene.task("simple_convnet"), scene.batch(0)
    played = scene.play(task, batch, GaussianNoise(1.0), 0)
    answer = inverting_gradients(20)(played.observation, stream(0))
    assert answer.problem.startswith("too much noise: it is 100% of the update")
