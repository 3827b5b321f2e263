"""Updates with tensors that were not sent or are not finite: the others are attacked."""

import pytest
import torch
from torch import nn

from leakbound.randomness import stream, uniform

from .flat import attack_update

SHAPE, RATE = (1, 6, 6), 0.1
NAN, INF = float("nan"), float("inf")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 4))


def sent(own, steps=1):
    """The weights before and after plain SGD on one example; and the example."""
    image = uniform((1, *SHAPE), stream(0, "left out"))
    before = {k: v.clone() for k, v in own.state_dict().items()}
    optimizer = torch.optim.SGD(own.parameters(), lr=RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(own(image), torch.tensor([2])).backward()
        optimizer.step()
    return before, {k: v.clone() for k, v in own.state_dict().items()}, image


def attacked(after, before, **given):
    given = {"attacks": "linear_inversion", "input_shape": SHAPE, "examples": 1, **given}
    given["before"] = before
    return attack_update(after, model(), **given)


@pytest.mark.parametrize("kind", ["weights", "delta", "gradient"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_finite_is_attacked(kind, value):
    before, after, image = sent(model())
    update = after if kind == "weights" else {k: after[k] - before[k] for k in after}
    if kind == "gradient":
        update = {k: -v for k, v in update.items()}
    update["3.weight"][1, 2] = value
    found = attacked(update, before, kind=kind)
    (record,) = found.records
    assert record.verdict == "exposed (certified)"
    assert torch.allclose(found.best.inputs, image, atol=1e-4)
    (note,) = (n for n in record.capture.notes if "NaN or infinite" in n)
    assert note.startswith("1 of 4 trained tensors hold NaN")
    assert "3.weight" in note


def test_weights_with_a_spoiled_tensor_are_still_recognized_as_weights():
    before, after, image = sent(model())
    after["3.bias"][0] = NAN
    found = attacked(after, before)
    assert found.inferred[0].observation.sent is not None
    assert torch.allclose(found.best.inputs, image, atol=1e-4)


def test_values_beyond_the_models_type_are_left_out():
    before, after, image = sent(model())
    gradient = {k: (before[k] - after[k]).double() for k in after}
    gradient["3.weight"][0, 0] = 1e300
    found = attacked(gradient, before, kind="gradient")
    assert torch.allclose(found.best.inputs, image, atol=1e-4)


def test_a_spoiled_first_layer_says_why_its_attack_does_not_apply():
    before, after, _ = sent(model())
    after["1.weight"][0, 0] = NAN
    (record,) = attacked(after, before).records
    assert record.status == "not_applicable"
    assert any("1.weight" in note for note in record.capture.notes)


def test_nothing_finite_is_refused_without_a_claim():
    before, after, _ = sent(model())
    spoiled = {k: torch.full_like(v, NAN) for k, v in after.items()}
    for kind in ("auto", "weights", "delta", "gradient"):
        with pytest.raises(ValueError, match="in every tensor") as told:
            attacked(spoiled, before, kind=kind)
        assert "leaks nothing" not in str(told.value)


def test_what_is_finite_must_have_changed():
    before, after, _ = sent(model())
    spoiled = {k: torch.zeros_like(v) for k, v in after.items()}
    spoiled["3.bias"][0] = NAN
    with pytest.raises(ValueError, match="is zero in every tensor"):
        attacked(spoiled, before, kind="delta")


@pytest.mark.parametrize("both", [True, False], ids=["in no file", "not in the update"])
@pytest.mark.parametrize("kind", ["weights", "delta"])
def test_layers_that_were_not_sent_are_left_out(kind, both):
    """As FedPer keeps its head."""
    before, after, image = sent(model())
    update = after if kind == "weights" else {k: after[k] - before[k] for k in after}
    for own in (update, before)[: 1 + both]:
        for name in ("3.weight", "3.bias"):
            del own[name]
    found = attacked(update, before, kind=kind)
    (record,) = found.records
    assert torch.allclose(found.best.inputs, image, atol=1e-4)
    (note,) = (n for n in record.capture.notes if "were not sent" in n)
    assert note.startswith("2 of 4 trained tensors are not in the file")
    assert "3.weight, 3.bias" in note


def test_norms_that_were_not_sent_are_left_out():
    """As FedBN keeps its batch norms."""
    torch.manual_seed(0)
    layers = nn.Flatten(), nn.Linear(36, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)
    own = nn.Sequential(*layers).eval()
    before, after, image = sent(own)
    update = {k: v for k, v in after.items() if not k.startswith("2.")}
    found = attack_update(update, own, before=before, input_shape=SHAPE, attacks="linear_inversion")
    assert torch.allclose(found.best.inputs, image, atol=1e-4)


def test_a_file_of_another_model_is_still_refused_with_all_that_differs():
    before, after, _ = sent(model())
    del after["3.bias"]
    after["9.weight"] = torch.ones(1)
    with pytest.raises(ValueError, match=r"3.bias \(4,\) is missing; 9.weight \(1,\) is not in"):
        attacked(after, before, kind="weights")


def test_statistics_that_are_not_finite_are_no_fact():
    torch.manual_seed(0)
    own = nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    before, after, _ = sent(own.eval())
    after["2.running_mean"][0] = NAN
    found = attack_update(after, own, before=before, input_shape=SHAPE, attacks="linear_inversion")
    assert "batch statistics" not in {fact.kind for fact in found.inferred[0].facts}
