"""Models to audit: every name exported here builds one, with weights drawn from a generator.

`adapted` and `joined` are for your own. All others take `input_shape` of one example, such as
(C, H, W) of an image, (C, T) of a series or (n,) of a sequence of tokens, `classes` (the number of
outputs) and `generator` (the source of the initial weights) by keyword.
All are in eval mode, free of in-place operations and safe under `torch.func`.
"""

from leakbound.models.custom import adapted, joined
from leakbound.models.networks import (
    conv,
    convnet64,
    headed,
    lenet,
    mlp,
    resnet18,
    simple_convnet,
    two_layer,
    unet,
    vgg,
)
from leakbound.models.series import conv1d, gru, lstm
from leakbound.models.transformers import decoder, encoder, vit

__all__ = [
    "adapted",
    "conv",
    "conv1d",
    "convnet64",
    "decoder",
    "encoder",
    "gru",
    "headed",
    "joined",
    "lenet",
    "lstm",
    "mlp",
    "resnet18",
    "simple_convnet",
    "two_layer",
    "unet",
    "vgg",
    "vit",
]
