import pytest
import torch
from torch.nn import functional

from leakbound.engines import loss


def _given(soft):
    source = torch.Generator().manual_seed(0)
    logits, tangent = torch.randn(2, 6, 4, generator=source, dtype=torch.float64)
    labels = torch.randint(4, (6,), generator=source)
    if soft:
        labels = torch.rand(6, 4, generator=source, dtype=torch.float64)
    return logits, labels, tangent


def _autograd(function, logits, labels, tangent):
    logits = logits.clone().requires_grad_()
    soft = labels.is_floating_point()
    labels = labels.clone().requires_grad_() if soft else labels
    (slopes,) = torch.autograd.grad(function(logits, labels), logits, create_graph=True)
    wanted = [logits, labels] if soft else [logits]
    return [slopes.detach(), *torch.autograd.grad(slopes, wanted, tangent)]


def _check(at, wanted, tangent):
    moved, labels = at.moved(tangent)
    found = [at.deltas, moved] + ([] if labels is None else [labels])
    assert len(found) == len(wanted)
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-15)


LOSSES = {
    "cross_entropy": functional.cross_entropy,
    "smoothed": lambda z, y: functional.cross_entropy(z, y, label_smoothing=0.2),
    "summed": lambda z, y: functional.cross_entropy(z, y, reduction="sum"),
}


@pytest.mark.parametrize("soft", [False, True], ids=["classes", "soft"])
@pytest.mark.parametrize("name", LOSSES)
def test_slopes_are_autograds(name, soft):
    logits, labels, tangent = _given(soft)
    wanted = _autograd(LOSSES[name], logits, labels, tangent)
    _check(loss.head(LOSSES[name], logits, labels), wanted, tangent)


@pytest.mark.parametrize("soft", [False, True], ids=["classes", "soft"])
def test_rows_of_several_batches(soft):
    logits, labels, tangent = _given(soft)
    at = loss.CrossEntropy(logits, labels, size=2)
    moved = at.moved(tangent)
    for cell in range(3):
        part = slice(2 * cell, 2 * cell + 2)
        alone = loss.CrossEntropy(logits[part], labels[part], size=2)
        torch.testing.assert_close(at.deltas[part], alone.deltas)
        for all_rows, own in zip(moved, alone.moved(tangent[part]), strict=True):
            if own is not None:
                torch.testing.assert_close(all_rows[part], own)


def test_a_straight_loss_has_no_change():
    logits, labels, tangent = _given(True)
    at = loss.head(lambda z, y: (z[:, 0] * 2).mean(), logits, labels)
    assert at.deltas[:, 0].eq(2 / 6).all()
    assert not any(part.any() for part in at.moved(tangent))


def test_a_pull_can_be_repeated():
    logits, labels, tangent = _given(False)
    for function in LOSSES.values():
        at = loss.head(function, logits, labels)
        torch.testing.assert_close(at.moved(tangent)[0], at.moved(tangent)[0])
