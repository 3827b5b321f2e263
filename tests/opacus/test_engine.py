"""The engine: real trainings with Opacus' loaders, calibration, statements, what is refused."""

import inspect
import math
import os
import random
import warnings

import pytest
import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from leakbound import data
from leakbound.bounds import composition, conversions, identification
from leakbound.core import NotApplicable
from leakbound.opacus import (
    RiskEngine,
    SecureDPOptimizer,
    SecureGhostOptimizer,
    risk,
)
from leakbound.opacus.batches import SecureSampler
from leakbound.opacus.engine import refuse_misfit
from leakbound.randomness import stream
from leakbound.risk import Target, TrainingSetting, calibrate_setting

from ..bounds.prior_attacks import KnownNorm
from .conftest import net


class Sphere(KnownNorm):
    """A uniform direction, passed off as knowledge: its closed forms test the numbers."""

    basis = "fitted model"


SPHERE = Sphere(12, 2.0)
ASK = {"target": "psnr>=20 with probability<=0.05", "dim": 12, "norm": 2.0, "prior": SPHERE}


def loader(count=60, size=6, **more):
    inputs = torch.rand(count, 1, 3, 4, generator=stream(0, "data"), dtype=torch.float64)
    return DataLoader(TensorDataset(inputs, torch.arange(count) % 3), batch_size=size, **more)


def made(engine, model=None, **more):
    model = model or net()
    given = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": loader(),
        "max_grad_norm": 1.0,
    }
    return given | more


def train(module, optimizer, private, epochs=1, criterion=None):
    criterion = criterion or nn.CrossEntropyLoss()
    for _ in range(epochs):
        for inputs, labels in private:
            optimizer.zero_grad()
            criterion(module(inputs), labels).backward()
            optimizer.step()


def test_a_training_keeps_the_risk_that_was_asked_for():
    engine = RiskEngine()
    *private, found = engine.make_private_with_risk(epochs=3, **ASK, **made(engine))
    wanted = TrainingSetting(1.0, 12, 2.0, 30, 0.1, "hidden")
    assert (
        found.noise_multiplier
        == calibrate_setting(ASK["target"], wanted, prior=SPHERE).noise_multiplier
    )
    assert private[1].noise_multiplier == found.noise_multiplier
    train(*private, epochs=1)
    early = engine.risk()
    train(*private, epochs=2)
    late = engine.risk()
    assert (early.steps, late.steps) == (10, 30)
    assert early.bound < late.bound <= 0.05
    assert late.bound > 0.0499  # least noise: calibration leaves nothing
    assert late.bound == float(found.corridor.bound[0])
    assert late.epsilon == found.epsilon
    assert "20 dB PSNR" in str(late)
    train(*private, epochs=1)
    assert engine.risk().bound > 0.05  # one epoch too many, and it says so
    blind = identification.log_kappa_sphere(dim=12, eta=0.01, norm=2.0)
    edge = composition.subsampled(
        found.noise_multiplier, sampling_rate=0.1, steps=40, log_kappa=blind
    )
    assert engine.risk().bound == edge


def test_visible_steps_need_more_noise():
    noises = []
    for participation in ("hidden", "visible"):
        engine = RiskEngine()
        *_, found = engine.make_private_with_risk(
            epochs=3, participation=participation, **ASK, **made(engine)
        )
        noises.append(found.noise_multiplier)
        assert engine.risk().participation == participation
    assert noises[1] > 1.3 * noises[0]


def test_a_risk_in_eta_and_another_question():
    engine = RiskEngine()
    asked = {"target": "mse<=0.01 with probability<=0.05", "dim": 12, "norm": 2.0, "prior": SPHERE}
    *private, _ = engine.make_private_with_risk(epochs=1, **asked, **made(engine))
    train(*private)
    assert (engine.risk().eta, engine.risk().psnr) == (0.01, None)
    assert engine.risk(psnr=30).bound < engine.risk().bound
    assert engine.risk(prior=Sphere(12, 4.0)).bound < engine.risk().bound
    wide = RiskEngine()
    wide.make_private_with_risk(epochs=1, input_range=2.0, **ASK, **made(wide))
    assert wide.risk().eta == pytest.approx(0.04)


def test_histories_of_several_settings_are_told():
    engine = RiskEngine()
    private = engine.make_private(noise_multiplier=1.0, **made(engine))
    train(*private)
    private[1].noise_multiplier = 0.7  # a scheduler's doing
    train(*private)
    found = engine.risk(dim=12, norm=2.0, psnr=20, prior=SPHERE)
    assert found.history == ((1.0, 0.1, 10), (0.7, 0.1, 10))
    ends = [
        composition.subsampled(s, sampling_rate=0.1, steps=20, log_kappa=found.log_kappa)
        for s in (1.0, 0.7)
    ]
    assert ends[0] < found.bound < ends[1]


def test_a_training_on_real_digits_with_a_memory_manager():
    digits = data.load("mnist5k")
    rows = TensorDataset(digits.inputs[100:400], digits.labels[100:400])
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 5, 4), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
    model = ModuleValidator.fix(nn.Sequential(*layers))
    engine = RiskEngine(accountant="rdp")
    module, optimizer, private = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=4.0),
        data_loader=DataLoader(rows, batch_size=50),
        noise_multiplier=0.5,
        max_grad_norm=0.5,
    )
    assert isinstance(optimizer, SecureDPOptimizer)
    loss = torch.no_grad()(lambda: nn.functional.cross_entropy(model(rows[:][0]), rows[:][1]))
    first = float(loss())
    with BatchMemoryManager(
        data_loader=private, max_physical_batch_size=16, optimizer=optimizer
    ) as parts:
        train(module, optimizer, parts, epochs=6)
    last = float(loss())
    assert last < 0.9 * first
    found = engine.risk(dim=784, norm=5.0, psnr=20)
    assert found.steps == 36  # of logical batches, however they were split
    assert engine.accountant.get_epsilon(1e-5) > found.epsilon  # RDP is looser


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_the_modes_of_opacus_train(mode):
    engine = RiskEngine()
    module, optimizer, *criterion, private = engine.make_private(
        noise_multiplier=1.0, grad_sample_mode=mode, **made(engine)
    )
    kind = SecureGhostOptimizer if mode == "ghost" else SecureDPOptimizer
    assert type(optimizer) is kind
    train(module, optimizer, private, criterion=criterion[0] if criterion else None)
    assert engine.risk(dim=12, norm=2.0, psnr=20).steps == 10


def test_a_seeded_training_says_so_everywhere_and_repeats():
    weights = []
    for _ in range(2):
        engine = RiskEngine()
        model = net()
        private = engine.make_private(
            noise_multiplier=1.0,
            noise_generator=stream(0, "noise"),
            **made(engine, model, data_loader=loader(generator=stream(0, "batches"))),
        )
        train(*private)
        weights.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        for shown in (engine, private[1], engine.risk(dim=12, norm=2.0, psnr=20)):
            assert "EXPERIMENT ONLY" in f"{shown!r}{shown}"
        assert engine.experiment_only
    assert torch.equal(*weights)


def test_nothing_else_is_seeded():
    weights = []
    for _ in range(2):
        torch.manual_seed(0)
        engine = RiskEngine()
        model = net()
        private = engine.make_private(noise_multiplier=1.0, **made(engine, model))
        train(*private)
        weights.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        assert "EXPERIMENT" not in f"{engine!r}{private[1]!r}"
        assert isinstance(private[2].batch_sampler, SecureSampler)
    assert not torch.equal(*weights)


def test_batches_are_poisson_samples():
    sampler = SecureSampler(num_samples=400, sample_rate=0.1, steps=300)
    held = torch.zeros(300, 400)
    for step, rows in enumerate(sampler):
        held[step, rows] = 1
    assert stats.binomtest(int(held.sum()), held.numel(), 0.1).pvalue > 1e-6
    assert stats.binomtest(int(held.sum()), held.numel(), 0.11).pvalue < 1e-6
    sizes = held.sum(1).double()
    assert 0.7 < float(sizes.var()) / 36 < 1.4  # not batches of one size
    assert len(set(map(tuple, held.T.tolist()))) > 390


@pytest.mark.parametrize("seeded", [False, True], ids=["secure", "seeded"])
def test_an_epoch_has_as_many_batches_as_the_loader(seeded):
    """1 / (1 / 93) is below 93 in floats: Opacus' own loader makes 92 batches."""
    plain = loader(count=93, size=1)
    more = {"noise_generator": stream(0)} if seeded else {}
    engine = RiskEngine()
    *_, private = engine.make_private(
        noise_multiplier=1.0, **made(engine, data_loader=plain), **more
    )
    assert len(private) == sum(1 for _ in private.batch_sampler) == 93
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Secure RNG turned off")
        theirs = PrivacyEngine()
    assert (
        len(theirs.make_private(noise_multiplier=1.0, **made(theirs, data_loader=plain))[2]) == 92
    )


def test_no_warning_is_left_of_opacus_own_noise():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RiskEngine()
    with pytest.warns(UserWarning, match="underestimate"):
        RiskEngine(accountant="gdp")


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"clipping": "per_layer"}, "clipping"),
        ({"clipping": "adaptive"}, "clipping"),
        ({"max_grad_norm": [1.0, 2.0]}, "max_grad_norm is a list"),
        ({"grad_sample_mode": "no_op"}, "no_op"),
        ({"rand_on_empty": True}, "rand_on_empty"),
    ],
    ids=["per_layer", "adaptive", "list", "no_op", "rand_on_empty"],
)
def test_what_cannot_be_true_is_refused(more, word):
    engine = RiskEngine()
    with pytest.raises(NotApplicable, match=word):
        engine.make_private(noise_multiplier=1.0, **made(engine, **more))


def test_shuffled_batches_count_as_full_ones():
    engine = RiskEngine()
    private = engine.make_private(noise_multiplier=1.3, poisson_sampling=False, **made(engine))
    ask = {"dim": 12, "norm": 2.0, "psnr": 20}
    assert engine.get_epsilon(1e-5) == 0
    for _ in range(3):
        train(*private)
    found = engine.risk(**ask)
    assert found.history == ((1.3, 1.0, 3),)
    assert found.plain() == risk([(1.3, 1.0, 3)], **ask).plain()
    assert engine.get_epsilon(1e-5) == pytest.approx(conversions.epsilon(1.3, delta=1e-5, steps=3))
    iter(private[2])  # a pass that is started may hold the example
    assert engine.risk(**ask).history == ((1.3, 1.0, 4),)


def again_and_again(module, optimizer, private):
    batch = next(iter(private))
    for _ in range(10):
        train(module, optimizer, [batch])


def joined_passes(module, optimizer, private):
    for inputs, labels in (*private, *private):
        nn.functional.cross_entropy(module(inputs), labels).backward()
    optimizer.step()


def pairs_of_batches(module, optimizer, private):
    for one, two in zip(private, private, strict=True):
        train(module, optimizer, [tuple(torch.cat(parts) for parts in zip(one, two, strict=True))])


@pytest.mark.parametrize("loop", [again_and_again, joined_passes, pairs_of_batches])
def test_steps_that_use_an_example_more_often_have_no_statement(loop):
    engine = RiskEngine()
    private = engine.make_private(noise_multiplier=1.0, poisson_sampling=False, **made(engine))
    loop(*private)
    with pytest.raises(NotApplicable, match="exactly one new batch"):
        engine.risk(dim=12, norm=2.0, psnr=20)
    with pytest.raises(NotApplicable, match="exactly one new batch"):
        engine.get_epsilon(1e-5)


def test_own_samplers_may_repeat_an_example():
    engine = RiskEngine()
    given = made(engine)
    old = given["data_loader"]
    own = torch.utils.data.WeightedRandomSampler([1.0] * len(old.dataset), len(old.dataset))
    given["data_loader"] = DataLoader(old.dataset, batch_size=4, sampler=own)
    private = engine.make_private(noise_multiplier=1.0, poisson_sampling=False, **given)
    train(*private)
    with pytest.raises(NotApplicable, match="its own sampler"):
        engine.risk(dim=12, norm=2.0, psnr=20)


def test_questions_that_have_no_answer():
    engine = RiskEngine()
    with pytest.raises(ValueError, match="dim is missing"):
        engine.risk()
    with pytest.raises(ValueError, match="no noise helps"):
        engine.make_private_with_risk(epochs=1, **{**ASK, "norm": 0.1}, **made(engine))
    loose = {**ASK, "target": "psnr>=20 with probability<=0.9"}
    with pytest.raises(ValueError, match="needs no noise"):
        engine.make_private_with_risk(epochs=1, **loose, **made(engine))
    for prior in (None, KnownNorm(12, 2.0)):
        with pytest.raises(ValueError, match="a target needs a prior from the data"):
            engine.make_private_with_risk(epochs=1, **{**ASK, "prior": prior}, **made(engine))
    with pytest.raises(ValueError, match="epochs is 0"):
        engine.make_private_with_risk(epochs=0, **ASK, **made(engine))
    private = engine.make_private(noise_multiplier=1.0, **made(engine))
    train(*private)
    with pytest.raises(ValueError, match=r"earlier steps.*make a new engine"):
        engine.make_private_with_risk(epochs=1, **ASK, **made(engine))


@pytest.mark.parametrize("first", ["with_risk", "plain"])
def test_one_risk_is_asked_for_once(first):
    """Two trainings of one engine would each use up the whole risk."""
    engine = RiskEngine()
    if first == "plain":
        engine.make_private(noise_multiplier=1.0, **made(engine))
    else:
        engine.make_private_with_risk(epochs=1, **ASK, **made(engine))
    with pytest.raises(ValueError, match=r"made a training private.*make a new engine"):
        engine.make_private_with_risk(epochs=1, **ASK, **made(engine))


class _Augmented(torch.utils.data.Dataset):
    """Draws from both global streams at every look."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.rand(1, 3, 4) * random.random(), index % 3


class _Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        raise AssertionError("a record was consumed")


def test_a_first_record_that_does_not_fit_is_refused_by_name():
    def ask(**more):
        engine = RiskEngine()
        return engine.make_private_with_risk(**{"epochs": 1, **ASK, **made(engine), **more})

    with pytest.raises(ValueError, match="dim is 10, but the first example of data_loader has 12"):
        ask(dim=10)
    with pytest.raises(ValueError, match=r"input_range is 0\.3, but the first example"):
        ask(input_range=0.3)
    ask(input_range=0.3, target="mse<=0.01 with probability<=0.05")  # has no range
    narrow = Target.parse(ASK["target"], input_range=0.1)
    assert refuse_misfit(DataLoader(_Endless()), 10, narrow) is None


def test_looking_at_the_first_record_moves_no_stream():
    states = torch.get_rng_state(), random.getstate()
    with pytest.raises(ValueError, match="dim is 10"):
        refuse_misfit(DataLoader(_Augmented()), 10, Target.parse(ASK["target"]))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_a_checkpoint_keeps_the_history(tmp_path):
    engine = RiskEngine()
    module, optimizer, private = engine.make_private(noise_multiplier=1.0, **made(engine))
    train(module, optimizer, private)
    again = RiskEngine()
    again.accountant.load_state_dict(engine.accountant.state_dict())
    ask = {"dim": 12, "norm": 2.0, "psnr": 20}
    assert again.risk(**ask).plain() == engine.risk(**ask).plain()
    assert math.isfinite(engine.get_epsilon(1e-5))


def saved(tmp_path, engine, **more):
    """A training of one epoch, and the checkpoint of it."""
    module, optimizer, private = engine.make_private(noise_multiplier=1.0, **made(engine), **more)
    train(module, optimizer, private)
    engine.save_checkpoint(path=tmp_path / "state.pt", module=module, optimizer=optimizer)
    return tmp_path / "state.pt"


def loaded(path, **more):
    """A new engine with a plain training, which goes on from a checkpoint."""
    engine = RiskEngine()
    module, optimizer, _ = engine.make_private(noise_multiplier=1.0, **made(engine))
    engine.load_checkpoint(path=path, module=module, optimizer=optimizer, **more)
    return engine


def test_a_checkpoint_keeps_what_its_training_was(tmp_path):
    ask = {"dim": 12, "norm": 2.0, "psnr": 20}
    plain = RiskEngine()
    found = loaded(saved(tmp_path, plain)).risk(**ask)
    assert found.plain() == plain.risk(**ask).plain()
    assert not found.experiment_only
    seeded = loaded(saved(tmp_path, RiskEngine(), noise_generator=stream(0)))
    for shown in (seeded, seeded.risk(**ask)):
        assert shown.experiment_only
        assert "EXPERIMENT ONLY" in f"{shown!r}{shown}"
    shuffled = RiskEngine()
    with saved(tmp_path, shuffled, poisson_sampling=False).open("rb") as file:
        mixed = loaded(file)
    with pytest.raises(NotApplicable, match="also trained with Poisson"):
        mixed.risk(**ask)
    again = RiskEngine()
    private = again.make_private(noise_multiplier=1.0, poisson_sampling=False, **made(again))
    again.load_checkpoint(path=tmp_path / "state.pt", module=private[0], optimizer=private[1])
    assert again.risk(**ask).plain() == shuffled.risk(**ask).plain()


def test_a_checkpoint_keeps_what_was_asked_for(tmp_path):
    engine, path = RiskEngine(), tmp_path / "state.pt"
    module, optimizer, private, _ = engine.make_private_with_risk(epochs=1, **ASK, **made(engine))
    train(module, optimizer, private)
    engine.save_checkpoint(path=path, module=module, checkpoint_dict={"epoch": 3})
    again = RiskEngine()
    assert again.load_checkpoint(path=path, module=module)["epoch"] == 3
    assert again.risk(prior=SPHERE).plain() == engine.risk().plain()
    assert again.risk().bound is None  # a prior is no plain value, and none is supposed


class _Code:
    def __reduce__(self):
        return os.mkdir, ("made-by-a-checkpoint",)


def test_a_checkpoint_of_unknown_origin_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = RiskEngine()
    module, _, _ = engine.make_private(noise_multiplier=1.0, **made(engine))
    before = [p.clone() for p in module.parameters()]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Secure RNG turned off")
        theirs = PrivacyEngine()
    theirs.save_checkpoint(path="theirs.pt", module=net())
    with pytest.raises(ValueError, match="does not say whether its noise was seeded"):
        engine.load_checkpoint(path="theirs.pt", module=module)
    engine.save_checkpoint(path="code.pt", module=module, checkpoint_dict={"more": _Code()})
    with pytest.raises(ValueError, match="tensors and plain values only"):
        engine.load_checkpoint(path="code.pt", module=module)
    assert not (tmp_path / "made-by-a-checkpoint").exists()
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert len(engine.accountant) == 0


def test_arguments_of_opacus_are_all_taken():
    theirs = set(inspect.signature(PrivacyEngine.make_private).parameters)
    ours = set(inspect.signature(RiskEngine.make_private).parameters)
    rest = {"criterion", "batch_first", "loss_reduction", "clipping", "grad_sample_mode"}
    assert theirs - ours <= rest | {"wrap_model", "rand_on_empty", "kwargs"}
    engine = RiskEngine()
    _, optimizer, _ = engine.make_private(
        noise_multiplier=1.0, loss_reduction="sum", wrap_model=False, **made(engine)
    )
    assert optimizer.loss_reduction == "sum"
    engine = RiskEngine()
    with pytest.raises(TypeError):
        engine.make_private(noise_multiplier=1.0, max_norm=1.0, **made(engine))
