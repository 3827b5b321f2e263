"""Check whether the sent update is a smooth function of its inputs. Cramér-Rao bounds need this.

The gradient of a network with ReLU or max pools is discontinuous, and a discontinuity leaks
information that derivative-based bounds miss. So the check traces the gradient itself, not the
forward pass. Every operator that depends on the inputs must be on a list of smooth operators. An
operator off the list, or a failed trace, counts as not smooth, because a list of non-smooth
operators could never be complete.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from leakbound.client import pure_simulate
from leakbound.core import DefenseProtocol, Task
from leakbound.engines import activations
from leakbound.engines.calls import sequence
from leakbound.engines.reader import Kind, Layer, Unreadable

_GROUPS = {
    "sums and products": (
        "add addbmm addcmul addmm addmv baddbmm bmm convolution convolution_backward cumsum "
        "dot mean mkldnn_convolution mm mul mv neg outer rsub square sub sum"
    ),
    "functions with derivatives of every order, besides activations": (
        "atan cos cosh erf erfc exp exp2 expm1 log_sigmoid_backward log_sigmoid_forward logaddexp "
        "logsumexp mish sin sinh _softmax _softmax_backward_data _safe_softmax _log_softmax "
        "_log_softmax_backward_data"
    ),
    "losses": (
        "binary_cross_entropy_with_logits mse_loss mse_loss_backward nll_loss_backward "
        "nll_loss_forward nll_loss2d_backward nll_loss2d_forward"
    ),
    "norms, whose square roots stay above their eps": (
        "_native_batch_norm_legit_no_training native_batch_norm native_batch_norm_backward "
        "native_group_norm native_layer_norm native_layer_norm_backward"
    ),
    "linear maps: pools that average, resizing, padding": (
        "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d "
        "_adaptive_avg_pool3d_backward avg_pool2d avg_pool2d_backward avg_pool3d "
        "avg_pool3d_backward constant_pad_nd reflection_pad1d reflection_pad1d_backward "
        "reflection_pad2d reflection_pad2d_backward replication_pad2d "
        "replication_pad2d_backward upsample_bilinear2d upsample_bilinear2d_backward "
        "upsample_nearest2d upsample_nearest2d_backward"
    ),
    "moving values: an index that depends on the inputs comes from an operator not on this list": (
        "_index_put_impl _reshape_alias _to_copy _unsafe_index _unsafe_view alias as_strided "
        "cat clone contiguous copy detach diagonal diagonal_backward empty_like expand fill "
        "flip full_like gather getitem index index_add index_put index_select lift_fresh "
        "lift_fresh_copy masked_fill new_empty new_empty_strided new_full new_ones new_zeros "
        "ones_like permute repeat reshape roll scatter scatter_add select select_backward "
        "slice slice_backward split split_with_sizes squeeze stack t to transpose unbind "
        "unfold unfold_backward unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze "
        "view where zero zeros_like"
    ),
}
_NAMES = [kind.operator for kind in activations.KINDS if kind.operator]
SMOOTH = frozenset(
    [word for words in _GROUPS.values() for word in words.split()]
    + [name + way for name in _NAMES for way in ("", "_backward")]
)
"""Operators that keep a function smooth, some with a condition in `_ALLOWED`."""


def not_smooth(
    task: Task,
    inputs: Tensor,
    labels: Tensor,
    defense: DefenseProtocol | None = None,
) -> tuple[str, ...]:
    """Names of what prevents a proof that the release is smooth in the inputs; () if it is proven.

    The defense must declare that its output is continuous (`Defense.continuous`). Clipping keeps
    it continuous, which suffices. Only the shapes and types of inputs and labels count, so a model
    that branches on values is rejected.
    """
    obstacles = set() if defense is None or defense.continuous else {"the defense"}
    if kinks := _kinks(task, inputs):
        return tuple(sorted(obstacles | kinks))

    from torch.fx.experimental.proxy_tensor import make_fx  # here: it imports sympy

    def sent(x: Tensor) -> Tensor:
        return pure_simulate(task, x, labels, None)

    try:
        with torch.enable_grad():
            graph = make_fx(
                sent,
                tracing_mode="fake",
                _allow_non_fake_inputs=True,
            )(inputs).graph
    except Exception as error:  # whatever a user's model raises during tracing
        return (f"{type(error).__name__} while the gradient was traced", *sorted(obstacles))
    return tuple(sorted(obstacles | _off_the_list(graph)))


def _kinks(task: Task, inputs: Tensor) -> set[str]:
    """The layers with jumping slopes of a chain that the engines read. They answer without a trace,
    which imports PyTorch's compiler.
    """
    try:
        layers = sequence(task, tuple(inputs.shape[1:]))
    except Unreadable:
        return set()
    kinks = [layer for layer in layers if layer.kind is Kind.MAX_POOL or _bends(layer)]
    return {type(task.model.get_submodule(layer.name)).__name__ for layer in kinks}


def _bends(layer: Layer) -> bool:
    return isinstance(layer.options.get("function"), activations.Rectifier | activations.Clamp)


def _off_the_list(graph: fx.Graph) -> set[str]:
    """The operators that depend on the inputs and are not smooth."""
    depends: set[fx.Node] = set()
    names = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            depends.add(node)
        if node.op != "call_function" or depends.isdisjoint(node.all_input_nodes):
            continue
        depends.add(node)
        written = node.args[0] if node.args else None
        name = getattr(node.target, "overloadpacket", node.target).__name__
        if name.endswith("_") and written not in depends:
            names.add(f"{name} into another tensor")  # a view of it would not show the dependence
        name = name.rstrip("_")
        allowed = _ALLOWED[name](node, depends) if name in _ALLOWED else name in SMOOTH
        if not allowed:
            names.add(name)
    return names


def _by_a_constant(node: fx.Node, depends: set[fx.Node]) -> bool:
    # A divisor that depends on the inputs may be 0, and such a mask may jump.
    return len(node.args) > 1 and node.args[1] not in depends


def _where(node: fx.Node, depends: set[fx.Node]) -> bool:
    return node.args[0] not in depends  # such a condition may jump


def _power(node: fx.Node, depends: set[fx.Node]) -> bool:
    exponent = node.args[1] if len(node.args) > 1 else None
    # Other powers have a singularity at 0, in their value or in some derivative.
    return isinstance(exponent, int | float) and exponent >= 0 and float(exponent).is_integer()


def _elu(node: fx.Node, depends: set[fx.Node]) -> bool:
    """Equal slopes on both sides of 0; selu uses the same operator."""
    factors = node.args[1:4]  # alpha, scale, input_scale, after the input or the output's gradient
    alpha, _, steep = (*map(str, factors), *("1", "1", "1")[len(factors) :])
    return float(alpha) * float(steep) == 1


def _to_float(node: fx.Node, depends: set[fx.Node]) -> bool:
    # A conversion to whole numbers is a step function.
    value: Any = node.meta["val"]
    return bool(value.dtype.is_floating_point)


def _of_exp(node: fx.Node, depends: set[fx.Node]) -> bool:
    """log(1 + e^z), which has no singularity."""
    inside = node.args[0]
    return isinstance(inside, fx.Node) and "exp" in str(inside.target)


_ALLOWED = {
    "div": _by_a_constant,
    "masked_fill": _by_a_constant,
    "where": _where,
    "pow": _power,
    "elu": _elu,
    "elu_backward": _elu,
    "_to_copy": _to_float,
    "log1p": _of_exp,
}
"""Operators that are smooth under a condition."""
