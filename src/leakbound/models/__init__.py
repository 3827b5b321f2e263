"""Models to audit: every name exported here builds one, at weights drawn from a generator.

All are in eval mode, free of in-place operations and safe under `torch.func`.
"""

from leakbound.models.conv import conv
from leakbound.models.convnet import convnet64, simple_convnet
from leakbound.models.headed import headed
from leakbound.models.lenet import lenet
from leakbound.models.mlp import mlp
from leakbound.models.resnet import resnet18
from leakbound.models.two_layer import two_layer
from leakbound.models.vgg import vgg

__all__ = [
    "conv",
    "convnet64",
    "headed",
    "lenet",
    "mlp",
    "resnet18",
    "simple_convnet",
    "two_layer",
    "vgg",
]
