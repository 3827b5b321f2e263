"""Models to audit: every name exported here builds one, at weights drawn from a generator.

All are in eval mode, free of in-place operations and safe under `torch.func`.
"""

from leakbound.models.convnet import convnet64, simple_convnet
from leakbound.models.lenet import lenet
from leakbound.models.mlp import mlp
from leakbound.models.resnet import resnet18

__all__ = ["convnet64", "lenet", "mlp", "resnet18", "simple_convnet"]
