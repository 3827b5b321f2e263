"""Losses by name: their labels, their derivatives, and what attacks make of them."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import leakbound as lb
from leakbound import audit, client, losses
from leakbound.attacks import GradientMatching, infer_labels, label_totals
from leakbound.audit.context import PlanContext, check_plan
from leakbound.cli import main
from leakbound.core import LocalPlan, NotApplicable, Task
from leakbound.engines import loss as heads
from leakbound.engines.choose import choose
from leakbound.engines.sensitivity import example_gradients
from leakbound.losses import LOSSES, named

WRITTEN = {
    "cross_entropy": lambda o, y: -(o.log_softmax(1) * y).sum(1).mean(),
    "bce": lambda o, y: (o.exp().log1p() - y * o).mean(),
    "mse": lambda o, y: ((o - y) ** 2).mean(),
    "l1": lambda o, y: (o - y).abs().mean(),
    "poisson": lambda o, y: (o.exp() - y * o).mean(),
    "dense_cross_entropy": lambda o, y: -(o.log_softmax(1) * y).sum(1).mean(),
    "dice": lambda o, y: (
        1 - ((2 * (o.sigmoid() * y).sum() + 1) / (o.sigmoid().sum() + y.sum() + 1))
    ),
    "next_token": lambda o, y: -o[:, :-1].log_softmax(2).gather(2, y[:, 1:, None]).mean(),
    "token_cross_entropy": lambda o, y: -o.log_softmax(2).gather(2, y[:, :, None]).mean(),
}
"""Each loss written out, on labels for each output."""
ELEMENTWISE = ("bce", "mse", "poisson")


def drawn(name, count=1, outputs=4, seed=0):
    """Outputs and labels for each of them."""
    torch.manual_seed(seed)
    shape = (count, outputs, 3, 3) if LOSSES[name].dense else (count, outputs)
    output = torch.randn(shape, dtype=torch.float64)
    if LOSSES[name].of_inputs:
        return torch.randn(count, 5, outputs, dtype=torch.float64), torch.randint(
            outputs, (count, 5)
        )
    if "cross_entropy" in name:
        return output, torch.randn(shape, dtype=torch.float64).softmax(1)
    return output, {
        "bce": 1.0 * (torch.rand(shape) < 0.5),
        "dice": 1.0 * (torch.rand(shape) < 0.5),
    }.get(name, torch.randn(shape).abs()).double()


@pytest.mark.parametrize("name", LOSSES)
def test_it_is_the_written_loss(name):
    output, labels = drawn(name, 1 if name == "dice" else 5)
    torch.testing.assert_close(LOSSES[name](output, labels), WRITTEN[name](output, labels))


@pytest.mark.parametrize("name", ["cross_entropy", *ELEMENTWISE, "dense_cross_entropy"])
def test_the_derivative_follows_from_the_mean(name):
    output, labels = drawn(name, 5)
    output.requires_grad_()
    (slope,) = torch.autograd.grad(WRITTEN[name](output, labels), output)
    loss = LOSSES[name]
    terms = output[0].numel() if loss.elementwise else output[0, 0].numel()
    closed = loss.scale * (loss.mean(output) - labels) / (len(output) * terms)
    torch.testing.assert_close(closed, slope)


def test_modules_and_functions_are_recognized():
    for name, module, function in (
        ("cross_entropy", nn.CrossEntropyLoss, functional.cross_entropy),
        ("bce", nn.BCEWithLogitsLoss, functional.binary_cross_entropy_with_logits),
        ("mse", nn.MSELoss, functional.mse_loss),
        ("l1", nn.L1Loss, functional.l1_loss),
        ("poisson", nn.PoissonNLLLoss, functional.poisson_nll_loss),
    ):
        assert named(name) is named(module()) is named(function) is LOSSES[name]
        assert Task.of(nn.Linear(2, 2), loss=module()).loss is LOSSES[name]
        with pytest.raises(ValueError, match="with reduction 'none'; give reduction='mean'"):
            named(module(reduction="none"))
    with pytest.raises(ValueError, match="loss is 'hinge'; did you mean"):
        named("hinge")
    with pytest.raises(ValueError, match="loss is 3; give one of"):
        named(3)


@pytest.mark.parametrize(
    "module",
    [
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0])),
        nn.MSELoss(reduction="sum"),
        nn.PoissonNLLLoss(full=True),
        nn.HuberLoss(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_other_settings_are_honored_and_labels_not_inferred(module):
    model, x, y = nn.Linear(4, 1), torch.rand(1, 4), torch.ones(1, 1)
    task = Task.of(model, loss=module)
    wanted = torch.autograd.grad(module(model(x), y), list(model.parameters()))
    found = client.gradient(task, x, y)
    torch.testing.assert_close(found, torch.cat([part.flatten() for part in wanted]))
    seen = lb.simulate(model, (x, y), loss=module, attack="linear_inversion", error_bound="none")
    assert seen.assessment.model.loss.startswith((type(module).__name__, "the function"))
    with pytest.raises(NotApplicable, match="reveals no label"):
        infer_labels(seen.round.observation, lb.stream(0))


class Overlap(nn.Module):
    """As MONAI's losses of masks: it makes a 0 or 1 of each class itself, unless this is off."""

    def __init__(self):
        super().__init__()
        self.to_onehot_y = True

    def forward(self, output, target):
        if self.to_onehot_y:
            if target.ndim != output.ndim or target.shape[1] != 1:
                raise AssertionError("labels should have a channel")
            target = functional.one_hot(target[:, 0].long(), output.shape[1]).movedim(-1, 1)
        if target.shape != output.shape:
            raise AssertionError("ground truth has different shape")
        return 1 - (output.softmax(1) * target).mean()


def whole_numbers(output, target):
    return functional.cross_entropy(output, target.clone()) + 0 * output.sum()


def broadcast(output, target):
    """It would take class maps as well: an example's labels beside each class."""
    return (output - target).square().mean()


@pytest.mark.parametrize("places", [(5,), (4, 3), (3, 4, 2)])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_the_form_of_labels_that_own_losses_take(places, count):
    torch.manual_seed(0)
    output = torch.randn(count, 3, *places)
    whole = torch.randint(0, 3, (count, *places))
    hot = functional.one_hot(whole, 3).movedim(-1, 1).float()
    for own, channel in ((Overlap(), True), (whole_numbers, False)):
        loss = losses.fitted(named(own), output)
        assert (loss.targets, loss.assumed) == ("class map", True)
        true = own(output, whole[:, None] if channel else whole)
        for labels in (whole, whole[:, None], whole.float()):
            torch.testing.assert_close(loss(output, labels), true)
        torch.testing.assert_close(loss(output, hot), true)
    assert Overlap().to_onehot_y
    assert losses.fitted(named(broadcast), output).targets == "mask"
    one = losses.fitted(named(lambda o, y: functional.mse_loss(o, y)), output[:, :1])
    assert one.targets == "mask"
    one.check(torch.full((1, 1, *places), 7.0), None)  # only the function knows its range
    assert losses.fitted(named(lambda o, y: o.mean(1).squeeze()), output).targets == "any"
    assert losses.fitted(LOSSES["bce"], output) is LOSSES["bce"]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_loss_that_changes_tensors_in_place_has_gradients_of_examples():
    """As MONAI's, which fail under vmap."""

    def in_place(output, maps):
        hot = torch.zeros(output.shape).scatter_(1, maps[:, None], 1)
        return -(output.log_softmax(1) * hot).sum(1).mean()

    model, inputs = nn.Conv2d(1, 3, 1), torch.rand(2, 1, 4, 4)
    maps = torch.randint(0, 3, (2, 4, 4))
    own, known = (Task.of(model, loss=loss) for loss in (in_place, "dense_cross_entropy"))
    each = client.example_gradients(own, inputs, maps)
    torch.testing.assert_close(each, client.example_gradients(known, inputs, maps))


def test_labels_fit_one_output_of_any_shape():
    labels = torch.tensor([0.0, 1.0, 1.0])
    flat = LOSSES["bce"](torch.arange(3.0), labels)
    assert LOSSES["bce"](torch.arange(3.0)[:, None], labels) == flat
    assert LOSSES["bce"](torch.arange(3.0), labels[:, None]) == flat
    with pytest.raises(
        ValueError, match=r"labels has shape \(3,\) and the model's output \(3, 3\)"
    ):
        LOSSES["mse"](torch.zeros(3, 3), labels)


@pytest.mark.parametrize(
    ("name", "labels", "reason"),
    [
        ("bce", torch.tensor([0, 1]), "type torch.int64, but the loss 'bce' takes binary labels"),
        (
            "bce",
            torch.tensor([0.0, 2.0]),
            "labels run from 0 to 2, but the loss 'bce' takes binary",
        ),
        ("poisson", torch.tensor([-1.0]), "the loss 'poisson' takes count labels, from 0 on"),
        ("mse", torch.tensor([float("nan")]), "labels holds 1 of 1 entries that are NaN"),
        ("mse", torch.tensor([1]), "give labels.float()"),
        ("cross_entropy", torch.zeros(1, 2, 2).long(), 'loss="dense_cross_entropy"'),
        ("cross_entropy", torch.tensor([0.5]), "give one class number per example"),
        ("dense_cross_entropy", torch.tensor([1]), "give one class number per pixel"),
        ("dense_cross_entropy", torch.full((1, 2, 2), 5), "labels run from 5 to 5"),
        ("dice", torch.zeros(1, 2, 2).long(), "takes mask labels as floats"),
    ],
)
def test_labels_of_another_kind_are_refused(name, labels, reason):
    task = Task.of(nn.Linear(2, 3), loss=name, classes=3)
    with pytest.raises(ValueError, match=reason.replace("(", r"\(").replace(")", r"\)")):
        lb.send(
            task,
            lb.Batch(torch.rand(len(labels), 2), labels),
            lb.defenses.NoDefense(),
            lb.stream(0),
        )


def coded(name, classes=3):
    return LOSSES[name].of_data(torch.zeros(classes).long())


@pytest.mark.parametrize("name", ["bce", "mse", "l1", "poisson"])
def test_class_numbers_become_zeros_and_ones(name):
    torch.manual_seed(0)
    classes = torch.tensor([2, 0, 1, 1])
    output, hot = torch.randn(4, 3), functional.one_hot(classes).float()
    loss = coded(name)
    torch.testing.assert_close(loss(output, classes), WRITTEN[name](output, hot))
    assert loss.outputs(3) == 3
    assert (loss.outputs(2) == 1) == (name == "bce")
    one, two = output[:, :1], torch.tensor([1, 0, 1, 0])
    torch.testing.assert_close(loss(one, two), WRITTEN[name](one, two[:, None].float()))
    assert loss.of_data(classes) == loss
    predicted, true = loss.classified(hot, classes)
    assert torch.equal(predicted, true)


def test_a_loss_must_take_the_labels_of_the_data():
    numbers, classes, maps = torch.rand(3), torch.arange(3), torch.zeros(3, 2, 2).long()
    assert LOSSES["mse"].of_data(numbers) is LOSSES["mse"]
    assert LOSSES["cross_entropy"].of_data(maps) is LOSSES["dense_cross_entropy"]
    assert LOSSES["dice"].of_data(maps) is LOSSES["dice"]
    for name, labels, reason in (
        ("cross_entropy", numbers, "are numbers; give one of mse, l1, poisson"),
        ("dice", classes, "are class numbers; give one of cross_entropy, bce"),
        ("mse", maps, "are class maps; give one of dense_cross_entropy, dice, bce"),
    ):
        with pytest.raises(ValueError, match=reason):
            LOSSES[name].of_data(labels)


@pytest.mark.parametrize("kind", ["each output", "classes", "chances", "one output", "two chances"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_heads_are_autograds_double_backward(name, kind):
    output, labels = drawn(name, 6, 1 if kind in ("one output", "two chances") else 4)
    loss = LOSSES[name]
    if kind != "each output":
        loss = coded(name)
        labels = torch.randint(0, 2 if output.shape[1] == 1 else 4, (6,))
        if "chances" in kind:
            labels = functional.one_hot(labels, max(2, output.shape[1])).double()
    tangent, traced = torch.randn_like(output), heads._Traced(loss, output, labels)
    at = heads.head(loss, output, labels)
    assert not isinstance(at, heads._Traced)
    torch.testing.assert_close(at.deltas, traced.deltas)
    for mine, other in zip(at.moved(tangent), traced.moved(tangent), strict=True):
        if other is not None:
            torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", [*ELEMENTWISE, "l1", "coded"])
def test_engines_give_autograds_gradients(name, batch):
    torch.manual_seed(0)
    loss = coded("bce") if name == "coded" else LOSSES[name]
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 7), nn.Sigmoid(), nn.Linear(7, 3)).double()
    task = Task.of(model, loss=loss, classes=3)
    x, y = torch.rand(2, batch, 1, 3, 3).double(), torch.rand(2, batch, 3).double()
    for rows, many in ((1, False), (1, True), (2, True))[: 2 if name == "l1" else 3]:
        choice = choose(task, rows, (batch, 1, 3, 3), many)
        assert choice is not None
        engine = choice.engine([task], rows)
        found = engine.gradient(x[:rows], y[:rows]).clone()
        cotangent = torch.randn_like(found)
        pulled = engine.pull(cotangent)
        for row in range(rows):
            image, label = x[row].clone().requires_grad_(), y[row].clone().requires_grad_()
            plain = client.gradient(task, image, label)
            torch.testing.assert_close(found[row], plain.detach())
            wanted = torch.autograd.grad(plain, (image, label), cotangent[row], allow_unused=True)
            torch.testing.assert_close(pulled.inputs[row], wanted[0])
            if name != "l1":  # its derivative in the labels is zero
                torch.testing.assert_close(pulled.labels[row], wanted[1])


@pytest.mark.parametrize("name", ["bce", "mse", "poisson", "l1"])
def test_examples_own_gradients_are_autograds(name):
    torch.manual_seed(0)
    task = Task.of(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2)), loss=name)
    x, y = torch.rand(3, 5), torch.rand(3, 2)
    wanted = torch.stack([client.gradient(task, x[i : i + 1], y[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(example_gradients(task, x, y), wanted)
    torch.testing.assert_close(client.example_gradients(task, x, y), wanted)


def seen_of(model, x, y, loss, **more):
    """What an attacker sees of these examples who also knows the same inputs, as public ones."""
    public = lb.Batch(x, y) if more.pop("public", True) else None
    task = Task.of(model, loss=loss, **more)
    streams = [lb.stream(0), lb.stream(1)]
    threat = lb.ThreatModel(labels_known=False)
    batch, nothing = lb.Batch(x, y), lb.defenses.NoDefense()
    return lb.play(task, [batch], nothing, streams, threat=threat, auxiliary=public).observation


def test_sums_of_labels_are_exact_at_exact_means():
    torch.manual_seed(0)
    x = torch.rand(20, 1, 4, 4)

    def flat(outputs):
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, outputs))

    def conv(outputs):
        return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, outputs, 1))

    one = torch.randint(0, 2, (20,)).float()
    for loss, model, y, totals in (
        ("bce", flat(1), one, one.sum()[None]),
        ("bce", flat(3), one[:, None] * torch.ones(3), one.sum() * torch.ones(3)),
        ("mse", flat(2), torch.stack([one, -3 * one], 1), torch.stack([one.sum(), -3 * one.sum()])),
        ("poisson", flat(1), 4 * one[:, None], 4 * one.sum()[None]),
        ("cross_entropy", flat(3), one.long(), torch.tensor([20 - one.sum(), one.sum(), 0])),
        ("bce", conv(1), x[:, 0].round(), x.round().sum()[None]),
    ):
        seen = seen_of(model, x, y, loss)
        torch.testing.assert_close(label_totals(seen, lb.stream(0)), totals, rtol=1e-3, atol=1e-2)
    maps = torch.randint(0, 3, (20, 4, 4))
    areas = label_totals(seen_of(conv(3), x, maps, "dense_cross_entropy", classes=3), lb.stream(0))
    assert areas.round().tolist() == torch.bincount(maps.flatten()).tolist()
    for loss, model in (("dense_cross_entropy", conv(3)), ("bce", conv(1))):
        y = maps if loss != "bce" else x[:, 0].round()
        with pytest.raises(NotApplicable, match="but areas are known"):
            infer_labels(seen_of(model, x, y, loss), lb.stream(0))


def test_labels_of_a_batch():
    torch.manual_seed(0)
    x, y = torch.rand(9, 6), torch.tensor([1.0, 0, 0, 1, 1, 1, 0, 1, 1])
    found = infer_labels(seen_of(nn.Linear(6, 1), x, y, "bce"), lb.stream(0))
    assert found.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert found.dtype == torch.float32
    classes = torch.tensor([0, 1, 2, 2, 2, 1, 0, 1, 2])
    for name in ("bce", "mse", "poisson"):
        seen = seen_of(nn.Linear(6, 3), x, classes, coded(name), classes=3)
        assert infer_labels(seen, lb.stream(0)).tolist() == sorted(classes.tolist()), name
        lone = seen_of(nn.Linear(6, 3), x[:1], classes[2:3], coded(name), classes=3, public=False)
        assert infer_labels(lone, lb.stream(0)).tolist() == [2]
    seen = seen_of(nn.Linear(6, 1), x, y.long(), coded("bce"), classes=2)
    assert infer_labels(seen, lb.stream(0)).tolist() == sorted(y.long().tolist())
    for loss, labels in (("mse", torch.rand(9, 3)), ("bce", torch.ones(9, 3))):
        with pytest.raises(NotApplicable, match="of 9 examples only the sums of their labels"):
            infer_labels(seen_of(nn.Linear(6, 3), x, labels, loss), lb.stream(0))
    with pytest.raises(NotApplicable, match="the last layer's gradient under l1 reveals no label"):
        infer_labels(seen_of(nn.Linear(6, 3), x, torch.rand(9, 3), "l1"), lb.stream(0))
    from leakbound.attacks.labels import infer

    with pytest.raises(NotApplicable, match="the rule is for cross-entropy, and the loss is bce"):
        infer("ma", seen_of(nn.Linear(6, 3), x, torch.ones(9, 3), "bce"), lb.stream(0))


def test_a_training_that_diverges_reveals_no_label():
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    y = torch.full((1, 2), 8.0)
    seen = seen_of(model, torch.rand(1, 20), y, "poisson", plan=LocalPlan(5, 0.3), public=False)
    with pytest.raises(NotApplicable, match="no label explains the last layer's gradient"):
        infer_labels(seen, lb.stream(0))


SEARCH = GradientMatching(
    distance="euclidean", optimizer="lbfgs", learning_rate=1.0, steps=60, signed=False,
    schedule="constant", box=False,
)  # fmt: skip
CASES = [("bce", 1), ("bce", 4), ("mse", 3), ("poisson", 2)]


@pytest.mark.parametrize("labels", ["told", "inferred", "joint"])
@pytest.mark.parametrize(("name", "outputs"), CASES)
def test_matching_finds_one_example(name, outputs, labels, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.Sigmoid(), nn.Linear(24, outputs))
    y = {"bce": 1.0 * (torch.rand(1, outputs) < 0.5), "poisson": torch.ones(1, outputs)}.get(
        name, torch.randn(1, outputs)
    )
    y = y[:, 0] if outputs == 1 else y
    attack = lb.attacks.GradientMatching(**{**vars(SEARCH), "labels": labels})
    found = lb.simulate(
        model, (torch.rand(1, 1, 6, 6), y), loss=name, attack=attack, error_bound="none"
    )
    assert found.verdict == "exposed"
    assert found.scores[0] > 40
    assert found.metrics["label_accuracy"] == (1.0,)
    assert found.answer.labels.shape == y.shape


def test_labels_that_cannot_be_inferred_are_searched():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.Sigmoid(), nn.Linear(24, 3))
    seen = seen_of(model, torch.rand(2, 1, 4, 4), torch.rand(2, 3), "mse", public=False)
    found = SEARCH(seen, lb.stream(0))
    assert found.labels.shape == (2, 3)
    assert found.problem is None
    seen = seen_of(model, torch.rand(2, 1, 4, 4), torch.rand(2, 3), "l1", public=False)
    with pytest.raises(NotApplicable, match="its derivative is a sign; give the labels"):
        SEARCH(seen, lb.stream(0))


def test_masks_are_told_or_searched():
    torch.manual_seed(0)
    x = torch.rand(1, 1, 5, 5)
    short = lb.attacks.GradientMatching(**{**vars(SEARCH), "steps": 15})
    for name, outputs, y in (
        ("dense_cross_entropy", 3, torch.randint(0, 3, (1, 5, 5))),
        ("dice", 1, x[:, 0].round()),
    ):
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.Sigmoid(), nn.Conv2d(8, outputs, 3, padding=1)
        )
        told = lb.simulate(model, (x, y), loss=name, attack=short, error_bound="none")
        assert told.scores[0] > (30 if outputs == 3 else 10)
        free = lb.ThreatModel(labels_known=False)
        found = lb.simulate(model, (x, y), loss=name, attack=short, threat=free, error_bound="none")
        assert found.answer.labels.numel() == 25
        assert found.metrics["label_accuracy"][0] is not None


def plan_of(loss, source="breast_cancer", **more):
    return audit.parse(
        {
            "data": {"source": source, "loss": loss},
            "models": [{"name": "mlp", "hidden": [16]}],
            "attacks": [{"name": "linear_inversion"}],
            "threat": {"labels_known": False},
            **more,
        }
    )


@pytest.mark.parametrize("loss", ["bce", "mse", "l1", "poisson"])
def test_an_audit_turns_class_numbers_into_labels(loss):
    plan = plan_of(loss, utility={"rounds": 1, "repeats": 1, "clients": 1, "batch_size": 4})
    records = [result.record for result in audit.run(plan)]
    training, record = records
    assert (record.verdict, record.model.loss) == ("exposed", loss)
    assert 0 <= training.accuracy <= 1
    context = PlanContext(plan.data)
    outputs = client.forward(context.task(plan.models[0], 0), context.dataset.inputs[:2])
    assert outputs.shape == (2, 1 if loss == "bce" else 2)


def test_an_audit_refuses_a_loss_that_does_not_fit():
    with pytest.raises(ValueError, match="loss is 'bcd'; did you mean 'bce'"):
        plan_of("bcd")
    plan = plan_of("dice")
    with pytest.raises(ValueError, match="loss is 'dice', but the data's labels are class numbers"):
        check_plan(plan, PlanContext(plan.data))


def test_the_command_line_takes_a_loss(capsys):
    options = ["--data", "breast_cancer", "--attack", "linear_inversion", "--error-bound", "none"]
    with pytest.raises(SystemExit) as ended:
        main(["attack", *options, "--loss", "bce"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "loss:    bce" in said
    with pytest.raises(SystemExit) as ended:
        main(["attack", *options, "--loss", "cosine"])
    assert ended.value.code != 0
    assert "loss is 'cosine'" in capsys.readouterr().err


def test_wrong_outputs_are_named():
    for name, shape, word in (
        ("cross_entropy", (2, 3, 4, 4), "one row of class scores"),
        ("dense_cross_entropy", (2, 3), "scores of classes for each pixel"),
    ):
        assert word in LOSSES[name].misfit(torch.zeros(shape), 2)
    for name, shape in (
        ("bce", (2,)),
        ("mse", (2, 3)),
        ("dice", (2, 1, 4, 4)),
        ("cross_entropy", (2, 3)),
    ):
        assert LOSSES[name].misfit(torch.zeros(shape), 2) is None
    assert losses.dice(torch.full((1, 2), -40.0), torch.zeros(1, 2)) == 0
    mask = torch.tensor([[0.0, 1.0]])
    predicted, true = LOSSES["dice"].classified(torch.tensor([[[-1.0, -1.0]]]), mask)
    assert (predicted == true).tolist() == [True, False]
