"""Mods around a training that leaves a part of the model as it came."""

import json

import torch
from flwr.app import ArrayRecord

from leakbound import client
from leakbound.captured.observe import TrainingInfo, infer_context, task_of
from leakbound.client import example_gradients
from leakbound.defenses import Clip, ClipExamples, DpSgd, GaussianNoise, Mean, chain
from leakbound.domains import of_shape
from leakbound.flower import DefenseMod, LeakMeter, Setup
from leakbound.flower.server import capture_of
from leakbound.meter import Policy


def half(flower):
    """The app's model with its first layer frozen."""

    def make():
        model = flower.Net()
        model.first.requires_grad_(False)
        return model

    return make


def changed(flower, reply, model):
    before, after = model().state_dict(), reply.content["arrays"].to_torch_state_dict()
    return {name: before[name] - after[name] for name in before}


def test_a_defense_edits_what_is_trained_alone(flower, digits, batches):
    model = half(flower)
    setup = Setup(model, classes=10)
    assert len(setup.task(setup.state(), {"lr": 0.5}).parameters) == 130
    for defense in (chain(Clip(0.1), GaussianNoise(0.05)), DpSgd(0.1, 0.5)):
        app = flower.client_app([DefenseMod(defense, setup, seed=0)], batches=batches, model=model)
        reply = flower.ask(app, model=model)
        assert not reply.has_error(), reply.error.reason
        moved = changed(flower, reply, model)
        assert not bool(moved["first.weight"].any() or moved["first.bias"].any())
        assert bool((moved["last.weight"] != 0).all())


def test_dp_sgd_clips_by_the_norm_of_what_is_trained(flower, digits, batches):
    model = half(flower)
    setup = Setup(model, classes=10)
    app = flower.client_app(
        [DefenseMod(chain(ClipExamples(0.1), Mean()), setup)], batches=batches, model=model
    )
    moved = changed(flower, flower.ask(app, model=model), model)
    rows = example_gradients(setup.task(setup.state(), {"lr": 0.5}), *batches(0, 1)[0])
    wanted = 0.5 * (rows * (0.1 / rows.norm(dim=1, keepdim=True)).clamp_max(1)).mean(0)
    found = torch.cat([moved["last.weight"].reshape(-1), moved["last.bias"]])
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-6)


def test_messages_of_the_trained_parameters_alone(flower, digits, batches):
    """As adapters are sent: neither mods nor captures miss the frozen ones."""
    model = half(flower)
    setup = Setup(model, classes=10)
    sent = {k: v for k, v in model().state_dict().items() if k.startswith("last")}
    task = setup.task(sent, {"lr": 0.5})
    assert torch.equal(task.tensors()["first.weight"], model().state_dict()["first.weight"])

    class Adapter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model()

        def state_dict(self):
            return {k: v for k, v in self.net.state_dict().items() if k.startswith("last")}

        def load_state_dict(self, named):
            self.net.load_state_dict(named, strict=False)

        def forward(self, inputs):
            return self.net(inputs)

    for mods in ([], [DefenseMod(GaussianNoise(0.05), setup, seed=0)]):
        app = flower.client_app(mods, batches=batches, model=Adapter)
        asked = flower.message(None, arrays=ArrayRecord(sent))
        reply = flower.ask(app, flower.message(None, arrays=ArrayRecord(sent)))
        assert not reply.has_error(), reply.error.reason
        assert list(reply.content["arrays"]) == list(sent)
        capture = capture_of(1, asked, reply)
        seen_task, notes = task_of(model(), capture, of_shape((1, 8, 8)), classes=10)
        assert "2 of 2 frozen tensors" in notes[0]
        told = TrainingInfo(examples=4, steps=1)
        row = infer_context(
            capture, seen_task, told, input_shape=(1, 8, 8)
        ).observation.update.rows[0]
        plain = client.gradient(task, *batches(0, 1)[0])
        cosine = float(torch.nn.functional.cosine_similarity(row, plain, 0))
        assert (cosine > 0.999) == (not mods)


def test_a_train_function_that_changes_what_is_frozen_is_refused(flower, digits, batches, tmp_path):
    """The Setup's model says what is trained; what leaves beside it nobody would judge."""
    setup = Setup(half(flower), classes=10)
    for mod in (DefenseMod(GaussianNoise(0.05), setup), LeakMeter(setup, Policy())):
        reply = flower.ask(flower.client_app([mod], batches=batches))
        assert reply.has_error()
        if isinstance(mod, DefenseMod):
            assert (
                "the train function changed 'first.weight', which is frozen" in reply.error.reason
            )


def test_the_meter_measures_what_is_trained(flower, digits, batches, tmp_path):
    model, path = half(flower), tmp_path / "readings.jsonl"
    setup = Setup(model, classes=10)
    app = flower.client_app([LeakMeter(setup, Policy(), path=path)], batches=batches, model=model)
    assert not flower.ask(app, model=model).has_error()
    reading = json.loads(path.read_text())
    assert reading["action"] == "send"
    assert reading["verdict"] == "undecided"
