"""What is no attack, no defense or no answer is named by the checks of contracts."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from leakbound import Batch
from leakbound.attacks import Attack, LinearInversion
from leakbound.core import NotApplicable, Reconstruction, Task
from leakbound.defenses import GaussianNoise
from leakbound.testing import ContractError, check_attack, check_defense


def middle(observation):
    return torch.full(observation.batch_shape, 0.5, dtype=observation.task.parameters.dtype)


@dataclass(frozen=True)
class Answers(Attack):
    make: Any

    def __call__(self, observation, generator):
        return self.make(observation)


def answers(**given):
    fields = {"problem": "it looks at nothing"} | given
    return lambda seen: Reconstruction(**{"inputs": middle(seen)} | fields)


def raises(error):
    def make(observation):
        raise error

    return make


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda seen: middle(seen), "returns no Reconstruction"),
        (lambda seen: Reconstruction(middle(seen).numpy(), problem="p"), "are no dense tensor"),
        (lambda seen: Reconstruction(middle(seen).to("meta"), problem="p"), "are no dense tensor"),
        (lambda seen: Reconstruction(middle(seen).long(), problem="p"), "they must be floats"),
        (lambda seen: Reconstruction(middle(seen) + 0j, problem="p"), "they must be floats"),
        (answers(inputs=None), "are no dense tensor"),
        (answers(labels=[0, 1]), "labels that are no tensor"),
        (answers(labels=torch.tensor(1)), "not one for each input"),
        (answers(labels=torch.zeros(2)), "they must be class numbers"),
        (answers(labels=torch.tensor([0, 9])), "labels outside 0 to 2"),
        (answers(problem=3), "a problem that is no sentence"),
        (answers(objective="low"), "an objective that is no float"),
        (raises(ZeroDivisionError("division by zero")), "raises ZeroDivisionError: division by"),
        (raises(NotApplicable(None)), "is not applicable without a reason"),
    ],
)
def test_odd_answers_break_the_contract(make, words):
    with pytest.raises(ContractError, match=words):
        check_attack(Answers(make))


@pytest.mark.parametrize("odd", [None, "dlg", LinearInversion, GaussianNoise(0.1), print])
def test_what_is_no_attack(odd):
    with pytest.raises(ContractError, match="is no attack; give an instance"):
        check_attack(odd)


@pytest.mark.parametrize("odd", [None, "gaussian_noise", GaussianNoise, LinearInversion()])
def test_what_is_no_defense(odd):
    with pytest.raises(ContractError, match="is no defense; give an instance"):
        check_defense(odd)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 3))


def test_a_task_and_a_batch_that_fit_or_not():
    images, labels = torch.rand(1, 1, 4, 4), torch.tensor([0])
    with pytest.raises(ValueError, match="task is a int"):
        check_attack(LinearInversion(), task=3, batch=Batch(images, labels))
    with pytest.raises(ValueError, match="batch is a tuple"):
        check_attack(LinearInversion(), task=Task.of(net()), batch=(images, labels))
    with pytest.raises(ValueError, match="batch does not fit the task: the model cannot take"):
        check_attack(LinearInversion(), task=Task.of(net()), batch=Batch(images[..., 1:], labels))


def test_numbers_as_labels_keep_the_contract():
    task = Task.of(net().double(), loss="mse")
    batch = Batch(torch.rand(1, 1, 4, 4), torch.rand(1, 3))
    check_attack(LinearInversion(), task=task, batch=batch)
    check_defense(GaussianNoise(0.1), task=task, batch=Batch(batch.inputs, batch.labels.double()))
