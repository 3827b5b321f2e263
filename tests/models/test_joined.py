"""Models of several inputs: joined to one that attacks search, or refused by name."""

import pytest
import torch
from torch import nn

from leakbound import Batch, simulate
from leakbound.core import NotApplicable, ThreatModel
from leakbound.data import load
from leakbound.models import joined

from ..captured.flat import attack_update

PARTS = {"image": (1, 8, 8), "table": (3,)}


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.table = nn.Linear(64, 16), nn.Linear(16, 10), nn.Linear(3, 10)

    def forward(self, image, table):
        return self.last(torch.tanh(self.first(image.flatten(1)))) + self.table(table)


class OfDictionary(Two):
    def forward(self, inputs):
        return super().forward(**inputs)


class OfTuple(Two):
    def forward(self, inputs):
        return super().forward(*inputs)


FORMS = {"arguments": Two, "keywords": Two, "dictionary": OfDictionary, "tuple": OfTuple}


@pytest.fixture
def parts():
    digits = load("digits", limit=1)
    return {"image": digits.inputs, "table": torch.tensor([[0.25, 0.5, 1.0]])}, digits.labels


@pytest.mark.parametrize("form", FORMS)
def test_a_joined_model_has_the_clients_gradient_and_gives_its_inputs(form, parts):
    named, labels = parts
    own = Two()
    loss = nn.functional.cross_entropy(own(**named), labels)
    names = [name for name, _ in own.named_parameters()]
    slopes = torch.autograd.grad(loss, list(own.parameters()))
    whole = torch.cat([part.flatten(1) for part in named.values()], 1)
    model = joined(FORMS[form](), PARTS, form=form)
    assert torch.equal(model(whole), own(**named))
    assert list(model.state_dict()) == list(own.state_dict())
    if form != "arguments":
        return
    found = attack_update(
        dict(zip(names, slopes, strict=True)),
        model,
        kind="gradient",
        input_shape=(67,),
        examples=1,
        labels=labels,
        truth=Batch(whole, labels),
        attacks=["strong_matching,steps=200"],
    )
    assert found.records[0].scores[0] > 40


def test_a_known_part_stays(parts):
    named, labels = parts
    whole = torch.cat([part.flatten(1) for part in named.values()], 1)
    threat = ThreatModel(labels_known=True, known="places:64-66")
    model = joined(Two(), PARTS)
    found = simulate(model, (whole, labels), attack="inverting_gradients,steps=5", threat=threat)
    assert torch.equal(found.reconstruction[:, 64:], named["table"])
    assert not torch.equal(found.reconstruction[:, :64], named["image"].flatten(1))


def test_what_does_not_fit_is_named(parts):
    named, labels = parts
    with pytest.raises(NotApplicable, match=r"join them to one \(leakbound.models.joined\)"):
        simulate(Two(), (named["image"], labels), attack="linear_inversion")
    with pytest.raises(ValueError, match="give the shapes of two inputs or more"):
        joined(Two(), {"image": (1, 8, 8)})
    with pytest.raises(ValueError, match="form is 'list'"):
        joined(Two(), PARTS, form="list")
    with pytest.raises(ValueError, match=r"joined have \(67,\) for each example"):
        joined(Two(), PARTS)(torch.zeros(1, 66))
