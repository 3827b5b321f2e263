"""What an update proves, what it refutes, and what is not concluded from it."""

import math

import pytest
import torch
from torch import nn

from leakbound import captured, data, defenses, models
from leakbound._util.formats import format_explained
from leakbound.captured import load, proofs
from leakbound.core import Batch, Gaussian, Laplace, Observation, Task, Unit, Update
from leakbound.covariance import Structured
from leakbound.randomness import stream
from leakbound.registry import Spec

from .flat import attack_update

SHAPE, RATE, LINEAR = (1, 28, 28), 0.1, ["linear_inversion"]


@pytest.fixture(scope="module")
def digits():
    return data.load("mnist5k", limit=50)


def mlp():
    return models.mlp(input_shape=SHAPE, classes=10, generator=stream(0, "captured"))


def convolutions(generator=0):
    torch.manual_seed(generator)
    return nn.Sequential(nn.Conv2d(1, 8, 5, 4), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 36, 10))


def some(digits, count):
    return Batch(digits.inputs[:count], digits.labels[:count])


def named(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def trained(model, batch, *, steps=1, kind="SGD", precision=None, **settings):
    """Weights before and after, and the last gradient, of plain PyTorch code."""
    before = named(model)
    optimizer = getattr(torch.optim, kind)(model.parameters(), **({"lr": RATE} | settings))
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(
            "cpu", dtype=precision or torch.bfloat16, enabled=precision is not None
        ):
            loss = nn.functional.cross_entropy(model(batch.inputs), batch.labels)
        loss.backward()
        gradient = {k: p.grad.clone() for k, p in model.named_parameters()}
        optimizer.step()
    return before, named(model), gradient


def attacked(update, before, build=mlp, kind="weights", attacks=LINEAR, **told):
    return attack_update(
        load(update, before, kind=kind), build(), input_shape=SHAPE, attacks=attacks, **told
    )


def of(outcome):
    """Findings by name, notes as one text, and the certificate."""
    own = outcome.records[0].capture
    return {f.name: f for f in own.findings}, " ".join(own.notes), outcome.records[0].certificate


@pytest.mark.parametrize("deviation", [0.3081, 0.5])
def test_normalized_images_are_certified_in_their_own_range_alone(deviation, digits):
    mean = 0.1307 if deviation < 0.5 else 0.5
    batch = some(digits, 1)
    fed = Batch((batch.inputs - mean) / deviation, batch.labels)
    before, _, gradient = trained(mlp(), fed)
    _, notes, proof = of(attacked(gradient, before, kind="gradient"))
    assert proof is None
    low, high = float(fed.inputs.min()), float(fed.inputs.max())
    assert "outside of input_range 0 to 1: the reconstruction is cut off" in notes
    assert f"(--input-range {low:.3g} {high:.3g})" in notes
    right = attacked(gradient, before, kind="gradient", input_range=(low, high))
    _, notes, proof = of(right)
    assert "this is the input as the model gets it, up to rounding" in proof
    assert "input_range" not in notes
    assert torch.allclose(right.best.inputs, fed.inputs, atol=1e-4)


def test_an_image_that_is_hardly_cut_off_is_not_certified(digits):
    batch = some(digits, 1)
    bright = Batch(1.01 * batch.inputs / batch.inputs.max(), batch.labels)
    before, _, gradient = trained(mlp(), bright)
    outcome = attacked(gradient, before, kind="gradient")
    _, notes, proof = of(outcome)
    assert outcome.records[0].capture.explained.direction > 0.999
    assert proof is None
    assert "from 0 to 1.01, outside of input_range" in notes


def test_signs_and_adam_are_not_certified(digits):
    before, _, gradient = trained(mlp(), some(digits, 1))
    signs = {k: v.sign() for k, v in gradient.items()}
    assert of(attacked(signs, before, kind="gradient"))[2] is None
    before, after, _ = trained(mlp(), some(digits, 1), kind="Adam", lr=1e-3, eps=1e-14)
    assert of(attacked(after, before, examples=1))[2] is None
    assert of(attacked(after, before, examples=1, learning_rate=1e-3, steps=1))[2] is None


def small(kind="relu", width=8, inputs=30, classes=2, before=(), seed=0):
    """A small network for rows of a table."""
    torch.manual_seed(seed)
    units = {"relu": nn.ReLU(), "linear": nn.Identity(), "tanh": nn.Tanh()}[kind]
    return nn.Sequential(
        nn.Flatten(), *before, nn.Linear(inputs, width), units, nn.Linear(width, classes)
    )


def certified(model, inputs, labels, after=lambda update: update, optimizer=None, **told):
    """The certificate of one local step of plain PyTorch code, and the largest error."""
    before = named(model)
    model.zero_grad()
    if optimizer is None:
        nn.functional.cross_entropy(model(inputs), labels).backward()
        sent = after({k: p.grad.clone() for k, p in model.named_parameters()})
    else:
        step = optimizer(model)
        nn.functional.cross_entropy(model(inputs), labels).backward()
        step.step()
        sent = {k: before[k] - v for k, v in named(model).items()}
    try:
        found = attack_update(
            load(sent, before, kind="gradient"), model, input_shape=tuple(inputs.shape[1:]),
            attacks=LINEAR, **told,
        )  # fmt: skip
    except ValueError:  # the number of examples has to be given
        return None, None
    best = found.best  # None if the attack reports a problem
    error = math.nan if best is None else float((best.inputs - inputs).abs().max())
    return found.records[0].certificate, error


@pytest.mark.parametrize("kind", ["relu", "linear", "tanh"])
@pytest.mark.parametrize(("name", "classes"), [("breast_cancer", 2), ("iris", 3), ("wine", 3)])
def test_the_mean_of_two_rows_is_never_certified_as_one(name, classes, kind):
    """Behind few units or classes two gradients are often multiples of each other."""
    table = data.load(name)
    rows, asked = table.inputs.flatten(1), 0
    for seed in range(6):
        own = (table.labels == seed % classes).nonzero().flatten()
        pair = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(seed))[:2]]
        model = small(kind, 4, rows.shape[1], classes, seed=seed)
        proof, error = certified(model, rows[pair], table.labels[pair])
        asked += error is not None
        assert proof is None
        one, error = certified(model, rows[pair[:1]], table.labels[pair[:1]], examples=1)
        assert one is None or error < 1e-3
    assert asked or kind == "tanh", "some of these pairs pass for one example"


def rates(bias):
    def build(model):
        weights = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim == 1]
        parts = [{"params": weights, "lr": RATE}, {"params": others, "lr": RATE * bias}]
        return torch.optim.SGD(parts)

    return build


OTHERS_THAN_SGD = {
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
    "adam eps": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-3),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
    "bias rate 2": rates(2.0),
    "bias rate 0.5": rates(0.5),
}


@pytest.mark.parametrize("name", OTHERS_THAN_SGD)
def test_other_rules_than_sgd_are_not_certified(name, digits):
    row = data.load("breast_cancer").inputs.flatten(1)[:1]
    for model, inputs in ((mlp(), digits.inputs[:1]), (small("linear", 2), row), (small(), row)):
        proof, _ = certified(
            model, inputs, torch.tensor([1]), optimizer=OTHERS_THAN_SGD[name], examples=1
        )
        assert proof is None


def noisy(level):
    torch.manual_seed(0)
    return lambda sent: {k: v + level * v.std() * torch.randn_like(v) for k, v in sent.items()}


CHANGES = {
    "signs": lambda sent: {k: v.sign() for k, v in sent.items()},
    "noise": noisy(1e-2),
    "bfloat16": lambda sent: {k: v.bfloat16() for k, v in sent.items()},
    "columns": lambda sent: {k: v * (torch.arange(v.shape[-1]) % 3 > 0) for k, v in sent.items()},
    "largest": lambda sent: {k: v * (v.abs() > v.abs().median()) for k, v in sent.items()},
    "steps": lambda sent: {k: (v / v.abs().max() * 127).round() for k, v in sent.items()},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_update_is_not_certified(name, digits):
    label = digits.labels[:1]
    assert certified(mlp(), digits.inputs[:1], label, examples=1)[0] is not None
    assert certified(mlp(), digits.inputs[:1], label, CHANGES[name], examples=1)[0] is None


def test_dropout_before_the_layer_is_not_certified_and_two_labels_of_one_input_are(digits):
    row = data.load("breast_cancer").inputs.flatten(1)[:1]
    assert certified(small("tanh", 16), row, torch.tensor([1]), examples=1)[0] is not None
    dropped = small("tanh", 16, before=[nn.Dropout(0.1)])
    assert certified(dropped, row, torch.tensor([1]), examples=1)[0] is None
    twice = digits.inputs[:1].repeat(2, 1, 1, 1)
    for labels in ([3, 3], [3, 4]):
        proof, error = certified(mlp(), twice, torch.tensor(labels))
        assert proof is not None
        assert error < 1e-5, "it is the input of both"


def test_a_certificate_is_an_exposure(digits, tmp_path):
    batch = some(digits, 1)
    before, after, _ = trained(mlp(), batch)
    found = attacked(after, before, out=tmp_path / "run")
    assert found.records[0].verdict == "exposed (certified)"
    assert found.counts == {"exposed (certified)": 1}
    page = found.page.read_text("utf-8")
    main = page[page.index("<main") :]
    first = main.index("<img")
    assert "Exposed for certain</h2>" in main[:first]
    assert "banner" not in main[:first], "the input is the first thing on the page"
    assert "1 captured update reveals the client" in main[:first]
    assert attacked(after, before, truth=batch).records[0].verdict == "exposed"


def test_several_steps_are_certified_where_their_replay_explains_them(digits):
    before, after, _ = trained(mlp(), some(digits, 1), steps=3)
    assert of(attacked(after, before, learning_rate=RATE))[2] is not None
    assert of(attacked(after, before, learning_rate=RATE, steps=1))[2] is None
    before, after, _ = trained(mlp(), some(digits, 1), steps=2, lr=1e-3, momentum=0.9)
    assert of(attacked(after, before, learning_rate=1e-3, steps=2))[2] is not None


HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("kind", ["gradient", "delta", "weights", "after alone"])
def test_rounding_to_half_precision_makes_no_examples(kind, name, digits):
    def half(tensors):
        return {k: v.to(HALVES[name]) for k, v in tensors.items()}

    before, after, gradient = trained(mlp(), some(digits, 1))
    sent = {"gradient": gradient, "delta": {k: after[k] - before[k] for k in before}}.get(
        kind, after
    )
    own = half(before) if kind == "weights" else before
    found, notes, _ = of(
        attacked(half(sent), own, kind="weights" if "after" in kind else kind, examples=1)
    )
    assert "has the rank of at least" not in notes
    found, notes, _ = of(attacked(half(sent), own, kind="weights" if "after" in kind else kind))
    assert found["batch size"].value == "1"
    assert found["labels"].value == str(int(some(digits, 1).labels))


@pytest.mark.parametrize("count", [2, 4, 16])
def test_the_rank_in_float16_still_counts_several_examples(count, digits):
    before, _, gradient = trained(mlp(), some(digits, count))
    half = {k: v.half() for k, v in gradient.items()}
    found, _, _ = of(attacked(half, before, kind="gradient"))
    assert found["batch size"].value == str(count)
    wide = {k: v.float() for k, v in half.items()}  # as mixed precision leaves it
    assert of(attacked(wide, before, kind="gradient"))[0]["batch size"].value == str(count)


OTHERS = {
    "adam": {"kind": "Adam", "lr": 1e-3},
    "autocast": {"precision": torch.bfloat16},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_true_batch_size_is_taken_from_any_optimizer(name, digits):
    before, after, _ = trained(mlp(), some(digits, 4), **OTHERS[name])
    outcome = attacked(after, before, examples=4, learning_rate=RATE, steps=1)
    _, notes, _ = of(outcome)
    assert outcome.records[0].batch_size == 4
    if name == "adam":  # whose sizes show it: no rank is read from signs
        assert of(outcome)[0]["optimizer"].value == "Adam or similar"
        return
    assert "float16 or mixed precision, Adam, weight decay or undeclared noise would" in notes


def test_a_batch_size_under_the_rank_is_noted(digits):
    before, after, _ = trained(mlp(), some(digits, 4))
    outcome = attacked(after, before, examples=3)
    words = (
        "the given batch size is 3, but the gradient of the layer '1' has the rank of at least 4"
    )
    assert words in of(outcome)[1]
    assert outcome.records[0].batch_size == 3


def test_what_ranks_say_is_said_with_its_assumption(digits):
    before, after, _ = trained(mlp(), some(digits, 2))
    assert "if the client ran plain SGD" in of(attacked(after, before))[0]["batch size"].how
    before, after, _ = trained(mlp(), some(digits, 1), weight_decay=1e-3)
    with pytest.raises(ValueError, match="if the client ran plain SGD in full precision"):
        attacked(after, before, weight_decay=0)
    before, after, _ = trained(mlp(), some(digits, 1), steps=3, momentum=0.9, lr=3e-4)
    steps = of(attacked(after, before, learning_rate=3e-4))[0]["local steps"]
    assert not steps.sure
    assert "if the client ran plain SGD" in steps.how


@pytest.mark.parametrize("noise", [2.0, 20.0])
def test_declared_noise_that_was_not_added_bounds_nothing(noise, digits):
    before, after, _ = trained(mlp(), some(digits, 1))
    outcome = attacked(
        after, before, examples=1, steps=1, learning_rate=RATE, public="mnist5k", psnr=30.0,
        defense=defenses.DpSgd(clip_norm=1.0, noise_multiplier=noise),
    )  # fmt: skip
    (record,) = outcome.records
    assert "of the declared noise's energy: that noise was not added" in of(outcome)[1]
    assert record.bounds == ()
    assert "was not added" in record.bounds_note
    assert record.verdict == "undecided"
    assert record.release.noise_share is None


def test_without_the_rate_honest_noise_is_not_called_missing(digits):
    before, after, _ = trained(mlp(), some(digits, 1))
    torch.manual_seed(0)
    noisy = {k: v + RATE * 5 * torch.randn_like(v) for k, v in after.items()}
    noise = {"examples": 1, "steps": 1, "defense": defenses.GaussianNoise(5.0)}
    for rate in (RATE, None):
        outcome = attacked(noisy, before, learning_rate=rate, **noise)
        assert "was not added" not in of(outcome)[1]
    assert "cannot be compared with it" in of(outcome)[0]["learning rate"].how
    assert outcome.records[0].release.noise_share is None
    assert "was not added" in of(attacked(after, before, learning_rate=RATE, **noise))[1]


def observed(row, law):
    model = nn.Sequential(nn.Flatten(), nn.Linear(row.numel() - 1, 1))
    update = Update(row[None], Unit.CLIENT, (1,), law)
    return Observation(update, Task.of(model), (1,), (1, 1, row.numel() - 1))


@pytest.mark.parametrize("count", [5, 50, 2000])
@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_honest_noise_is_not_refuted_and_half_of_it_is(law, count):
    generator = torch.Generator().manual_seed(3)
    for trial in range(200):
        uniform = torch.rand(count, generator=generator, dtype=torch.float64) - 0.5
        noise = {
            "gaussian": torch.randn(count, generator=generator, dtype=torch.float64),
            "laplace": -uniform.sign() * torch.log1p(-2 * uniform.abs()),
        }[law]
        known = Gaussian(1.0) if law == "gaussian" else Laplace(1.0)
        assert proofs.missing_noise(observed(noise, known)) is None, trial
        signal = torch.linspace(-2, 2, count, dtype=torch.float64)
        assert proofs.missing_noise(observed(noise + signal, known)) is None
        if count == 2000:
            assert "noise was not added" in proofs.missing_noise(observed(noise / 2, known))


def test_the_energy_of_unequal_and_private_noise():
    generator = torch.Generator().manual_seed(4)
    spread = torch.linspace(0.1, 3, 500, dtype=torch.float64)
    noise = spread * torch.randn(500, generator=generator, dtype=torch.float64)
    assert proofs.missing_noise(observed(noise, Gaussian(spread.square()))) is None
    assert proofs.missing_noise(observed(0.6 * noise, Gaussian(spread.square()))) is not None
    assert proofs.missing_noise(observed(0.6 * noise, Gaussian(spread.square(), True))) is None


def test_the_energy_of_correlated_noise():
    generator = torch.Generator().manual_seed(5)
    diagonal, factor = torch.linspace(0.5, 2, 500).double(), 3 * torch.ones(500, 1).double()
    covariance = Structured.of(diagonal, [(0, 500, factor)])
    white = torch.randn(1, 500, generator=generator, dtype=torch.float64)
    noise = covariance.color(white)[0]
    assert proofs.missing_noise(observed(noise, Gaussian(covariance))) is None
    assert proofs.missing_noise(observed(0.6 * noise, Gaussian(covariance))) is not None


def test_a_delta_called_a_gradient_makes_no_class_certain(digits):
    before, after, _ = trained(mlp(), some(digits, 1))
    delta = {k: after[k] - before[k] for k in before}
    found, notes, _ = of(attacked(delta, before, kind="gradient"))
    assert "for certain" not in found["labels"].how
    assert not found["labels"].sure
    assert "more than there are examples: no class is certain" in notes
    assert "--kind delta" in notes
    found, notes, _ = of(attacked(delta, before, kind="delta"))
    assert "for certain" in found["labels"].how
    assert "no class is certain" not in notes


def test_weights_of_another_start_make_no_class_certain(digits):
    _, after, _ = trained(convolutions(), some(digits, 1))
    found, notes, _ = of(attacked(after, None, lambda: convolutions(9), examples=200))
    assert "for certain" not in found["labels"].how
    assert "cross-entropy's to 0: no class is certain" in notes
    assert "--before" in notes


def test_told_labels_that_the_update_contradicts_are_noted(digits):
    batch = some(digits, 1)
    before, after, _ = trained(mlp(), batch)
    label = int(batch.labels)
    _, notes, _ = of(attacked(after, before, labels=[(label + 1) % 10]))
    assert f"the given labels do not include {label}" in notes
    assert "do not hold" not in of(attacked(after, before, labels=[label]))[1]


def test_an_empty_defense_is_no_declared_noise(digits):
    before, after, _ = trained(mlp(), some(digits, 1))
    found, _, _ = of(attacked(after, before, defense=defenses.chain()))
    assert "declared noise" not in found["learning rate"].how


def test_one_attack_may_be_named_alone(digits):
    before, after, _ = trained(mlp(), some(digits, 1))
    outcome = attacked(after, before, attacks="linear_inversion")
    assert [r.attack.name for r in outcome.records] == LINEAR


def test_the_page_of_several_updates_without_truth_claims_no_truth(digits, tmp_path):
    updates = []
    for count in (1, 2):
        before, after, _ = trained(mlp(), some(digits, count))
        updates.append(load(after, before))
    settings = captured.Settings(SHAPE, attacks=(Spec("linear_inversion"),))
    found = captured.attack_all(updates, mlp(), settings, output=captured.Output(tmp_path / "run"))
    page = found.page.read_text("utf-8")
    for words in (
        "the true images on top",
        "its own weights, batch and noise",
        "no attack has a r",
    ):
        assert words not in page
    assert "2 captured updates of one model, each attacked by itself" in page
    assert "not measured: the truth is not known" in page


def test_a_share_is_rounded_down():
    assert format_explained(0.99994) == "99.994%"
    assert format_explained(1.0) == "100%"
