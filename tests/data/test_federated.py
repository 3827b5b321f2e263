"""Splits over clients: complete and disjoint, of the declared law, refused where impossible."""

import hashlib

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from leakbound.data import Dataset, load
from leakbound.data.federated import by_person, dirichlet, equal

CLIENTS = 4


def _stream(seed=0):
    return torch.Generator().manual_seed(seed)


def _written(persons=(2, 0, 2, 0, 0), names=("ann", "bob", "cy")):
    count = len(persons)
    inputs = torch.arange(count).float().view(-1, 1, 1, 1) / count
    labels, numbers = torch.zeros(count, dtype=torch.int64), torch.tensor(persons)
    return Dataset(inputs, labels, ("x",), persons=numbers, person_names=names)


def _whole(parts, count):
    for part in parts:
        assert part.dtype == torch.int64
        assert part.tolist() == sorted(set(part.tolist()))
    assert sorted(torch.cat(parts).tolist()) == list(range(count))


# Data sets with persons.


def test_the_fingerprint_without_persons_is_that_of_images_and_labels():
    inputs, labels = torch.rand(3, 1, 2, 2, generator=_stream()), torch.tensor([0, 1, 0])
    data = Dataset(inputs, labels, ("a", "b"))
    content = repr((3, 1, 2, 2)).encode() + inputs.numpy().tobytes() + labels.numpy().tobytes()
    assert data.fingerprint == hashlib.sha256(content).hexdigest()


def test_the_fingerprint_follows_the_persons():
    prints = {_written(w).fingerprint for w in ((0, 1), (1, 0), (1, 1))}
    assert len(prints) == 3
    assert _written((0, 1)).fingerprint == _written((0, 1), names=("x", "y")).fingerprint


def test_a_subset_carries_its_persons():
    part = _written().subset(torch.tensor([4, 2]))
    assert part.persons.tolist() == [0, 2]
    assert part.person_names == ("ann", "bob", "cy")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"persons": torch.tensor([0, 1])}, r"persons has shape \(2,\).*give \(5,\) of int64"),
        ({"persons": torch.zeros(5)}, "float32"),
        ({"persons": torch.tensor([0, 1, 2, 3, 0])}, "run from 0 to 3, with 3 person names"),
        ({"persons": torch.tensor([0, -1, 2, 2, 0])}, "run from -1 to 2"),
        ({"persons": None}, "person_names holds 3 names, but persons is None"),
    ],
)
def test_wrong_persons_are_refused(change, words):
    labels = torch.zeros(5, dtype=torch.int64)
    given = {"person_names": ("ann", "bob", "cy"), **change}
    with pytest.raises(ValueError, match=words):
        Dataset(torch.zeros(5, 1, 1, 1), labels, ("x",), **given)


@pytest.mark.parametrize("source", ["digits", "npz:a.npz", "cifar:a.bin"])
def test_a_source_without_names_has_no_persons(source):
    with pytest.raises(ValueError, match=r"person is 'last', but .*folder:PATH or zip:PATH"):
        load(source, person="last")


# By person.


def test_by_person_is_one_client_a_person_with_images():
    data = _written()
    parts = by_person(data)
    assert [part.tolist() for part in parts] == [[1, 3, 4], [0, 2]]
    assert [data.person_names[data.persons[part[0]]] for part in parts] == ["ann", "cy"]


def test_by_person_of_files(tmp_path):
    for who in ("07", "03", "11"):
        for letter in "ab":
            file = tmp_path / letter / f"0108_{who}.png"
            file.parent.mkdir(exist_ok=True)
            Image.new("L", (2, 2), int(who)).save(file)
    data = load(f"folder:{tmp_path}", person="last")
    parts = by_person(data)
    _whole(parts, 6)
    for who, part in zip((3, 7, 11), parts, strict=True):
        assert (data.inputs[part] * 255).round().unique().tolist() == [who]
        assert sorted(data.labels[part].tolist()) == [0, 1]


def test_by_person_needs_persons():
    data = Dataset(torch.zeros(1, 1, 1, 1), torch.tensor([0]), ("x",), name="mine")
    with pytest.raises(ValueError, match=r"'mine' does not say who.*load it with person"):
        by_person(data)


# The Dirichlet split.


@pytest.mark.parametrize("concentration", [0.05, 0.5, 5.0])
@pytest.mark.parametrize("clients", [1, 2, 7])
def test_dirichlet_is_complete_and_disjoint(clients, concentration):
    labels = torch.randint(0, 10, (503,), generator=_stream(1))
    parts = dirichlet(labels, clients, concentration, _stream(), least=3)
    assert len(parts) == clients
    assert min(len(part) for part in parts) >= 3
    _whole(parts, 503)
    again = dirichlet(labels, clients, concentration, _stream(), least=3)
    assert all(a.equal(b) for a, b in zip(parts, again, strict=True))


def test_dirichlet_skips_classes_without_images():
    parts = dirichlet(torch.tensor([7, 2, 7, 2, 7, 2]), 2, 100.0, _stream())
    _whole(parts, 6)


@pytest.fixture(scope="module")
def shares():
    """Class shares (draws, classes, clients) of 1,200 splits at concentration 0.7."""
    labels = torch.arange(900) % 3
    source = _stream(5)
    found = np.zeros((1200, 3, CLIENTS))
    for draw in found:
        for client, part in enumerate(dirichlet(labels, CLIENTS, 0.7, source)):
            draw[:, client] = labels[part].bincount(minlength=3) / 300
    return found


def _moments_fit(shares, concentration):
    """Mean and variance of each share within five standard errors of the Dirichlet's."""
    mean = 1 / CLIENTS
    variance = mean * (1 - mean) / (CLIENTS * concentration + 1)
    flat = shares.reshape(len(shares), -1)
    error = flat.std(0) / len(flat) ** 0.5
    squares = (flat - mean) ** 2
    spread = squares.std(0) / len(flat) ** 0.5
    means = np.abs(flat.mean(0) - mean) < 5 * error
    return bool(means.all() and (np.abs(squares.mean(0) - variance) < 5 * spread).all())


def test_class_shares_have_the_dirichlets_moments(shares):
    assert _moments_fit(shares, 0.7)
    for wrong in (0.5, 1.0):
        assert not _moments_fit(shares, wrong)


def test_class_shares_have_the_dirichlets_law(shares):
    law = stats.beta(0.7, (CLIENTS - 1) * 0.7)  # the margin of a symmetric Dirichlet
    wrong = stats.beta(1.4, (CLIENTS - 1) * 1.4)
    for column in shares.reshape(len(shares), -1).T:
        assert stats.kstest(column, law.cdf).pvalue > 1e-4
        assert stats.kstest(column, wrong.cdf).pvalue < 1e-4


def test_classes_are_independent_and_clients_are_exchangeable(shares):
    bound = 5 / len(shares) ** 0.5
    across = np.corrcoef(shares[:, 0].T, shares[:, 1].T)[:CLIENTS, CLIENTS:]
    assert np.abs(across).max() < bound
    within = np.corrcoef(shares[:, 0].T)[~np.eye(CLIENTS, dtype=bool)]
    assert np.abs(within + 1 / (CLIENTS - 1)).max() < bound


def test_every_image_goes_to_every_client_equally_often():
    labels, source = torch.arange(40) % 2, _stream(3)
    seen = torch.zeros(CLIENTS, 40)
    for _ in range(1000):
        for client, part in enumerate(dirichlet(labels, CLIENTS, 2.0, source)):
            seen[client, part] += 1
    error = (0.25 * 0.75 * 1000) ** 0.5
    assert (seen - 250).abs().max() < 5 * error


def test_a_large_concentration_splits_every_class_evenly():
    labels = torch.arange(1000) % 5
    for part in dirichlet(labels, 10, 1e9, _stream()):
        counts = labels[part].bincount(minlength=5)
        assert (counts - 20).abs().max() <= 1


def test_a_small_concentration_gives_a_class_to_one_client():
    labels = torch.arange(2000) % 20
    parts = dirichlet(labels, 3, 1e-3, _stream())
    counts = torch.stack([labels[part].bincount(minlength=20) for part in parts])
    assert float(counts.max(0).values.float().mean()) > 95


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"concentration": 0.0}, "concentration is 0.0; give a finite number above 0"),
        ({"concentration": -1.0}, "concentration is -1.0"),
        ({"concentration": float("inf")}, "concentration is inf"),
        ({"clients": 0}, "clients is 0"),
        ({"least": 0}, "least is 0"),
        ({"clients": 21}, "clients is 21, but 20 images give 1 each to at most 20; lower clients"),
        ({"clients": 7, "least": 3}, "20 images give 3 each to at most 6"),
        (
            {"clients": 20, "concentration": 0.01},
            r"client \d+ has 0 of 20 images.*lower clients \(20\) or raise concentration",
        ),
        ({"labels": torch.zeros(20)}, "labels has shape"),
        ({"labels": torch.tensor([0, -1])}, "0 or above"),
        ({"labels": torch.zeros(0, dtype=torch.int64)}, "0 images"),
    ],
)
def test_wrong_dirichlet_splits_are_refused(change, words):
    given = {"labels": torch.arange(20) % 2, "clients": 3, "concentration": 1.0, **change}
    with pytest.raises(ValueError, match=words):
        dirichlet(generator=_stream(), **given)


# Even splits.


@pytest.mark.parametrize(("count", "clients"), [(10, 3), (10, 10), (7, 1), (1000, 13)])
def test_equal_sizes_differ_by_one_at_most(count, clients):
    parts = equal(count, clients, _stream())
    assert len(parts) == clients
    assert {len(part) for part in parts} <= {count // clients, -(-count // clients)}
    _whole(parts, count)
    assert all(a.equal(b) for a, b in zip(parts, equal(count, clients, _stream()), strict=True))


def test_equal_is_random():
    source = _stream()
    first = torch.zeros(12)
    for _ in range(1000):
        first[equal(12, 3, source)[0]] += 1
    assert (first - 1000 / 3).abs().max() < 5 * (1000 * 2 / 9) ** 0.5


@pytest.mark.parametrize(
    ("count", "clients", "words"),
    [(3, 4, "clients is 4, but 3 images"), (3, 0, "clients is 0"), (0, 1, "count is 0")],
)
def test_wrong_equal_splits_are_refused(count, clients, words):
    with pytest.raises(ValueError, match=words):
        equal(count, clients, _stream())
