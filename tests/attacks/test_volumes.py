"""Volumes (C, D, H, W): images of three axes, in searches and on pages."""

import pytest
import torch
from torch import nn

from leakbound import Batch, simulate
from leakbound.assess.reidentification import edges
from leakbound.attacks.matching.distances import total_variation, variation_gradients
from leakbound.captured import Settings, TrainingInfo, load
from leakbound.captured.observe import infer_context, task_of
from leakbound.captured.run import _attacks
from leakbound.domains import VolumeDomain, of_shape

SHAPE = (1, 6, 5, 4)


def volume():
    z, y, x = torch.meshgrid(*(torch.linspace(-1, 1, n) for n in SHAPE[1:]), indexing="ij")
    return (0.5 + 0.4 * torch.sin(2 * z + y) * torch.cos(x))[None, None]


def test_the_total_variation_runs_along_three_axes():
    drawn = torch.rand(2, 3, *SHAPE[1:], dtype=torch.float64, requires_grad=True)
    parts = []
    for axis, size in zip((2, 3, 4), SHAPE[1:], strict=True):
        after, before = (drawn.narrow(axis, start, size - 1) for start in (1, 0))
        parts.append((after - before).abs().mean())
    torch.testing.assert_close(total_variation(drawn), sum(parts))
    (wanted,) = torch.autograd.grad(sum(parts), drawn)
    ((value, _),) = found = variation_gradients(drawn.detach()[None].clone())
    torch.testing.assert_close(value, sum(parts).detach())
    torch.testing.assert_close(found[0][1], wanted)


def test_pages_show_the_middle_slices():
    domain = of_shape(SHAPE)
    assert isinstance(domain, VolumeDomain)
    drawn = torch.rand(2, *SHAPE)
    (shown,) = domain.fields(None, drawn).pictures.values()
    assert shown.shape == (2, 1, 5 + 6 + 6, 5)
    torch.testing.assert_close(shown[:, :, :5, :4], drawn[:, :, 3])
    torch.testing.assert_close(shown[:, :, 5:11, :4], drawn[:, :, :, 2])
    torch.testing.assert_close(shown[:, :, 11:], drawn[..., 2])
    assert not shown[:, :, :11, 4].any()
    assert domain.fields(drawn, drawn).pictures.keys() == {"truth", "reconstruction"}
    assert of_shape((1, 1, 5, 4)).fields(None, drawn[:, :, :1]).pictures is None


def test_a_smooth_volume_is_found_where_the_update_alone_does_not_determine_it():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv3d(1, 2, 3, stride=2, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(36, 2)
    )
    batch = Batch(volume(), torch.tensor([1]))
    attack = "inverting_gradients,steps=200"
    smooth = simulate(net, batch, attack=attack)
    rough = simulate(net, batch, attack=f"{attack},total_variation=0,smoothing=0")
    assert smooth.scores[0] > max(rough.scores[0], smooth.assessment.baseline[0]) + 6
    assert smooth.assessment.data.domain == "volumes"
    assert smooth.assessment.pictures.keys() == {"truth", "reconstruction"}


@pytest.mark.parametrize(("shape", "weight"), [(SHAPE, 0.01), ((1, 24, 5), None)])
def test_captured_updates_of_volumes_are_searched_for_smooth_ones(shape, weight):
    net = nn.Sequential(nn.Flatten(), nn.Linear(120, 3))
    update = {name: torch.ones_like(value) for name, value in net.named_parameters()}
    capture = load(update, dict(net.state_dict()), kind="gradient")
    task, _ = task_of(net, capture, of_shape(shape))
    inferred = infer_context(capture, task, TrainingInfo(examples=2), input_shape=shape)
    chosen = {spec.name: spec.parameters for spec in _attacks(Settings(shape), inferred)}
    assert chosen["inverting_gradients"].get("total_variation") == weight
    assert chosen["linear_inversion"] == {}


def test_edges_count_along_every_axis():
    one = volume()
    other = one.flip(2)  # the same slices in another order
    assert float(edges(one, one)) > 0.999
    assert float(edges(one, other)) < 0.9
