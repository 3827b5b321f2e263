"""Attacks and defenses where a part of the model is frozen: they use what is sent, or say no."""

import pytest
import torch
from torch import nn

import leakbound as lb
from leakbound.attacks import LinearInversion, inverting_gradients
from leakbound.attacks.features.cocktail_party import CocktailPartyImages, probed
from leakbound.attacks.labels import LABEL_RULES, infer, infer_labels
from leakbound.client import example_gradients
from leakbound.core import Batch, NotApplicable, Server, Task, ThreatModel
from leakbound.defenses import DpSgd, GaussianNoise, HiddenDropout, NoDefense, Soteria, TopK, chain
from leakbound.inspection import inspect
from leakbound.pruning import Magnitude, Synflow
from leakbound.randomness import stream
from leakbound.testing import check_attack, check_defense
from leakbound_reproductions.attacks.head import find_head, head_layers, special_head
from leakbound_reproductions.attacks.tensor import TensorMethod

NO_FIRST = ("frozen backbone", "LoRA", "frozen first layer", "trained biases")
NO_LAST = ("LoRA", "frozen last layer")
MALICIOUS = ThreatModel(server=Server.MALICIOUS)


def observed(task, batch, defense=None, **more):
    sources = [stream(0, "client"), stream(0, "cohort")]
    return lb.play(task, [batch], defense or NoDefense(), sources, **more).observation


def one(batch):
    return Batch(batch.inputs[:1], batch.labels[:1])


def test_an_update_has_one_number_a_trained_parameter(name, task, model, batch):
    rows = observed(task, batch).update.rows
    assert rows.shape == (1, sum(p.numel() for p in model.parameters() if p.requires_grad))
    if name == "LoRA":
        assert rows.shape[1] == 2 * (36 + 16) + 2 * (16 + 3)


def test_the_input_is_read_off_the_layer_that_sees_it_or_the_reason_is_said(name, task, batch):
    batch = one(batch)
    seen = observed(task, batch)
    if name in (*NO_FIRST, "frozen convolution inside"):
        reason = "no linear layer with a bias" if "conv" in name or "back" in name else "is frozen"
        with pytest.raises(NotApplicable, match=reason):
            LinearInversion()(seen, stream(0))
    else:
        answer = LinearInversion()(seen, stream(0))
        torch.testing.assert_close(answer.inputs, batch.inputs, rtol=0, atol=1e-3)


def test_labels_are_right_or_the_reason_is_said(name, task, batch):
    seen = observed(task, one(batch), threat=ThreatModel(labels_known=False))
    if name in NO_LAST:
        for rule in LABEL_RULES:
            with pytest.raises(NotApplicable, match=r"the last linear layer .* is frozen"):
                infer(rule, seen, stream(0))
        return
    assert infer_labels(seen, stream(0)).tolist() == [2]
    for rule in set(LABEL_RULES) - {"bias"}:
        if name == "trained biases":
            with pytest.raises(NotApplicable, match="weight of the last layer '5' is frozen"):
                infer(rule, seen, stream(0))


def test_labels_of_a_batch_by_the_bias_alone(make, batch):
    seen = observed(make("trained biases"), batch, threat=ThreatModel(labels_known=False))
    assert infer_labels(seen, stream(0)).tolist() == sorted(batch.labels.tolist())


def test_searches_match_what_is_sent(task, batch):
    seen = observed(task, batch)
    answer = inverting_gradients(steps=60)(seen, stream(0))
    assert answer.inputs.shape == batch.inputs.shape
    assert min(answer.trace) < 0.9 * answer.trace[0]


@pytest.mark.parametrize("name", ["LoRA", "frozen backbone"])
def test_the_contract_of_a_search(make, batch, name):
    check_attack(inverting_gradients(steps=5), task=make(name), batch=batch)


@pytest.mark.parametrize(
    ("name", "defense"),
    [
        *(("frozen backbone", defense) for defense in (DpSgd(1.0, 0.5), TopK(0.9), Soteria(0.4))),
        *(("frozen first layer", each) for each in (chain(GaussianNoise(0.1)), HiddenDropout(0.5))),
    ],
    ids=repr,
)
def test_the_contract_of_defenses(make, batch, name, defense):
    check_defense(defense, task=make(name), batch=batch)


def test_soteria_withholds_columns_of_a_trained_layer_alone(make, batch):
    with pytest.raises(ValueError, match="no trained linear layer behind"):
        observed(make("trained biases"), batch, Soteria(0.5))
    with pytest.raises(ValueError, match="layer is '1'"):
        observed(make("frozen first layer"), batch, Soteria(0.5, "1"))


def test_dp_sgd_clips_each_examples_gradient_of_the_trained_weights(task, batch):
    clip = 0.1
    rows = example_gradients(task, batch.inputs, batch.labels)
    wanted = (rows * (clip / rows.norm(dim=1, keepdim=True)).clamp_max(1)).mean(0)
    update = observed(task, batch, DpSgd(clip, 1e-9)).update
    torch.testing.assert_close(update.rows[0], wanted, rtol=1e-4, atol=1e-6)


def test_a_cocktail_party_listens_to_the_first_trained_layer(make, batch):
    task = make("frozen first layer")
    seen = observed(task, batch)
    assert probed(task, seen, stream(0), None)[0] == "3"
    with pytest.raises(NotApplicable, match="'1' is frozen"):
        CocktailPartyImages(layer="1")(seen, stream(0))


def head(*frozen):
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 80), nn.GELU(), nn.Linear(80, 3))
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return Task.of(model, input_range=(-3.0, 3.0), classes=3)


def test_a_feature_head_is_read_where_its_last_layer_is_trained():
    task = head("1.weight", "1.bias")
    planted = special_head(task, 40, stream(0))
    assert "1.weight" in planted.frozen
    assert bool((planted.buffers["1.weight"][-40:] != task.buffers["1.weight"][-40:]).any())
    found = find_head(planted, (1, 2, 3))
    torch.testing.assert_close(
        found.activation(torch.ones(2).double()), nn.GELU()(torch.ones(2).double())
    )
    batch = Batch(torch.randn((1, 1, 2, 3), generator=stream(0)).clamp(-3, 3), torch.tensor([1]))
    attack = TensorMethod(random=60)
    seen = observed(attack.plant(task), batch, threat=MALICIOUS)
    answer = attack.find(seen, stream(1))
    truth = nn.functional.normalize(batch.inputs.flatten(1))
    assert abs(float(answer.vectors @ truth.T)) > 0.7
    with pytest.raises(NotApplicable, match="3 is frozen"):
        head_layers(head("3.weight"))
    assert attack.plant(head("3.weight")).parameters.shape == head("3.weight").parameters.shape


def test_pruning_takes_trained_weights_alone(make, batch):
    task = make("frozen backbone")
    for scheme in (Magnitude(rate=0.5), Synflow(rate=0.5, iterations=3)):
        mask = scheme.start(task, batch, stream(0))
        assert len(mask) == len(task.parameters)
        small = task.pruned(mask)
        assert small.frozen.keys() == task.frozen.keys()
        assert int((~mask).sum()) == (36 * 8 + 8 * 3) // 2


def test_inspection_reads_frozen_layers_too():
    planted = nn.Sequential(nn.Flatten(), nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 3))
    with torch.no_grad():
        planted[1].weight.copy_(torch.ones(64, 36))
        planted[1].bias.copy_(-torch.linspace(10, 26, 64))
    marks = {}
    for trains in (True, False):
        planted[1].requires_grad_(trains)
        found = inspect(Task.of(planted, classes=3))
        marks[trains] = {(f.layer, f.kind) for f in found if f.marked}
    assert marks[True] == marks[False]
    assert ("1", "imprint") in marks[True]
