"""One record behind a linear layer is exposed and certified under every loss; others are not."""

import numpy
import pytest
import torch
from torch import nn

from leakbound import captured
from leakbound.captured import load
from leakbound.cli import main
from leakbound.cli.captured import EXPOSED_CODE

from .flat import attack_update

SIZE, RATE = 20, 0.05


def bce(outputs, labels):
    """Written out, so that it shares no code with PyTorch's."""
    p = 1 / (1 + torch.exp(-outputs))
    return -(labels * p.log() + (1 - labels) * (1 - p).log()).mean()


LOSSES = {
    "cross_entropy": (lambda o, y: -o.log_softmax(1)[torch.arange(len(o)), y].mean(), 5),
    "bce one": (lambda o, y: bce(o[:, 0], y), 1),
    "bce five": (bce, 5),
    "mse": (lambda o, y: ((o - y) ** 2).mean(), 3),
    "l1": (lambda o, y: (o - y).abs().mean(), 3),
    "poisson": (lambda o, y: (o.exp() - y * o).mean(), 2),
}
"""By name: what the client trains on, written out, and the outputs."""


def labels(kind, count, outputs):
    if kind == "cross_entropy":
        return torch.randint(0, outputs, (count,))
    if kind == "poisson":
        return torch.randint(0, 9, (count, outputs)).float()
    if kind.startswith("bce"):
        return torch.randint(0, 2, (count, outputs) if outputs > 1 else (count,)).float()
    return torch.randn(count, outputs)


def mlp(outputs, width=64, depth=2, activation=nn.ReLU, inputs=SIZE):
    parts, before = [], inputs
    for _ in range(depth):
        parts += [nn.Linear(before, width), activation()]
        before = width
    return nn.Sequential(*parts, nn.Linear(before, outputs))


def trained(model, x, y, loss, steps=1, rate=RATE, optimizer=torch.optim.SGD, **settings):
    """Weights before and their change by plain PyTorch code."""
    before = {k: v.clone() for k, v in model.state_dict().items()}
    run = optimizer(model.parameters(), lr=rate, **settings)
    for _ in range(steps):
        run.zero_grad()
        loss(model(x), y).backward()
        run.step()
    change = {k: v - before[k] for k, v in model.state_dict().items()}
    model.load_state_dict(before)
    return before, change


def attacked(change, before, model, name, **told):
    found = attack_update(
        load(change, before, kind="delta"),
        model,
        input_shape=(SIZE,),
        attacks="linear_inversion",
        loss=name.split()[0],
        pictures=False,
        **told,
    )
    (record,), (inferred,), (answer,) = found.records, found.inferred, found.answers
    return record, inferred, answer


@pytest.mark.parametrize("trials", [4, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("name", LOSSES)
def test_one_record_is_exact_and_certified(name, steps, trials):
    torch.manual_seed(0)
    loss, outputs = LOSSES[name]
    exact, told, certified = 0, 0, 0
    rate = 0.01 if name == "poisson" else RATE  # larger ones do not train
    for _ in range(trials):
        model, x, y = mlp(outputs), torch.rand(1, SIZE), labels(name, 1, outputs)
        before, change = trained(
            model.double(),
            x.double(),
            y.double() if name != "cross_entropy" else y,
            loss,
            steps,
            rate,
        )
        model.float()
        before, change = ({k: v.float() for k, v in d.items()} for d in (before, change))
        record, inferred, answer = attacked(
            change, before, model, name, examples=1, learning_rate=rate, steps=steps
        )
        exact += bool((answer.inputs - x).abs().max() < 1e-5)
        certified += record.verdict == "exposed (certified)"
        found = inferred.labels
        told += (
            found is not None and found.shape == y.shape and bool((found - y).abs().max() < 1e-3)
        )
    assert (exact, certified) == (trials, trials)
    assert told == (0 if name == "l1" else trials)


def batch(seed):
    """A network, at least two records that differ, and how the client trains on them."""
    torch.manual_seed(seed)
    name = list(LOSSES)[seed % len(LOSSES)]
    outputs, count = LOSSES[name][1], int(torch.randint(2, 9, ()))
    width, kind = (
        [2, 3, 4, 8, 16, 64][torch.randint(6, ())],
        [nn.ReLU, nn.ReLU, nn.Identity, nn.Tanh],
    )
    model = mlp(outputs, width, 1 + seed % 2, kind[torch.randint(4, ())])
    with torch.no_grad():
        model[0].bias -= 0.6 * torch.rand(()) * (torch.rand(()) < 0.4)  # few active units
        model[-1].weight *= 0.01 ** float(torch.rand(()) < 0.3)  # nearly equal outputs
    x, y = torch.rand(count, SIZE), labels(name, count, outputs)
    change = int(torch.randint(3, ()))
    if change == 1:
        x[count // 2 :] = x[:1]  # duplicates in parts
    elif change == 2:
        x[1:] *= torch.rand(count - 1, 1) < 0.5  # rows of zeros
    if torch.rand(()) < 0.5:
        y = y[:1].expand(y.shape).clone()
    if name in ("mse", "l1") and torch.rand(()) < 0.3:
        y = 100 * y.abs()
    return name, model, x, y, [1, 1, 5][torch.randint(3, ())]


SHOWN = "the update does not show it"


@pytest.mark.parametrize("trials", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_mixture_of_records_is_certified(trials):
    """If a batch size of 1 is told, which is false, the sentence says that it is not shown."""
    rate, tried, proved, mixed = 0.01, 0, 0, 0
    for seed in range(trials):
        name, model, x, y, steps = batch(seed)
        before, change = trained(model, x, y, LOSSES[name][0], steps, rate)
        for told in ({"learning_rate": rate, "steps": steps}, {"examples": 1, "steps": steps}):
            try:
                record, _, answer = attacked(change, before, model, name, search=0, **told)
            except ValueError:  # the number of examples has to be given
                continue
            tried += 1
            if record.certificate is None:
                continue
            proved += 1
            if float((answer.inputs[0] - x).abs().amax(1).min()) > 1e-3:
                mixed += 1
                assert "examples" in told, seed
                assert SHOWN in record.certificate, seed
    assert tried > 1.5 * trials
    assert proved > trials / 20, "one record may be all that the update shows"
    assert mixed > trials / 50


@pytest.mark.parametrize("name", LOSSES)
def test_one_record_behind_many_units_is_certified_without_its_number(name):
    torch.manual_seed(1)
    loss, outputs = LOSSES[name]
    model, x, y = mlp(outputs), torch.rand(1, SIZE), labels(name, 1, outputs)
    before, change = trained(model, x, y, loss, rate=0.01)
    record, _, answer = attacked(change, before, model, name, learning_rate=0.01, steps=1)
    assert (
        "one example (likely, by the ranks; of nearly equal ones it is the mean),"
        in record.certificate
    )
    assert (answer.inputs - x).abs().max() < 1e-3
    straight = mlp(outputs, activation=nn.Identity)
    before, change = trained(straight, x, y, loss, rate=0.01)
    told = {"learning_rate": 0.01, "steps": 1}
    assert attacked(change, before, straight, name, **told)[0].certificate is None
    assert SHOWN in attacked(change, before, straight, name, examples=1, **told)[0].certificate


class Signs(torch.optim.SGD):
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data -= group["lr"] * weight.grad.sign() * weight.grad.abs().mean()


def two_rates(parameters, lr):
    weights = list(parameters)
    parts = [[w for w in weights if w.ndim > 1], [w for w in weights if w.ndim == 1]]
    return torch.optim.SGD(
        [{"params": p, "lr": r} for p, r in zip(parts, (lr, 2 * lr), strict=True)]
    )


OPTIMIZERS = {
    "adam": (torch.optim.Adam, {}),
    "adam eps": (torch.optim.Adam, {"eps": 1e-3}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "signs": (Signs, {}),
    "two rates": (two_rates, {}),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_other_rules_than_sgd_are_not_certified_without_a_replay(optimizer):
    rule, settings = OPTIMIZERS[optimizer]
    for seed, name in enumerate(["bce one", "mse", "l1", "poisson"]):
        torch.manual_seed(seed)
        loss, outputs = LOSSES[name]
        model, x, y = mlp(outputs, 16), torch.rand(1, SIZE), labels(name, 1, outputs)
        x = x.round() if seed % 2 else x
        for steps in (1, 5) if optimizer != "two rates" else (1,):
            before, change = trained(model, x, y, loss, steps, 1e-3, rule, **settings)
            for told in ({}, {"steps": steps}, {"steps": steps, "learning_rate": 1e-3}):
                record, _, _ = attacked(change, before, model, name, examples=1, search=0, **told)
                assert record.certificate is None, (name, steps, told)


def test_columns_that_neither_change_nor_count_are_not_certified():
    torch.manual_seed(0)
    model, x, y = mlp(1), torch.rand(1, SIZE), torch.ones(1)
    with torch.no_grad():
        model[0].weight[:, :3] = 0
    before, change = trained(model, x, y, LOSSES["bce one"][0])
    whole, _, _ = attacked(change, before, model, "bce one", examples=1)
    assert whole.verdict == "exposed (certified)"
    change["0.weight"][:, :3] = 0
    cut, _, answer = attacked(change, before, model, "bce one", examples=1)
    assert (answer.inputs[0, :3] == 0).all()
    assert cut.verdict == "undecided"


def test_labels_of_another_loss_are_not_called_certain():
    """Before, seven rules for cross-entropy agreed on label 0 of a network with one output."""
    torch.manual_seed(0)
    model, x, y = mlp(1), torch.rand(1, SIZE), torch.ones(1)
    before, change = trained(model, x, y, LOSSES["bce one"][0])
    record, inferred, _ = attacked(change, before, model, "bce one", examples=1)
    found = {f.name: f for f in inferred.findings}["labels"]
    assert (found.value, found.sure) == ("1", True)
    assert "rules agree" not in found.how
    assert not [note for note in inferred.notes if "cross-entropy" in note]
    assert record.model.loss == "bce"
    model, y = mlp(3), torch.randn(4, 3)
    before, change = trained(model, torch.rand(4, SIZE), y, LOSSES["mse"][0])
    _, inferred, _ = attacked(change, before, model, "mse", examples=4, steps=1, learning_rate=RATE)
    found = {f.name: f for f in inferred.findings}["labels"]
    assert found.value == "unknown"
    assert "only the sums of their labels are known (label_totals); give labels" in found.how
    assert inferred.labels is None


def test_given_labels_and_the_truth_may_be_numbers():
    torch.manual_seed(0)
    model, x, y = mlp(3), torch.rand(2, SIZE), torch.randn(2, 3)
    before, change = trained(model, x, y, LOSSES["mse"][0])
    truth = captured.run.Batch(x, y)
    record, inferred, _ = attacked(
        change, before, model, "mse", labels=y, steps=1, learning_rate=RATE, truth=truth
    )
    assert torch.equal(inferred.labels, y)
    assert record.batch_size == 2
    with pytest.raises(ValueError, match="labels run from -1 to 1, but the loss 'bce' takes"):
        attacked(change, before, model, "bce", labels=torch.tensor([[-1.0, 1, 0]]))
    with pytest.raises(ValueError, match="labels hold values of type"):
        attacked(change, before, model, "cross_entropy", labels=[0.5])
    with pytest.raises(ValueError, match="did you mean 'bce' or"):
        attacked(change, before, model, "bcee")


def test_the_command_line_takes_the_loss_of_an_update(tmp_path, capsys):
    torch.manual_seed(0)
    model, x, y = mlp(1, depth=1, width=128), torch.rand(1, SIZE), torch.ones(1)
    before, change = trained(model, x, y, LOSSES["bce one"][0])
    names = {"0.": "1.", "2.": "3."}  # as leakbound's own MLP, which flattens first
    paths = {}
    for part, held in (("before", before), ("update", change)):
        arrays = {names[k[:2]] + k[2:]: v.numpy() for k, v in held.items()}
        paths[part] = tmp_path / f"{part}.npz"
        numpy.savez(paths[part], **arrays)
    command = ["attack", "--update", str(paths["update"]), "--before", str(paths["before"])]
    command += ["--kind", "delta", "--input-shape", "1,4,5", "--classes", "1", "--batch-size", "1"]
    command += ["--model", "mlp", "--attack", "linear_inversion", "--loss", "bce"]
    for more, said in (
        ([], "labels: 1: the sign of the last"),
        (["--labels", "0.5"], "labels: 0.5"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*command, *more])
        assert ended.value.code == EXPOSED_CODE
        out = " ".join(capsys.readouterr().out.split())
        assert said in out
        assert "1 exposed (certified)" in out
