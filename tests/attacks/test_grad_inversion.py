"""GradInversion: several starts that agree."""

import pytest
import torch

from leakbound.attacks import GradInversion
from leakbound.attacks.grad_inversion import _correlations
from leakbound.attacks.matching.engine import Search
from leakbound.attacks.matching.loop import run
from leakbound.core import NotApplicable
from leakbound.randomness import stream, uniform


def test_a_shift_is_found_and_undone():
    images = uniform((3, 2, 12, 9), stream(0, "shift"))
    others = torch.roll(images, (2, -3), (2, 3))[[1, 2, 0]]
    likeness, shifts = _correlations(images, others, 4)
    assert likeness.argmax(1).tolist() == [2, 0, 1]
    torch.testing.assert_close(likeness[0, 2].item(), 1.0)
    assert shifts[0, 2].tolist() == [-2, 3]
    assert torch.equal(GradInversion(registration=4)._onto(images, others), images)
    still, _ = _correlations(images, others, 0)
    brute = torch.corrcoef(torch.cat([images, others]).flatten(1))[:3, 3:]
    torch.testing.assert_close(still, brute.double())


def test_starts_are_pulled_together(scene, monkeypatch):
    """The group term acts: with it the starts end nearer to each other."""
    played = scene.play(scene.task("lenet"), scene.batch(0, 2))

    def spread(group):
        searches = []
        start = Search.__post_init__

        def noted(self):
            start(self)
            searches.append(self)

        monkeypatch.setattr(Search, "__post_init__", noted)
        attack = GradInversion(steps=30, seeds=3, group=group, batch_norm=0.0, after=0.0)
        attack(played.observation, stream(1, "group"))
        monkeypatch.undo()
        return float(torch.stack([s.images().detach() for s in searches]).var(0).mean())

    assert spread(1e4) < 0.5 * spread(0.0)


def test_the_answer_is_no_worse_than_the_best_start_by_its_own_objective(scene):
    played = scene.play(scene.task("lenet"), scene.batch(0))
    attack = GradInversion(steps=20, seeds=2, batch_norm=0.0)
    answer = attack(played.observation, stream(2, "group"))
    again = attack(played.observation, stream(2, "group"))
    assert torch.equal(answer.inputs, again.inputs)
    generator = stream(2, "group")
    alone = attack.search().search(played.observation, generator)
    run(attack.search(), [alone])
    assert answer.objective <= float(alone.best) + 1e-6


def test_what_it_refuses(scene):
    with pytest.raises(ValueError, match="seeds is 0"):
        GradInversion(seeds=0)
    with pytest.raises(ValueError, match=r"after is 1\.5"):
        GradInversion(after=1.5)
    played = scene.play(scene.task("resnet18", width=4, norm="batch"), scene.batch(0))
    with pytest.raises(NotApplicable, match="statistics_known is false"):
        GradInversion(steps=1, statistics="exact")(played.observation, stream(0))
    silent = scene.play(scene.task("lenet"), scene.batch(0)).observation
    silent.update.rows.zero_()
    assert "zero everywhere" in GradInversion(steps=2)(silent, stream(0)).problem
