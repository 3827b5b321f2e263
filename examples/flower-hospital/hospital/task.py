"""What all sides agree on: the model, who holds which images, and the accepted risk."""

from functools import cache

import torch
from torch import nn

from leakbound import data
from leakbound.bounds.record_priors import from_images
from leakbound.data.federated import dirichlet
from leakbound.randomness import stream
from leakbound.risk import Calibration, TrainingSetting, calibrate_setting

ROUNDS = 10
RISK = "psnr>=30 with probability<=0.001"
CLIP_NORM = 1.0
PUBLIC = 500
SMALL = 4


class Net(nn.Module):
    """A CNN with group norm.

    Batch norm would let the images of a batch see each other, and its statistics would leave
    beside the weights.
    """

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2, padding=2),
            nn.GroupNorm(4, 16),
            nn.SiLU(),
            nn.Conv2d(16, 32, 5, stride=2, padding=2),
            nn.GroupNorm(4, 32),
            nn.SiLU(),
        )
        self.head = nn.Linear(32 * 7 * 7, 10)

    def forward(self, x):
        """Ten scores for each image of 28 x 28."""
        return self.head(self.body(x).flatten(1))


@cache
def images():
    """3,000 real images that replace scans: public ones, those of the hospitals, the test set."""
    whole = data.load("mnist5k")
    return (
        whole.batch(torch.arange(PUBLIC)),
        whole.subset(torch.arange(PUBLIC, 2000)),
        whole.batch(torch.arange(2000, 3000)),
    )


@cache
def hospitals(count: int):
    """Who holds which images: different classes and sizes; the first is a small practice.

    Everyone draws the same split from a named stream, as they would not in a real federation.
    """
    private = images()[1]
    parts = dirichlet(private.labels, count, 0.5, stream(0, "hospitals"), least=SMALL)
    return [private.batch(parts[0][:SMALL]), *(private.batch(part) for part in parts[1:])]


@cache
def calibration() -> Calibration:
    """The noise for the accepted risk, over all rounds, with every image in each round.

    What an attacker knows of such images is taken from the public ones: from the hospitals' own it
    would leak something about them.
    """
    public = images()[0].inputs.flatten(1)
    setting = TrainingSetting(1.0, dim=28 * 28, norm=float(public.norm(dim=1).min()), steps=ROUNDS)
    return calibrate_setting(RISK, setting, clip_norm=CLIP_NORM, prior=from_images(public))


def accuracy(model: nn.Module, batch) -> tuple[float, float]:
    """Mean loss and share of right answers."""
    with torch.no_grad():
        scores = model.eval()(batch.inputs)
    loss = nn.functional.cross_entropy(scores, batch.labels)
    return float(loss), float((scores.argmax(1) == batch.labels).float().mean())
