"""The public interface: a name that is dropped or added must be seen."""

import leakbound
from leakbound import attacks, audit, bounds, defenses, models


def test_top_level():
    assert leakbound.__all__ == [
        "Batch",
        "LocalPlan",
        "NotApplicable",
        "Observation",
        "Reconstruction",
        "Task",
        "ThreatModel",
        "Update",
        "attacks",
        "audit",
        "bounds",
        "captured",
        "client",
        "data",
        "defenses",
        "evaluate",
        "federation",
        "information",
        "inspection",
        "meter",
        "metrics",
        "models",
        "pair",
        "play",
        "pruning",
        "secure",
        "send",
        "stream",
        "tensors",
    ]
    for name in leakbound.__all__:
        assert getattr(leakbound, name) is not None


def test_packages():
    assert set(models.__all__) == {
        "conv", "convnet64", "headed", "lenet", "mlp", "resnet18", "simple_convnet", "two_layer",
        "vgg",
    }  # fmt: skip
    for package in (attacks, audit, bounds, defenses):
        for name in package.__all__:
            assert getattr(package, name) is not None
