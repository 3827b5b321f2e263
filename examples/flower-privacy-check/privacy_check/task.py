"""The model, and who holds which digits."""

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """Ten scores for each image of 8 x 8."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, images):
        """(B, 10) scores."""
        return self.layers(images)


@cache
def digits():
    """The 1,797 digits of scikit-learn, in a random order that all nodes share."""
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(found.images / 16, dtype=torch.float32)[:, None]
    return images[order], torch.tensor(found.target)[order]


def loader(client: int, clients: int, batch_size: int) -> DataLoader:
    """One client's batches. All clients hold the same number of images: their weights are equal."""
    images, labels = digits()
    size = len(labels) // clients
    own = slice(client * size, (client + 1) * size)
    return DataLoader(TensorDataset(images[own], labels[own]), batch_size, shuffle=True)


def train(net: nn.Module, batches: DataLoader, epochs: int, rate: float) -> None:
    """Plain SGD."""
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    for _ in range(epochs):
        for images, labels in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images), labels).backward()
            optimizer.step()
