"""Recurrent layers step by step, which PyTorch can differentiate to any order and under `vmap`.

PyTorch's own kernels cannot: cuDNN has no second derivative, oneDNN no forward mode, and the plain
CPU kernels write in place, which `vmap` over weights refuses.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.rnn import PackedSequence

State = tuple[Tensor, ...]


def _step(
    kind: str,
    x: Tensor,
    hidden: Tensor,
    state: State,
) -> State:
    """The next state from both linear maps (B, G): of the input and of the hidden state."""
    if kind == "GRU":
        (reset, update, new) = x.chunk(3, -1)
        (r, u, n) = hidden.chunk(3, -1)
        kept = (update + u).sigmoid()
        # The reset gate acts after the linear map, as in PyTorch, unlike in Cho et al. 2014.
        return ((1 - kept) * (new + (reset + r).sigmoid() * n).tanh() + kept * state[0],)
    if kind == "LSTM":
        enter, forget, cell, leave = (x + hidden).chunk(4, -1)
        cell = forget.sigmoid() * state[1] + enter.sigmoid() * cell.tanh()
        return leave.sigmoid() * cell.tanh(), cell
    return ((x + hidden).relu() if kind == "RNN_RELU" else (x + hidden).tanh(),)


class _StepByStep(nn.RNNBase):
    """The forward pass of RNN, LSTM and GRU as plain operations."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """As PyTorch's; `input` is a tensor (T, B, C), (B, T, C) if `batch_first`, or (T, C)."""
        if isinstance(input, PackedSequence):
            raise ValueError(
                f"{self.mode} takes a PackedSequence; give series of one length as a tensor"
            )
        alone = input.dim() == 2
        swap = self.batch_first and not alone
        x = input.unsqueeze(1) if alone else input
        x = x.transpose(0, 1) if swap else x
        states = hx if isinstance(hx, tuple) else (hx,) * (hx is not None)
        starts = [state.unsqueeze(1) if alone else state for state in states]
        ends = list[State]()
        sides = 2 if self.bidirectional else 1
        for layer in range(self.num_layers):
            parts = []
            for side in range(sides):
                begin = tuple(state[layer * sides + side] for state in starts)
                outputs, end = self._scan(x, f"_l{layer}" + "_reverse" * side, begin, bool(side))
                parts.append(outputs)
                ends.append(end)
            x = torch.cat(parts, -1) if sides > 1 else parts[0]
        last = [torch.stack(state) for state in zip(*ends, strict=True)]
        last = [state.squeeze(1) for state in last] if alone else last
        output = x.transpose(0, 1) if swap else x
        output = output.squeeze(1) if alone else output
        return output, last[0] if len(last) == 1 else tuple(last)

    def _scan(
        self,
        x: Tensor,
        name: str,
        state: State,
        back: bool,
    ) -> tuple[Tensor, State]:
        """Outputs (T, B, H) of one layer in one direction, and its last state."""

        def weight(part: str) -> Tensor | None:
            return cast(Tensor | None, getattr(self, part + name, None))

        inner = weight("weight_hh")
        short = weight("weight_hr")
        assert inner is not None  # every recurrent layer has it
        entering = linear(x, getattr(self, "weight_ih" + name), weight("bias_ih"))
        if not state:
            # With a projection (`proj_size`) the two states of an LSTM differ in size.
            sizes = [inner.shape[1], self.hidden_size][: 1 + (self.mode == "LSTM")]
            state = tuple(x.new_zeros(x.shape[1], size) for size in sizes)
        outputs: list[Tensor] = []
        for entry in entering.flip(0) if back else entering:
            state = _step(self.mode, entry, linear(state[0], inner, weight("bias_hh")), state)
            if short is not None:
                state = (linear(state[0], short), *state[1:])
            outputs.append(state[0])
        return torch.stack(outputs[::-1] if back else outputs), state


class StepRNN(_StepByStep, nn.RNN):
    """`nn.RNN`, step by step."""


class StepLSTM(_StepByStep, nn.LSTM):
    """`nn.LSTM`, step by step."""


class StepGRU(_StepByStep, nn.GRU):
    """`nn.GRU`, step by step."""


_STEPS: dict[type, type] = {nn.RNN: StepRNN, nn.LSTM: StepLSTM, nn.GRU: StepGRU}


def step_by_step(model: nn.Module) -> nn.Module:
    """Let the model's recurrent layers compute step by step, in place; weights keep their names.

    Example:
        >>> layer = nn.LSTM(2, 3)
        >>> x = torch.ones(4, 1, 2)
        >>> before = layer(x)[0]
        >>> torch.allclose(step_by_step(layer)(x)[0], before, atol=1e-6)
        True
    """
    for module in model.modules():
        # By exact type: a subclass may have its own forward pass. A new module would lack hooks.
        module.__class__ = _STEPS.get(type(module), type(module))
    return model
