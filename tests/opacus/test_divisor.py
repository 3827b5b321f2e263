"""What the noisy sum is divided by: measured in each mode, one constant, or no statement."""

import warnings

import pytest
import torch
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.optimizers import DistributedDPOptimizer, DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from leakbound.core import NotApplicable
from leakbound.opacus import RiskEngine, SecureDPOptimizer, risk
from leakbound.randomness import stream

ENGINES = {"ours": RiskEngine, "opacus": PrivacyEngine}
MODES = ("hooks", "functorch", "ew", "ghost")
ASK = {"dim": 12, "norm": 2.0, "psnr": 20}
CLIP = 1e-3
"""Under every gradient's norm here: each example then adds a vector of this length."""


def net():
    model = nn.Linear(12, 3).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=stream(0), dtype=torch.float64))
    return model


def examples(count):
    inputs = torch.rand(count, 12, generator=stream(1), dtype=torch.float64)
    return inputs, torch.arange(count) % 3


def made(kind=RiskEngine, *, count=60, size=6, mode="hooks", **more):
    """An engine, and what it makes private: (module, optimizer, [criterion], loader)."""
    engine, model = kind(), net()
    given = {"noise_multiplier": 0.0, "max_grad_norm": CLIP, "grad_sample_mode": mode, **more}
    if mode == "ghost":
        given.setdefault("criterion", nn.CrossEntropyLoss())
    private = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(*examples(count)), batch_size=size),
        **given,
    )
    return engine, private


def update(private, inputs, labels, reduction="mean"):
    """The vector that one step moves the weights by, at rate 1."""
    module, optimizer, *criterion, _ = private
    before = torch.cat([p.detach().reshape(-1) for p in optimizer.params])
    optimizer.zero_grad()
    loss = criterion[0] if criterion else nn.CrossEntropyLoss(reduction=reduction)
    loss(module(inputs), labels).backward()
    optimizer.step()
    return before - torch.cat([p.detach().reshape(-1) for p in optimizer.params])


def same(count):
    """So many copies of one example: their clipped gradients add up to a vector of known length."""
    inputs, labels = examples(1)
    return inputs.expand(count, 12), labels.expand(count)


@pytest.mark.parametrize("poisson", [True, False], ids=["poisson", "shuffled"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("whose", ENGINES)
def test_no_mode_divides_by_the_size_of_the_batch(whose, mode, reduction, poisson):
    """Batches of 1 to 9 examples are divided by the 6 that 60 examples in 10 batches make."""
    loss = {"criterion": nn.CrossEntropyLoss(reduction=reduction)} if mode == "ghost" else {}
    _, private = made(
        ENGINES[whose], mode=mode, loss_reduction=reduction, poisson_sampling=poisson, **loss
    )
    for size in (1, 3, 6, 9):
        moved = update(private, *same(size), reduction)
        divisor = size * CLIP / float(moved.norm())
        assert divisor == pytest.approx(6 if reduction == "mean" else 1, rel=1e-4)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", MODES)
def test_neighbors_have_one_divisor_and_one_noise(mode, reduction):
    """Two data sets of one size, an example of one counts as zero in the other; the same noise.

    The updates differ by that example's clipped gradient / 6 and by nothing else, however many
    examples the batch holds, none included: a divisor or a level that follows it would show.
    """
    loss = {"criterion": nn.CrossEntropyLoss(reduction=reduction)} if mode == "ghost" else {}
    inputs, labels = examples(5)
    for size in (1, 2, 5):
        moved = []
        for count in (size, size - 1):  # the batch with the example, and without it
            generator = stream(2, "noise")
            _, private = made(
                mode=mode,
                loss_reduction=reduction,
                noise_generator=generator,
                **loss | {"noise_multiplier": 3.0},
            )
            moved.append(update(private, inputs[:count], labels[:count], reduction))
        _, private = made(mode=mode, loss_reduction=reduction, **loss)
        alone = update(private, inputs[size - 1 : size], labels[size - 1 : size], reduction)
        assert float((moved[0] - moved[1] - alone).abs().max()) < 1e-12
        assert float(alone.norm()) == pytest.approx(
            CLIP / (6 if reduction == "mean" else 1), rel=1e-3
        )
        assert float(moved[1].norm()) > 5 * float(alone.norm())  # noise, also of an empty batch


def test_a_split_batch_has_the_same_divisor():
    """Batches of 3 and 9, in parts of 2 at most, as a memory manager cuts them."""
    _, (module, optimizer, loader) = made()
    loader = DataLoader(
        loader.dataset, batch_sampler=[list(range(3)), list(range(3, 12)), list(range(6))]
    )
    sizes = []
    optimizer.attach_step_hook(lambda own: sizes.append(float(own.params[1].grad.norm())))
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
    ) as parts:
        for inputs, _ in parts:
            optimizer.zero_grad()
            for parameter in optimizer.params:
                parameter.detach().zero_()  # the same weights in each step
            copies, labels = same(len(inputs))
            nn.functional.cross_entropy(module(copies), labels).backward()
            optimizer.step()
    assert [size / sizes[0] for size in sizes] == pytest.approx([1, 3, 2])


def test_accumulated_batches_are_divided_by_their_number():
    engine, private = made(poisson_sampling=False)
    module, optimizer, _ = private
    for _ in range(2):
        nn.functional.cross_entropy(module(same(4)[0]), same(4)[1]).backward()
    optimizer.step()
    grad = torch.cat([p.grad.reshape(-1) for p in optimizer.params])
    assert 8 * CLIP / float(grad.norm()) == pytest.approx(2 * 6, rel=1e-4)
    with pytest.raises(NotApplicable, match="exactly one new batch"):
        engine.risk(**ASK)
    _, private = made()
    module, _, _ = private
    nn.functional.cross_entropy(module(same(4)[0]), same(4)[1]).backward()
    with pytest.raises(ValueError, match="not compatible with grad accumulation"):
        nn.functional.cross_entropy(module(same(4)[0]), same(4)[1]).backward()


@pytest.mark.parametrize(
    ("count", "size", "divisor", "theirs"),
    [(60, 6, 6, 6), (59, 6, 5, 5), (61, 6, 5, 5), (49, 1, 1, 0), (98, 2, 2, 1)],
)
def test_the_divisor_is_examples_over_batches(count, size, divisor, theirs):
    """One example less in the data set gives another divisor: their number has to be public.

    In floats 49 * (1 / 49) is below 1: Opacus divides by 0 there, and by 1 in place of 2.
    """
    _, private = made(count=count, size=size)
    moved = update(private, *same(3))
    assert 3 * CLIP / float(moved.norm()) == pytest.approx(divisor, rel=1e-4)
    _, other = made(PrivacyEngine, count=count, size=size)
    assert other[1].expected_batch_size == theirs


def test_a_statement_says_what_it_takes_as_public():
    engine, private = made(noise_multiplier=1.0)
    update(private, *same(3))
    said = str(engine.risk(**ASK))
    assert "the number of examples is public" in said
    assert "no update is divided by the size of its batch" in said
    found = risk([(1.0, 0.1, 10)], **ASK, participation="visible", divisor="batch size")
    assert found.divisor == "batch size"
    assert "the number of examples and the size of every batch are public" in str(found)
    assert "size of every batch" in found._repr_html_()
    assert found.plain()["divisor"] == "batch size"


def test_no_statement_on_hidden_batches_that_are_divided_by_their_size():
    history = [(1.0, 0.1, 10)]
    with pytest.raises(NotApplicable, match=r"divisor is 'batch size' and participation is 'hid"):
        risk(history, **ASK, divisor="batch size")
    risk([(1.0, 1.0, 10)], **ASK, divisor="batch size")  # full batches: all take part
    engine, private = made(noise_multiplier=1.0)
    update(private, *same(3))
    with pytest.raises(NotApplicable, match="expected_batch_size, or give participation='visible'"):
        engine.risk(**ASK, divisor="batch size")
    with pytest.raises(ValueError, match="divisor is 'batch'"):
        risk(history, **ASK, divisor="batch")


def test_why_the_size_of_a_hidden_batch_is_no_divisor():
    """The level of the noise alone tells 60 examples from 59, against the statement's bound.

    The other 59 are known, the noise multiplier is 1: each of P released values has standard
    deviation C / 60 with the example and C / 59 without it.
    """
    level, ratio = 1e-3, (60 / 59) ** 2
    for weights, power in ((10_000, 0.231), (53_000, 0.991), (100_000, 0.999995)):
        cut = stats.chi2.ppf(level, weights)  # less spread than 59 examples leave
        assert stats.chi2.cdf(cut * ratio, weights) == pytest.approx(power, rel=1e-3)
    stated = dict(risk([(1.0, 0.1, 1)], **ASK).rises)
    assert stated[level] < 0.02
    source = stream(5, "level")
    hits = sum(
        float((torch.randn(weights, generator=source) / 60 * 59).square().sum()) < cut
        for _ in range(20)
    )
    assert hits == 20


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_divisor_cannot_follow_the_batches(mode):
    """The usual recipe for a mean of what was drawn is refused, whatever the size is."""
    _, (_, optimizer, *_) = made(mode=mode)
    for size in (5, 6):
        with pytest.raises(NotApplicable, match=f"expected_batch_size is set to {size} after"):
            optimizer.expected_batch_size = size
    assert optimizer.expected_batch_size == 6


@pytest.mark.parametrize("kind", [DPOptimizer, SecureDPOptimizer], ids=["opacus", "ours"])
def test_no_expected_size_is_for_sums_alone(kind):
    model = net()
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": None}
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match="provide expected batch size"):
        kind(plain, **given)
    assert kind(plain, loss_reduction="sum", **given).expected_batch_size is None
    if kind is SecureDPOptimizer:
        with pytest.raises(ValueError, match="expected_batch_size is 0"):
            kind(plain, **{**given, "expected_batch_size": 0})


def clipped_sum(private, inputs, labels, loss):
    """The sum of clipped gradients, before noise and divisor, of a model of zeros."""
    module, optimizer, *_ = private
    for parameter in optimizer.params:
        parameter.detach().zero_()
    optimizer.zero_grad()
    loss(module(inputs), labels).backward()
    optimizer.clip_and_accumulate()
    return torch.cat([p.summed_grad.reshape(-1) for p in optimizer.params])


@pytest.mark.parametrize(("engine", "loss"), [("mean", "sum"), ("sum", "mean")])
def test_a_loss_of_another_reduction_is_refused(engine, loss):
    """Its gradients are scaled by the batch's size before they are clipped: no bound holds."""
    criterion = nn.CrossEntropyLoss(reduction=loss)
    for mode in ("hooks", "ghost"):
        with pytest.raises(NotApplicable, match=f"criterion has the reduction '{loss}' and loss_r"):
            made(mode=mode, loss_reduction=engine, criterion=criterion)
    (inputs, labels), another = same(13), torch.tensor(0 if loss == "sum" else 1)
    labels = torch.cat([labels[:12], another[None]])
    _, private = made(loss_reduction=engine, max_grad_norm=1e9)
    size = float(clipped_sum(private, inputs[:1], labels[:1], nn.CrossEntropyLoss()).norm())
    clip = size * (13.001 if loss == "sum" else 1 / 12)
    moved = {}
    for reduction in ("mean", "sum"):
        _, private = made(loss_reduction=engine, max_grad_norm=clip)
        loss_of = nn.CrossEntropyLoss(reduction=reduction)
        with_it, without = (clipped_sum(private, inputs[:n], labels[:n], loss_of) for n in (13, 12))
        moved[reduction] = float((with_it - without).norm()) / clip
    assert moved[engine] <= 1
    assert moved[loss] > 1.5  # more than the noise is made for


@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_a_mean_over_class_weights_is_refused(kind):
    """Its divisor is the sum of the batch's weights: others' labels scale an example's gradient."""
    weight = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    with pytest.raises(NotApplicable, match="class weights and the reduction 'mean'"):
        made(criterion=kind(weight=weight))
    made(criterion=kind(weight=weight, reduction="sum"), loss_reduction="sum")
    _, private = made(max_grad_norm=1e9)
    inputs = examples(2)[0]
    first = []
    for other in (1, 2):
        private[1].zero_grad()
        loss = nn.functional.cross_entropy(
            private[0](inputs), torch.tensor([0, other]), weight=weight
        )
        loss.backward()
        first.append(private[1].params[0].grad_sample[0].norm())
    assert float(first[0]) > 5 * float(first[1])


def test_ghost_clipping_takes_class_weights():
    """There the loss of each example is weighted alone, and the mean is over the batch."""
    weight = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    inputs = examples(2)[0]
    moved = []
    for other in (1, 2):
        criterion = nn.CrossEntropyLoss(weight=weight)
        _, private = made(mode="ghost", criterion=criterion, max_grad_norm=1e9)
        both = update(private, inputs, torch.tensor([0, other]))
        _, private = made(mode="ghost", criterion=criterion, max_grad_norm=1e9)
        moved.append(both - update(private, inputs[1:], torch.tensor([other])))
    assert float((moved[0] - moved[1]).abs().max()) < 1e-9 * float(moved[0].norm())


@pytest.fixture
def one_process(tmp_path):
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_several_processes_divide_by_a_constant_in_opacus_and_are_refused_here(one_process):
    for kind in (PrivacyEngine, RiskEngine):
        model, (inputs, labels) = net(), same(4)
        module = DifferentiallyPrivateDistributedDataParallel(model)
        given = {
            "module": module,
            "optimizer": torch.optim.SGD(module.parameters(), lr=1.0),
            "data_loader": DataLoader(TensorDataset(*examples(60)), batch_size=6),
            "noise_multiplier": 0.0,
            "max_grad_norm": CLIP,
        }
        if kind is RiskEngine:
            with pytest.raises(NotApplicable, match="module is distributed"):
                kind().make_private(**given)
            continue
        private = kind().make_private(**given)
        assert isinstance(private[1], DistributedDPOptimizer)
        assert 4 * CLIP / float(update(private, inputs, labels).norm()) == pytest.approx(
            6, rel=1e-4
        )


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore")
        yield
