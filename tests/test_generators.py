import random

import numpy as np
import torch

from leakbound._util import generators


def draws():
    return torch.rand(2).tolist(), random.random(), np.random.random()  # noqa: NPY002


def test_a_draw_of_any_global_generator_is_seen():
    for draw in (lambda: torch.rand(1), random.random, np.random.random):
        before = generators.states()
        assert generators.states() == before
        draw()
        assert generators.states() != before


def test_other_draws_leave_the_generators_as_they_were():
    before = generators.states()
    device = torch.device("cpu")
    with generators.other_draws(device, 1):
        first = draws()
    with generators.other_draws(device, 1):
        again = draws()
    with generators.other_draws(device, 2):
        other = draws()
    assert first == again
    assert all(one != two for one, two in zip(first, other, strict=True))
    assert generators.states() == before


def test_to_seed_keeps_nothing_for_cuda():
    """`torch.manual_seed` keeps a call with a traceback for each seed until CUDA starts."""
    kept = len(torch.cuda._queued_calls)
    with generators.other_draws(torch.device("cpu"), 1):
        pass
    assert len(torch.cuda._queued_calls) == kept
