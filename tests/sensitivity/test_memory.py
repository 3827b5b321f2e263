"""Peak memory is that of P and of one chunk: no block of k P, B P or P times the inputs."""

from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from leakbound import models
from leakbound.core import Task
from leakbound.engines.sensitivity import sensitivity
from leakbound.randomness import stream

pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # PyTorch 2.11


def _peak(run):
    """The most bytes held at once, by PyTorch's own allocator: the same in every run."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    live = top = 0
    events = recorded.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            top = max(top, live)
    return top


def _held(size, chunk=4, **settings):
    model = models.simple_convnet(input_shape=(1, 12, 12), classes=10, generator=stream(0, "model"))
    task = Task.of(model)
    x = torch.rand(size, 1, 12, 12, generator=stream(1))
    y = torch.arange(size) % 10
    run = partial(sensitivity, task, x, y, stream(2), chunk=chunk, **settings)
    run()  # what is planned once is kept
    return _peak(run), 4 * len(task.parameters)


@pytest.mark.parametrize("estimator", ["batch", "per_sample"])
def test_more_directions_take_no_more(estimator):
    few, own = _held(8, estimator=estimator, directions=8)
    many, _ = _held(8, estimator=estimator, directions=20)
    assert many - few < own  # a block of k P would add 12
    assert few < 40 * own


@pytest.mark.parametrize("estimator", ["batch", "per_sample"])
def test_more_examples_take_no_more_than_their_inputs(estimator):
    chunk = 2 if estimator == "batch" else 4
    few, own = _held(8, chunk, estimator=estimator, directions=2)
    many, _ = _held(32, chunk, estimator=estimator, directions=2)
    assert many - few < 2 * own  # a block of B P would add 24


def test_the_oracle_takes_no_more_for_more_examples():
    few, own = _held(2, 48, estimator="exact")
    many, _ = _held(6, 48, estimator="exact")
    assert many - few < own  # a block of P times the inputs would add 576


def test_a_wider_chunk_takes_linearly_more():
    peaks = [_held(32, chunk, directions=1)[0] for chunk in (8, 16, 32)]
    first, second = peaks[1] - peaks[0], peaks[2] - peaks[1]
    assert first > 0
    assert second < 2.5 * first
