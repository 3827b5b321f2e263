"""Which engine a machine takes: by its instruction set, or as the user says; and what says so."""

import pytest
import torch

from leakbound import models
from leakbound.attacks import inverting_gradients
from leakbound.audit import run_file
from leakbound.core import LocalPlan, Task
from leakbound.engines import choose as choosing
from leakbound.engines import convolutions, single
from leakbound.engines.base import ENGINES, kernels
from leakbound.engines.choose import choose
from leakbound.randomness import stream

SHAPE = (2, 3, 16, 16)


def task_of(build=models.convnet64, plan=None, **more):
    model = build(input_shape=SHAPE[1:], classes=5, generator=stream(0, "forced"), **more)
    return Task.of(model) if plan is None else Task.of(model, plan=plan)


def machine(monkeypatch, capability):
    monkeypatch.delenv("LEAKBOUND_ENGINE", raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)


def rules_of(task):
    """The kinds of rules that the engine made for the model's convolutions."""
    engine = choose(task, 1, SHAPE).engine([task], 1)
    x, labels = torch.rand(1, *SHAPE), torch.tensor([[0, 1]])
    engine.pull(engine.gradient(x, labels).clone())
    kinds = convolutions.ConvolutionRule, convolutions.ColumnsRule, convolutions.ChangingRule
    return {type(rule).__name__ for _, rule in engine.passes.layers if isinstance(rule, kinds)}


@pytest.mark.parametrize(
    ("capability", "taken"),
    [("AVX512", "packed"), ("AVX512_VNNI", "packed"), ("AVX2", "plain"), ("DEFAULT", "plain")],
)
def test_the_instruction_set_alone_decides(monkeypatch, capability, taken):
    """With AVX2 packed weights took 1.33 of autograd's step (ResNet-18), and 13.9 (VGG)."""
    machine(monkeypatch, capability)
    assert kernels() == taken
    assert run_file.machine()["engine"] == taken
    if capability in ("AVX512", "AVX2"):
        packs = {"PackedRule", "ColumnsRule"} & rules_of(task_of())
        assert bool(packs) == (taken == "packed")


@pytest.mark.parametrize("word", ENGINES)
def test_the_user_decides_otherwise(monkeypatch, word):
    for capability in ("AVX512", "AVX2"):
        machine(monkeypatch, capability)
        monkeypatch.setenv("LEAKBOUND_ENGINE", word)
        assert kernels() == run_file.machine()["engine"] == word
        chosen = choose(task_of(models.lenet), 1, SHAPE)
        steps = choose(task_of(models.lenet, LocalPlan(2, 0.1)), 1, SHAPE)
        assert (chosen is None) == (steps is None) == (word == "autograd")


def test_a_word_that_is_no_engine_is_refused(monkeypatch):
    monkeypatch.setenv("LEAKBOUND_ENGINE", "fast")
    with pytest.raises(ValueError, match="LEAKBOUND_ENGINE is 'fast'"):
        kernels()


def test_a_model_is_compared_with_autograd_for_every_way(monkeypatch):
    task, asked = task_of(models.lenet), []
    plan = single._plan
    monkeypatch.setattr(single, "_plan", lambda *given: asked.append(kernels()) or plan(*given))
    for word in ("packed", "plain", "packed", "plain"):
        monkeypatch.setenv("LEAKBOUND_ENGINE", word)
        choose(task, 1, SHAPE)
    assert asked == ["packed", "plain"]


def test_a_forced_engine_is_the_same_attack(monkeypatch):
    from leakbound import Batch, defenses, play

    task, answers = task_of(models.lenet), []
    batch = Batch(torch.rand(SHAPE, generator=stream(0, "x")), torch.tensor([1, 2]))
    sources = [stream(0, "defense")] * 2
    seen = play(task, [batch], defenses.NoDefense(), sources).observation
    for word in ENGINES:
        monkeypatch.setenv("LEAKBOUND_ENGINE", word)
        answers.append(inverting_gradients(steps=3)(seen, stream(0, "attack")).inputs)
    assert torch.allclose(answers[0], answers[2], atol=1e-3)
    assert torch.allclose(answers[1], answers[2], atol=1e-3)


def test_large_linear_models_are_not_bundled(monkeypatch):
    """Two layers of 3.1 million weights took 1.02 of autograd bundled, and .83 alone."""
    machine(monkeypatch, "AVX2")
    large = task_of(models.two_layer)
    assert len(large.parameters) > choosing.LARGEST
    assert choose(large, 1, SHAPE).chain is None
    small = task_of(models.mlp)
    assert len(small.parameters) < choosing.LARGEST
    assert choose(small, 1, SHAPE).chain is not None
