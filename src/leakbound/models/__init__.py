"""Models to audit: every name exported here builds one, with weights drawn from a generator.

All take `input_shape` (C, H, W) of one image, `classes` (the number of outputs) and `generator`
(the source of the initial weights) by keyword. All are in eval mode, free of in-place operations
and safe under `torch.func`.
"""

from leakbound.models.networks import (
    conv,
    convnet64,
    headed,
    lenet,
    mlp,
    resnet18,
    simple_convnet,
    two_layer,
    vgg,
)

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
