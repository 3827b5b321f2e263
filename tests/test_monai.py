"""MONAI's U-Net and losses of masks on volumes, as its users have them."""

import sys

import numpy as np
import pytest
import torch

from leakbound import Batch, run_audit
from leakbound.audit import parse
from leakbound.cli import main
from leakbound.client import example_gradients, fitted, gradient
from leakbound.core import Task
from leakbound.data import load
from leakbound.report.folder import read

from .captured.flat import attack_update

pytest.importorskip("monai")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # MONAI's own, and those of its in-place calls
]
CODE = """
import numpy as np
import torch
from monai.networks.nets import UNet


def unet(outputs=2):
    torch.manual_seed(0)
    return UNet(3, 1, outputs, (8, 16, 32), (2, 2), num_res_units=1)


def densenet():
    from monai.networks.nets import DenseNet

    torch.manual_seed(0)
    return DenseNet(2, 1, 2, init_features=8, growth_rate=4, block_config=(2, 2)).eval()


def scans(count=120):
    '''Disks of two sizes, as dictionaries of MetaTensors.'''
    from monai.data import Dataset
    from monai.transforms import Compose, EnsureChannelFirstd, EnsureTyped, ScaleIntensityd

    draws = np.random.default_rng(2)
    y, x = np.mgrid[-1:1:16j, -1:1:16j]
    items = []
    for at in range(count):
        a, b = draws.uniform(-0.4, 0.4, 2)
        disk = np.hypot(x - a, y - b) < 0.3 + 0.3 * (at % 2)
        image = 900 * disk + 200 * np.sin(3 * x + at) + draws.normal(0, 20, x.shape)
        items.append({"image": image.astype(np.float32), "label": at % 2})
    first = EnsureChannelFirstd("image", channel_dim="no_channel")
    return Dataset(items, Compose([first, ScaleIntensityd("image"), EnsureTyped("image")]))


class Bodies(torch.utils.data.Dataset):
    '''Volumes with masks, which keep their channel.'''

    def __init__(self, file):
        from monai.data import MetaTensor

        with np.load(file) as held:
            self.items = [(MetaTensor(i), MetaTensor(m)) for i, m in zip(held["x"], held["y"])]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, at):
        image, mask = self.items[at]
        return {"image": image, "label": mask.float()}
"""
own = {}


def unet(outputs=2):
    exec(CODE, own)
    return own["unet"](outputs)


def volumes(count, size):
    """Bodies with a bright ball in each, and its mask."""
    draws = torch.Generator().manual_seed(1)
    z, y, x = torch.meshgrid(*[torch.linspace(-1, 1, size)] * 3, indexing="ij")
    body = ((z / 0.9) ** 2 + (y / 0.8) ** 2 + (x / 0.7) ** 2 < 1).float()
    images, masks = [], []
    for _ in range(count):
        a, b, c = (torch.rand(3, generator=draws) * 0.6 - 0.3).tolist()
        ball = (z - a) ** 2 + (y - b) ** 2 + (x - c) ** 2 < 0.09
        image = 0.2 + 0.4 * body + 0.3 * ball + 0.1 * torch.sin(6 * x + 3 * y)
        images.append(image.clamp(0, 1))
        masks.append(ball.long())
    return torch.stack(images)[:, None], torch.stack(masks)[:, None]


def step(model, loss, images, masks, rate=0.1):
    """The weights before and after one step of SGD."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    slopes = torch.autograd.grad(loss(model(images), masks), list(model.parameters()))
    after = {
        name: value.detach() - rate * slope
        for (name, value), slope in zip(model.named_parameters(), slopes, strict=True)
    }
    return before, after


def losses():
    from monai.losses import DiceCELoss, DiceLoss, FocalLoss, TverskyLoss

    softmax = {"to_onehot_y": True, "softmax": True}
    return {
        "DiceCE": (DiceCELoss(**softmax), 2),
        "Dice": (DiceLoss(**softmax), 2),
        "Tversky": (TverskyLoss(**softmax), 2),
        "Focal": (FocalLoss(to_onehot_y=True, use_softmax=True), 2),
        "DiceCE of one output": (DiceCELoss(sigmoid=True), 1),
        "Dice of one output": (DiceLoss(sigmoid=True), 1),
        "Focal of one output": (FocalLoss(), 1),
    }


@pytest.mark.parametrize(
    "name",
    [
        *("DiceCE", "Dice", "Tversky", "Focal"),
        *("DiceCE of one output", "Dice of one output", "Focal of one output"),
    ],
)
def test_masks_are_taken_searched_and_true(name):
    loss, outputs = losses()[name]
    model, (images, masks) = unet(outputs), volumes(2, 8)
    masks = masks if outputs > 1 else masks.float()
    task, _ = fitted(Task.of(model, loss=loss), images)
    assert task.loss.targets == ("class map" if outputs > 1 else "mask")
    true = torch.autograd.grad(loss(model(images), masks), list(model.parameters()))
    flat = torch.cat([part.flatten() for part in true])
    torch.testing.assert_close(gradient(task, images, masks), flat)
    each = example_gradients(task, images, masks)
    one = torch.autograd.grad(loss(model(images[1:]), masks[1:]), list(model.parameters()))
    torch.testing.assert_close(each[1], torch.cat([part.flatten() for part in one]))
    image, mask = images[:1], masks[:1]
    before, after = step(model, loss, image, mask)
    given = {"before": before, "kind": "weights", "examples": 1, "steps": 1, "loss": loss}
    given |= {"learning_rate": 0.1, "input_shape": (1, 8, 8, 8), "truth": Batch(image, mask)}
    for labels in (mask, None):
        attacks = ["linear_inversion", "inverting_gradients,steps=30", "dlg,steps=2"]
        found = attack_update(after, model, labels=labels, attacks=attacks, **given)
        linear, matching, joint = found.records
        assert (linear.status, matching.status, joint.status) == ("not_applicable", "ok", "ok")
        assert matching.capture.explained.direction > 0
        assert matching.scores


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "own_monai.py").write_text(CODE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("own_monai", None)


LOSS = "monai.losses:DiceCELoss,to_onehot_y=true,softmax=true"


def test_a_volume_is_found_above_the_baseline(place, capsys):
    loss, _ = losses()["DiceCE"]
    images, masks = volumes(1, 32)
    before, after = step(unet(), loss, images, masks)
    for file, named in (("after", after), ("before", before)):
        np.savez(f"{file}.npz", **{key: value.numpy() for key, value in named.items()})
    np.savez("truth.npz", inputs=images.numpy(), labels=masks.numpy().astype(np.uint8))
    words = "attack --update after.npz --before before.npz --kind weights --batch-size 1"
    words += " --model own_monai:unet --input-shape 1,32,32,32 --local-steps 1 --learning-rate 0.1"
    words += " --labels truth.npz --truth truth.npz --out report"
    words += " --attack inverting_gradients,total_variation=0.01"
    with pytest.raises(SystemExit) as caught:
        main([*words.split(), "--loss", LOSS])
    assert caught.value.code == 0
    (record,) = read(place / "report").assessments
    assert record.scores[0] > record.baseline[0] + 6
    assert record.verdict == "undecided"
    assert "middle slices" in (place / "report" / "report.html").read_text()
    assert "undecided" in capsys.readouterr().out


def test_audit_and_bound_of_volumes_with_masks(place, capsys):
    images, masks = volumes(60, 8)
    np.savez("volumes.npz", inputs=images.numpy(), labels=masks.numpy().astype(np.uint8))
    attacks = [{"name": "inverting_gradients", "steps": 5}]
    defenses = [{"name": "none"}, {"name": "dp_sgd", "noise_multiplier": 5.0}]
    plan = {"data": {"source": "npz:volumes.npz", "loss": LOSS}, "attacks": attacks, "seeds": [0]}
    plan |= {"models": [{"name": "own_monai:unet"}], "defenses": defenses}
    records = run_audit(parse(plan)).assessments
    assert [record.status for record in records] == ["ok", "ok"]
    assert {record.data.domain for record in records} == {"volumes"}
    assert {record.model.loss for record in records} == {LOSS}
    assert any(record.bounds for record in records)
    with pytest.raises(SystemExit) as caught:
        main(["bound", "--data", "npz:volumes.npz", "--noise-multiplier", "5"])
    assert caught.value.code == 0
    assert "no attacker exceeds it" in capsys.readouterr().out


def ended(words):
    with pytest.raises(SystemExit) as caught:
        main(words)
    return caught.value.code


def test_a_classifier_and_its_data_set_go_through_every_command(place, capsys):
    """DenseNet on a data set of MONAI: audit, bound, calibrate, attack with public data."""
    data = load("own_monai:scans")
    assert data.inputs.shape == (120, 1, 16, 16)
    assert (float(data.inputs.min()), float(data.inputs.max())) == (0.0, 1.0)
    assert type(data.inputs) is torch.Tensor
    attacks = [{"name": "inverting_gradients", "steps": 150}]
    defenses = [{"name": "none"}, {"name": "dp_sgd", "noise_multiplier": 5.0}]
    plan = {"data": {"source": "own_monai:scans"}, "attacks": attacks, "seeds": [0]}
    plan |= {"models": [{"name": "own_monai:densenet"}], "defenses": defenses}
    records = run_audit(parse(plan)).assessments
    assert [record.status for record in records] == ["ok", "ok"]
    plain, defended = records
    # A short search, which ends below the mean image: nothing may be claimed.
    assert (plain.verdict, plain.bounds) == ("undecided", ())
    assert defended.bounds
    noisy = ["--data", "own_monai:scans", "--noise-multiplier", "5"]
    assert ended(["bound", *noisy]) == 0
    assert "no attacker exceeds it" in capsys.readouterr().out
    target = "psnr>=25 with probability<=0.2"
    assert ended(["calibrate", "--target", target, "--data", "own_monai:scans"]) == 0

    exec(CODE, own)
    model = own["densenet"]()
    image, label = data.inputs[:1], data.labels[:1]
    before, after = step(model, torch.nn.functional.cross_entropy, image, label)
    for file, named in (("after", after), ("before", before)):
        np.savez(f"{file}.npz", **{key: value.numpy() for key, value in named.items()})
    words = "attack --update after.npz --before before.npz --kind weights --batch-size 1"
    words += " --model own_monai:densenet --input-shape 1,16,16 --local-steps 1"
    words += " --learning-rate 0.1 --public own_monai:scans --time 60 --out report"
    words += " --attack inverting_gradients,steps=150"
    assert ended(words.split()) in (0, 3)
    (record,) = read(place / "report").assessments
    assert record.status == "ok"
    assert record.capture.explained.direction > 0.5


def test_volumes_of_a_data_set_with_masks(place, capsys):
    images, masks = volumes(60, 8)
    np.savez("bodies.npz", x=images.numpy(), y=masks.numpy())
    source = "own_monai:Bodies,file=bodies.npz"
    data = load(source)
    assert torch.equal(data.inputs, images)
    assert torch.equal(data.labels, masks[:, 0])
    attacks = [{"name": "inverting_gradients", "steps": 5}]
    plan = {"data": {"source": source, "loss": LOSS}, "attacks": attacks, "seeds": [0]}
    plan |= {"models": [{"name": "own_monai:unet"}], "defenses": [{"name": "none"}]}
    (record,) = run_audit(parse(plan)).assessments
    assert (record.status, record.data.domain) == ("ok", "volumes")
    assert ended(["bound", "--data", source, "--noise-multiplier", "5"]) == 0
