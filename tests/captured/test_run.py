"""Updates that plain PyTorch code wrote, and what comes out of them."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from leakbound import captured, data, models
from leakbound.assess.record import Assessment, Explained, decode
from leakbound.audit import run_file
from leakbound.captured import TrainingInfo, load
from leakbound.captured.assess import explained
from leakbound.core import Batch, Gaussian, Reconstruction
from leakbound.defenses import Clip, ClipExamples, GaussianMechanism, Mean, SecureAggregation, chain
from leakbound.randomness import stream

from .flat import attack_update

SHAPE = (1, 28, 28)
RATE = 0.1
LINEAR = ["linear_inversion"]


@pytest.fixture(scope="module")
def digits():
    return data.load("mnist5k", limit=200)


def mlp():
    return models.mlp(input_shape=SHAPE, classes=10, generator=stream(0, "captured"))


def convnet():
    return models.simple_convnet(input_shape=SHAPE, classes=10, generator=stream(0, "captured"))


def trained(model, batch, steps=1, size=None):
    """The state dicts before and after plain SGD."""
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    size = size or batch.size
    parts = list(zip(batch.inputs.split(size), batch.labels.split(size), strict=True))
    for step in range(steps):
        inputs, labels = parts[step % len(parts)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return before, {k: v.clone() for k, v in model.state_dict().items()}


def some(digits, count, first=0):
    return Batch(digits.inputs[first : first + count], digits.labels[first : first + count])


def named(outcome, at=0):
    return {f.name: f for f in outcome.inferred[at].findings}


def test_one_step_on_one_image_gives_the_image_away_with_a_certificate(digits):
    batch = some(digits, 1)
    before, after = trained(mlp(), batch)
    found = attack_update(after, mlp(), before=before, input_shape=SHAPE, attacks=LINEAR)
    (record,), found_at = found.records, named(found)
    assert record.metrics == {}
    assert record.verdict == "exposed (certified)"
    assert record.capture.explained.direction > 1 - 1e-6
    assert record.capture.explained.scale == pytest.approx(RATE, rel=1e-3)
    assert "outer product" in record.certificate
    assert (found_at["batch size"].value, found_at["batch size"].sure) == ("1", False)
    assert (found_at["labels"].value, found_at["labels"].sure) == (str(int(batch.labels)), True)
    assert torch.allclose(found.best.inputs, batch.inputs, atol=1e-4)


@pytest.mark.parametrize("kind", ["gradient", "delta", "weights"])
def test_every_kind_is_the_same_observation(kind, digits):
    batch = some(digits, 2)
    before, after = trained(mlp(), batch)
    delta = {k: after[k] - before[k] for k in before}
    gradient = {k: -v / RATE for k, v in delta.items()}
    update = {"gradient": gradient, "delta": delta, "weights": after}[kind]
    from leakbound.client import gradient as of
    from leakbound.core import Task

    model = mlp()
    model.load_state_dict(before)
    task = Task.of(model)
    seen = captured.observe(
        load(update, before, kind=kind),
        task,
        input_shape=SHAPE,
        training=captured.TrainingInfo(learning_rate=RATE),
    )
    true = of(task, batch.inputs, batch.labels)
    assert torch.allclose(seen.update.rows[0], true, atol=1e-5)
    assert seen.cohort == (2,)
    assert (seen.sent is not None) == (kind == "weights")


def test_the_truth_makes_it_a_measured_record(digits):
    batch = some(digits, 1)
    before, after = trained(mlp(), batch)
    found = attack_update(
        after, mlp(), before=before, input_shape=SHAPE, attacks=LINEAR, truth=batch
    )
    assert found.records[0].metrics["psnr"][0] > 60
    assert found.records[0].verdict == "exposed"


@pytest.mark.parametrize("truth", ["{}.npz", "npz:{}.npz"])
@pytest.mark.parametrize("public", ["{}.npz", "npz:{}.npz"])
def test_truth_and_public_take_the_same_forms(truth, public, digits, tmp_path):
    batch = some(digits, 1)
    before, after = trained(mlp(), batch)
    for name, own in (("t", batch), ("p", some(digits, 120))):
        np.savez(tmp_path / f"{name}.npz", inputs=own.inputs.numpy(), labels=own.labels.numpy())
    found = attack_update(
        after,
        mlp(),
        before=before,
        input_shape=SHAPE,
        attacks=LINEAR,
        truth=truth.format(tmp_path / "t"),
        public=public.format(tmp_path / "p"),
    )
    assert found.records[0].metrics["psnr"][0] > 60


@pytest.mark.parametrize("steps", [1, 3, 12])
def test_local_steps_on_one_image_are_counted_by_replaying_them(steps, digits):
    before, after = trained(mlp(), some(digits, 1), steps)
    found = attack_update(
        after, mlp(), before=before, input_shape=SHAPE, attacks=LINEAR, learning_rate=RATE
    )
    told = named(found)["local steps"]
    assert (told.value, told.sure) == (str(steps), True)
    assert found.records[0].capture.explained.share > 1 - 1e-6


def test_a_wrong_rate_does_not_pass_for_a_replay(digits):
    before, after = trained(mlp(), some(digits, 1), 3)
    found = attack_update(
        after, mlp(), before=before, input_shape=SHAPE, attacks=LINEAR, learning_rate=RATE * 1.5
    )
    assert not named(found)["local steps"].sure


@pytest.mark.parametrize("count", [1, 2, 4, 32])
def test_the_rank_of_the_first_layer_counts_the_examples(count, digits):
    before, after = trained(mlp(), some(digits, count))
    found = attack_update(after, mlp(), before=before, input_shape=SHAPE, attacks=LINEAR)
    assert named(found)["batch size"].value == str(count)


def test_several_steps_do_not_pass_for_several_examples(digits):
    before, after = trained(mlp(), some(digits, 2), steps=4)
    found = attack_update(after, mlp(), before=before, input_shape=SHAPE, attacks=LINEAR)
    assert named(found)["batch size"].value == "2"


def test_where_the_batch_size_cannot_be_told_it_is_asked_for(digits):
    before, after = trained(convnet(), some(digits, 2), steps=2)
    with pytest.raises(ValueError, match=r"batch size times local steps at least .*--batch-size"):
        attack_update(after, convnet(), before=before, input_shape=SHAPE)


def test_the_labels_of_a_batch_are_certain_where_the_bias_is_negative(digits):
    batch = some(digits, 4)
    before, after = trained(mlp(), batch)
    found = attack_update(after, mlp(), before=before, input_shape=SHAPE, attacks=LINEAR)
    words = ", ".join(map(str, sorted(batch.labels.tolist())))
    assert named(found)["labels"].value == words
    assert f"classes {words} for certain" in named(found)["labels"].how


def test_told_labels_go_to_the_attacker(digits):
    batch = some(digits, 2)
    before, after = trained(mlp(), batch)
    found = attack_update(
        after, mlp(), before=before, input_shape=SHAPE, attacks=LINEAR, labels=batch.labels
    )
    assert found.inferred[0].observation.threat.labels_known
    assert torch.equal(found.inferred[0].observation.labels, batch.labels)


def test_what_a_guess_explains_is_the_energy_that_its_own_update_gives_again(digits):
    batch = some(digits, 1)
    before, after = trained(mlp(), batch)
    found = attack_update(
        after, mlp(), before=before, input_shape=SHAPE, attacks=LINEAR, learning_rate=RATE
    )
    known = found.inferred[0]
    right = explained(known, Reconstruction(batch.inputs, batch.labels))
    wrong = explained(known, Reconstruction(1 - batch.inputs, batch.labels))
    assert isinstance(right, Explained)
    assert right.share > 1 - 1e-6 > 0.9 > wrong.direction
    assert right.scale == pytest.approx(1, abs=1e-4)
    assert explained(known, Reconstruction(batch.inputs)).share == pytest.approx(right.share)


def test_an_attack_that_does_not_apply_says_why(digits):
    before, after = trained(convnet(), some(digits, 1))
    found = attack_update(
        after, convnet(), before=before, input_shape=SHAPE, attacks=[*LINEAR, "robbing_the_fed"]
    )
    assert [r.status for r in found.records] == ["not_applicable"] * 2
    assert "no linear layer" in found.records[0].reason
    assert "the server is honest" in found.records[1].reason
    assert found.best is None


@pytest.mark.parametrize(("noise", "known"), [(1e-3, True), (1.0, False)], ids=["weak", "strong"])
def test_declared_noise_gives_law_bounds_and_an_honest_share(noise, known, digits):
    batch = some(digits, 1)
    before = {k: v.clone() for k, v in mlp().state_dict().items()}
    model = mlp()
    nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
    rows = {k: p.grad for k, p in model.named_parameters()}
    norm = float(torch.cat([v.flatten() for v in rows.values()]).norm())
    torch.manual_seed(0)
    sent = {k: v / max(1, norm) + noise * torch.randn_like(v) for k, v in rows.items()}
    found = attack_update(
        sent,
        mlp(),
        before=before,
        kind="gradient",
        input_shape=SHAPE,
        examples=1,
        defense=chain(ClipExamples(1.0), Mean(), GaussianMechanism(noise)),
        public="mnist5k",
        attacks=LINEAR,
    )
    (record,) = found.records
    seen = found.inferred[0].observation
    assert isinstance(seen.update.law, Gaussian)
    assert seen.update.law.covariance == pytest.approx(noise**2)
    names = [bound.name for bound in record.bounds]
    counted = [] if known else ["count of public examples"]  # under weak noise it says nothing
    assert names == ["tight_trace", *counted, "probability", "probability under a model"]
    assert record.defense.guarantee == "differential privacy"
    assert (record.release.law, record.release.unit) == ("Gaussian", "client")
    share = record.capture.explained.share
    assert share == pytest.approx(1 - record.release.noise_share, abs=0.02) or not known
    assert known or share < 0.1
    assert record.certificate is None


def test_under_a_declared_defense_nothing_is_certified(digits):
    before, after = trained(mlp(), some(digits, 1))
    found = attack_update(
        after, mlp(), before=before, input_shape=SHAPE, attacks=LINEAR, examples=1,
        defense=Clip(1e6),
    )  # fmt: skip
    assert found.records[0].status == "ok"
    assert found.records[0].certificate is None


def test_a_defense_of_several_clients_is_refused(digits):
    before, after = trained(mlp(), some(digits, 1))
    with pytest.raises(ValueError, match="a captured update is one client's"):
        attack_update(
            after, mlp(), before=before, input_shape=SHAPE, examples=1, defense=SecureAggregation(3)
        )


def test_dropout_is_switched_off_and_said_so(digits):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 20), nn.Dropout(0.5), nn.Linear(20, 10))

    before, after = trained(build().eval(), some(digits, 1))
    found = attack_update(after, build(), before=before, input_shape=SHAPE, attacks=LINEAR)
    assert any("dropout" in note for note in found.records[0].capture.notes)
    assert found.records[0].capture.explained.direction > 0.999


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_batch_norm_stays_in_its_mode_at_the_captured_statistics(training, digits):
    def build():
        torch.manual_seed(0)
        parts = nn.Flatten(), nn.Linear(784, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 10)
        return nn.Sequential(*parts).train(training)

    own = build()
    with torch.no_grad():
        own[2].running_mean += 0.3
    batch = some(digits, 3)
    before, after = trained(own, batch)
    found = attack_update(
        after, build(), before=before, input_shape=SHAPE, learning_rate=RATE, steps=1,
        attacks=LINEAR, labels=batch.labels,
    )  # fmt: skip
    notes = " ".join(found.records[0].capture.notes)
    assert ("examples of a batch affect each other" in notes) == training
    right = explained(found.inferred[0], Reconstruction(batch.inputs, batch.labels))
    assert right.share > 1 - 1e-5


BAD = {
    "other model": ({"update": convnet}, "update does not fit the model: 1.weight"),
    "other before": ({"before": convnet}, "before does not fit the model"),
    "shape": ({"input_shape": (3, 32, 32)}, r"input_shape is \(3, 32, 32\), and the model cannot"),
    "no shape": ({"input_shape": ()}, "input_shape is empty"),
    "labels": ({"labels": [11]}, r"labels run from 11 to 11, but the model has 10 classes"),
    "two labels": ({"labels": [1, 2], "examples": 1}, "labels holds 2 for 1 examples"),
    "float labels": ({"labels": torch.ones(1)}, "labels hold values of type torch.float32"),
    "classes": ({"classes": 11}, "classes is 11, but the model has 10 outputs"),
    "examples": ({"examples": 0}, "examples is 0"),
    "rate": ({"learning_rate": -1.0}, "learning_rate is -1.0"),
    "attack": ({"attacks": ["dgl"]}, "did you mean 'dlg'"),
    "range": ({"input_range": (1.0, 0.0)}, "input_range is"),
    "public": ({"public": "adult"}, "public|data"),
    "defense by name": ({"defense": "gaussian_noise"}, r"defense is 'gaussian_noise', a str; give"),
    "truth alone": ({"truth": torch.zeros(1, 1, 28, 28)}, r"truth is a Tensor; give .*Batch"),
    "one number": ({"input_shape": 784}, r"input_shape is 784; give .* such as \(1, 28, 28\)"),
    "gradient": ({"kind": "gradient", "steps": 3}, "a gradient is that of one step"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_line(name, digits):
    before, after = trained(mlp(), some(digits, 1))
    changes, words = dict(BAD[name][0]), BAD[name][1]
    given = {"update": after, "before": before, "input_shape": SHAPE, "attacks": LINEAR, **changes}
    for key in ("update", "before"):
        if callable(given[key]):
            given[key] = dict(given[key]().state_dict())
    given.setdefault("kind", "weights")
    with pytest.raises(ValueError, match=words):
        attack_update(given.pop("update"), mlp(), **given)


@pytest.mark.parametrize(
    ("inputs", "labels", "words"),
    [
        (torch.zeros(2, 1, 28, 28), torch.zeros(2).long(), "truth holds 2 inputs"),
        (torch.zeros(1, 1, 8, 8), torch.zeros(1).long(), r"shape \(1, 8, 8\)"),
        (torch.full((1, 1, 28, 28), 2.0), torch.zeros(1).long(), "--input-range LOW HIGH"),
        (torch.zeros(1, 1, 28, 28), torch.full((1,), 10), "the model has 10 classes"),
    ],
    ids=["count", "shape", "range", "label"],
)
def test_a_truth_that_does_not_fit_is_refused(inputs, labels, words, digits):
    before, after = trained(mlp(), some(digits, 1))
    with pytest.raises(ValueError, match=words):
        attack_update(after, mlp(), before=before, input_shape=SHAPE, truth=Batch(inputs, labels))


def test_the_folder_holds_records_that_a_report_reads_with_and_without_truth(digits, tmp_path):
    batch = some(digits, 1)
    before, after = trained(mlp(), batch)
    for truth in (None, batch):
        out = tmp_path / ("told" if truth else "untold")
        found = attack_update(
            after, mlp(), before=before, input_shape=SHAPE, out=out, truth=truth, name="<b>my</b>",
            attacks=[*LINEAR, "robbing_the_fed"],
        )  # fmt: skip
        page = found.page.read_text(encoding="utf-8")
        lines = (out / "records.jsonl").read_text().splitlines()
        assert [decode(line.encode(), Assessment) for line in lines] == list(found.records)
        about = json.loads((out / "run.json").read_text())
        assert about["machine"] == run_file.machine()
        assert "Captured update</h2>" in page
        assert "100\N{NO-BREAK SPACE}%" in page
        assert ("The truth was not given" in page) == (truth is None)
        assert "<b>my</b>" not in page
        assert "0 of 1" not in page if truth is None else "1 of 1" in page
        assert "This report holds pictures of your private data" in page


def test_without_pictures_none_is_written(digits, tmp_path):
    before, after = trained(mlp(), some(digits, 1))
    found = attack_update(
        after, mlp(), before=before, input_shape=SHAPE, out=tmp_path / "r", attacks=LINEAR,
        pictures=False,
    )  # fmt: skip
    assert not list((tmp_path / "r" / "pictures").iterdir())
    assert "<img" not in found.page.read_text(encoding="utf-8")


def test_a_folder_of_other_files_is_left_alone(digits, tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    before, after = trained(mlp(), some(digits, 1))
    with pytest.raises(ValueError, match="holds other files"):
        attack_update(after, mlp(), before=before, input_shape=SHAPE, out=tmp_path, attacks=LINEAR)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_same_capture_gives_the_same_records(digits):
    before, after = trained(mlp(), some(digits, 2))
    a, b = (
        attack_update(
            after, mlp(), before=before, input_shape=SHAPE,
            attacks=[*LINEAR, "gradient_matching"], learning_rate=RATE, steps=1,
        ).records
        for _ in range(2)
    )  # fmt: skip
    assert a == b


def test_told_refuses_counts_that_are_none():
    with pytest.raises(ValueError, match="steps is 0"):
        TrainingInfo(steps=0)


@pytest.mark.slow
def test_a_convolution_network_gives_one_image_away_above_20_decibels(digits):
    batch = some(digits, 1, first=7)
    before, after = trained(convnet(), batch)
    found = attack_update(after, convnet(), before=before, input_shape=SHAPE, truth=batch)
    best = max(r.metrics["psnr"][0] for r in found.records if r.status == "ok")
    assert best > 20


@pytest.mark.slow
def test_one_epoch_of_minibatches_gives_some_images_away_and_not_all(digits):
    batch = some(digits, 32)
    before, after = trained(mlp(), batch, steps=4, size=8)
    found = attack_update(
        after, mlp(), before=before, input_shape=SHAPE, truth=batch, learning_rate=RATE,
        examples=32, batch_size=8, attacks=["linear_inversion", "fed_avg_matching"],
    )  # fmt: skip
    assert named(found)["local steps"].value == "4"
    values = found.records[0].metrics["psnr"]
    assert 1 <= sum(v >= 20 for v in values) < 32


def test_noise_that_a_strangers_file_declares_and_did_not_add_hides_nothing(digits, tmp_path):
    batch = some(digits, 1)
    model = mlp()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
    rows = {k: p.grad for k, p in model.named_parameters()}
    links = [
        {"name": "clip_examples", "clip_norm": 1.0},
        {"name": "mean"},
        {"name": "gaussian_mechanism", "noise_multiplier": 5.0},
    ]
    about = {"round": 1, "client": 1, "kind": "gradient", "defense": json.dumps(links)}
    path = captured.write(tmp_path, before, rows, about)
    asked = {"input_shape": SHAPE, "attacks": LINEAR, "examples": 1}
    (record,) = attack_update(path, mlp(), **asked).records
    assert record.verdict == "exposed (certified)"
    assert any("the metadata's defense is left out" in note for note in record.capture.notes)
    own = chain(ClipExamples(1.0), Mean(), GaussianMechanism(5.0))  # a user's word is not replaced
    (record,) = attack_update(path, mlp(), **asked, defense=own).records
    assert record.verdict == "undecided"
