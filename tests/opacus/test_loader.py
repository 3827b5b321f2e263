"""What a user's loader holds: kept, or refused by name; nothing of it is dropped silently."""

import inspect
import warnings

import pytest
import torch
from opacus import PrivacyEngine
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from leakbound.core import NotApplicable
from leakbound.opacus import RiskEngine, describe
from leakbound.randomness import stream

from .conftest import net

DATA = TensorDataset(
    torch.arange(300.0).double().reshape(300, 1).repeat(1, 12), torch.arange(300) % 3
)
HALF = [*range(100), *range(100)]


class Own(DataLoader):
    """A loader that leaves rows out by itself."""

    def __iter__(self):
        return iter([])


class Renamed(DataLoader):
    """A loader that chooses nothing itself."""


def private(loader, *, engine=None, **more):
    engine = engine or RiskEngine()
    model = net()
    return engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **more,
    )


def drawn(loader, passes=3):
    return {int(row) for _ in range(passes) for inputs, _ in loader for row in inputs[:, 0]}


def test_opacus_draws_excluded_people():
    """Why: Opacus' own engine drops the sampler without a word."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = DataLoader(DATA, batch_size=10, sampler=SubsetRandomSampler(range(100)))
        *_, made = private(loader, engine=PrivacyEngine())
        assert max(drawn(made)) > 100


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sampler": SubsetRandomSampler(range(100))}, ["SubsetRandomSampler", "Subset(dataset"]),
        ({"sampler": WeightedRandomSampler([1.0] * 300, 300)}, ["WeightedRandomSampler", "rates"]),
        ({"sampler": RandomSampler(DATA, replacement=True)}, ["RandomSampler", "shuffle=True"]),
        ({"sampler": RandomSampler(DATA, num_samples=50)}, ["RandomSampler", "shuffle=True"]),
        ({"sampler": DistributedSampler(DATA, 2, 0)}, ["DistributedSampler", "poisson_sampling"]),
        ({"sampler": list(range(100))}, ["list", "poisson_sampling=False"]),
        ({"batch_sampler": [[0, 1], [2, 3]]}, ["batch_sampler list", "batch_size"]),
        (
            {"batch_sampler": BatchSampler(SubsetRandomSampler(range(9)), 3, False)},
            ["SubsetRandomSampler", "Subset(dataset"],
        ),
        ({"batch_size": None}, ["batch_size None"]),
    ],
)
def test_what_chooses_examples_is_refused_by_name(given, words):
    loader = DataLoader(DATA, **({} if "batch_sampler" in given else {"batch_size": 10}) | given)
    with pytest.raises(NotApplicable) as refused:
        private(loader)
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_loader_with_its_own_passes_is_refused_by_name():
    with pytest.raises(NotApplicable, match="Own, whose own __iter__"):
        private(Own(DATA, batch_size=10))
    *_, made = private(Renamed(DATA, batch_size=10))
    assert len(made) == 30


def test_the_mend_draws_no_excluded_person():
    *_, made = private(DataLoader(Subset(DATA, range(100)), batch_size=10))
    assert len(made) == 10
    rows = drawn(made)
    assert rows
    assert max(rows) < 100


def test_a_sampler_is_kept_without_poisson_sampling():
    loader = DataLoader(DATA, batch_size=10, sampler=SubsetRandomSampler(range(100)))
    engine = RiskEngine()
    module, optimizer, made = private(loader, engine=engine, poisson_sampling=False)
    assert optimizer.expected_batch_size == 10  # 30 of Opacus: 300 examples in 10 batches
    rows = []
    for inputs, labels in made:
        rows += inputs[:, 0].int().tolist()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(inputs / 300), labels).backward()
        optimizer.step()
    assert sorted(rows) == list(range(100))
    assert engine.risk(dim=12, norm=2.0, psnr=20).history == ((1.0, 1.0, 1),)
    facts, _ = describe(optimizer, made, epochs=1)
    assert (facts.local.examples, facts.local.batch) == (100, 10)


@pytest.mark.parametrize(
    "own",
    [
        {"batch_size": 10, "sampler": SubsetRandomSampler(HALF)},
        {"batch_sampler": BatchSampler(WeightedRandomSampler([1.0] * 300, 300), 10, False)},
    ],
    ids=["sampler", "batch_sampler"],
)
def test_rows_that_a_sampler_repeats_have_no_statement(own):
    loader = DataLoader(DATA, **own)
    engine = RiskEngine()
    private(loader, engine=engine, poisson_sampling=False)
    with pytest.raises(NotApplicable, match="its own sampler"):
        engine.risk(dim=12, norm=2.0, psnr=20)


def shout(worker):
    """A user's worker_init_fn."""


def tripled(rows):
    """A user's collate_fn."""
    return [torch.stack(column) * 3 for column in zip(*rows, strict=True)]


KEPT = {
    "num_workers": 2,
    "worker_init_fn": shout,
    "prefetch_factor": 5,
    "persistent_workers": True,
    "multiprocessing_context": "fork",
    "timeout": 7.0,
    "pin_memory": False,
    "pin_memory_device": "",
    "in_order": False,
    "collate_fn": tripled,
}
MEANINGLESS = {"shuffle", "drop_last"}
"""In a Poisson sample."""
CHOSEN = {"sampler", "batch_sampler", "batch_size", "generator", "dataset", "self"}
"""Tested above and below."""


def test_every_other_argument_of_a_loader_is_kept():
    assert set(inspect.signature(DataLoader.__init__).parameters) == {*KEPT, *MEANINGLESS, *CHOSEN}
    *_, made = private(DataLoader(DATA, batch_size=10, shuffle=True, drop_last=True, **KEPT))
    for name in set(KEPT) - {"collate_fn", "multiprocessing_context"}:
        assert getattr(made, name) == KEPT[name], name
    assert made.multiprocessing_context.get_start_method() == "fork"
    plain = DataLoader(DATA, batch_size=10, collate_fn=tripled)
    *_, made = private(plain)
    inputs, _ = made.collate_fn([DATA[5]])
    assert inputs[0, 0] == 15


def test_a_generator_that_draws_nothing_is_said():
    generator = stream(0)
    with pytest.warns(UserWarning, match="data_loader has a generator"):
        private(DataLoader(DATA, batch_size=10, shuffle=True, generator=generator))
    with pytest.warns(UserWarning, match="data_loader has a generator"):
        private(DataLoader(DATA, batch_size=10, sampler=RandomSampler(DATA, generator=generator)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="Full backward hook")
        private(
            DataLoader(DATA, batch_size=10, shuffle=True, generator=generator),
            noise_generator=stream(1),
        )
        private(DataLoader(DATA, batch_size=10, sampler=SequentialSampler(DATA)))


def test_a_loader_made_private_is_taken_again():
    engine = RiskEngine()
    *_, made = private(DataLoader(DATA, batch_size=10), engine=engine)
    *_, again = private(made, engine=engine)
    assert len(again) == 30
