import pytest
import torch
from torch import nn

from leakbound.core import Task
from leakbound.tensors import flat


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2 * 36, 3))


TRAINING = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def task_of(training=False):
    own = model().train(training)
    return own, Task.of(own)


@TRAINING
def test_a_state_dict_gives_the_tasks_own_parameters(training):
    own, task = task_of(training)
    assert torch.equal(flat(task, own.state_dict(), what="before"), task.parameters)


def test_the_order_of_the_names_does_not_matter():
    own, task = task_of()
    turned = dict(reversed(list(own.state_dict().items())))
    assert torch.equal(flat(task, turned, what="before"), task.parameters)


@pytest.mark.parametrize("prefix", ["module.", "_module.", "_orig_mod.", "_orig_mod.module."])
def test_a_wrappers_prefix_is_taken_off(prefix):
    own, task = task_of()
    named = {prefix + key: value for key, value in own.state_dict().items()}
    assert torch.equal(flat(task, named, what="before"), task.parameters)


@TRAINING
@pytest.mark.parametrize("form", ["{}", "arr_{}"])
@pytest.mark.parametrize("whole", [True, False], ids=["state dict", "parameters"])
def test_lists_without_names_are_matched_by_position(training, form, whole):
    own, task = task_of(training)
    values = list(own.state_dict().values()) if whole else [p.detach() for p in own.parameters()]
    named = {form.format(i): value for i, value in enumerate(values)}
    turned = dict(sorted(named.items(), reverse=True))
    assert torch.equal(flat(task, turned, what="before"), task.parameters)


def test_a_list_of_another_model_is_refused_with_both_orders():
    _, task = task_of()
    with pytest.raises(ValueError, match=r"list of 2 tensors .*order of the model's 6 .0.weight"):
        flat(task, {"0": torch.zeros(1), "1": torch.zeros(2)}, what="update")


def test_every_missing_extra_and_wrong_tensor_is_listed():
    own, task = task_of()
    named = dict(own.state_dict())
    del named["0.bias"]
    named["3.weight"] = named["3.weight"].T
    named["4.weight"] = torch.zeros(2)
    with pytest.raises(ValueError) as told:
        flat(task, named, what="update")
    for words in (
        "update does not fit the model",
        "0.bias (2,) is missing",
        "3.weight is (72, 3), in the model (3, 72)",
        "4.weight (2,) is not in the model",
    ):
        assert words in str(told.value)


def test_of_many_problems_the_first_ten_are_shown():
    _, task = task_of()
    named = {f"x{i}": torch.zeros(1) for i in range(20)}
    with pytest.raises(ValueError, match="and 16 more"):
        flat(task, named, what="update")


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_floats_of_other_widths_are_converted(kind):
    own, task = task_of()
    named = {k: v.to(kind) if v.is_floating_point() else v for k, v in own.state_dict().items()}
    got = flat(task, named, what="update")
    assert got.dtype == task.parameters.dtype
    assert torch.allclose(got, task.parameters, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(3, dtype=torch.int8), "3.bias holds values of type torch.int8"),
        (torch.tensor([0.0, float("nan"), 1.0]), "3.bias holds 1 of 3 entries that are NaN"),
        (torch.tensor([0.0, float("inf"), 1.0]), "3.bias holds 1 of 3 entries that are NaN"),
        (torch.tensor([0.0, 1e300, 1.0], dtype=torch.float64), "NaN or infinite .as torch.float32"),
    ],
    ids=["integers", "nan", "infinity", "overflow"],
)
def test_values_that_no_update_holds_are_refused_by_name(value, words):
    own, task = task_of()
    with pytest.raises(ValueError, match=words):
        flat(task, {**own.state_dict(), "3.bias": value}, what="update")


def test_shared_weights_may_be_under_either_name_or_both():
    own = nn.Sequential(nn.Linear(3, 3), nn.Flatten(), nn.Linear(3, 3))
    own[2].weight = own[0].weight
    task, named = Task.of(own), dict(own.state_dict())
    assert torch.equal(flat(task, named, what="before"), task.parameters)
    del named["0.weight"]
    assert torch.equal(flat(task, named, what="before"), task.parameters)
    with pytest.raises(ValueError, match="are one tensor in the model but differ here"):
        flat(task, {**named, "0.weight": torch.zeros(3, 3)}, what="before")


def test_nothing_and_no_tensor_are_refused():
    _, task = task_of()
    with pytest.raises(ValueError, match="holds no tensor"):
        flat(task, {}, what="update")
    with pytest.raises(ValueError, match="is a list; give torch tensors"):
        flat(task, {"0.weight": [1.0]}, what="update")
