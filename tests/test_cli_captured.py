"""`leakbound attack --update` and `leakbound capture`, on files that plain PyTorch code wrote."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from leakbound import data
from leakbound.cli import main
from leakbound.cli.captured import EXPOSED_CODE

MODEL = """
from torch import nn


def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2), nn.Sigmoid(), nn.Flatten(), nn.Linear(8 * 144, 10)
    )
"""
QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"


def call(*arguments):
    """The exit code of `leakbound ARGUMENTS`, run here."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with the user's own module, which is forgotten afterwards."""
    (tmp_path / "own_model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("own_model", None)


def save(place, build="build", count=1, steps=1, rate=0.1):
    """Plain PyTorch: files before, after, gradient, delta and truth."""
    space = {}
    exec(compile(MODEL, "own_model", "exec"), space)  # the program itself has to find the file
    torch.manual_seed(0)
    model, digits = space[build](), data.load("mnist5k", limit=200)
    inputs, labels = digits.inputs[3 : 3 + count], digits.labels[3 : 3 + count]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    save_file(before, place / "before.safetensors")
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        if step == 0:
            gradient = {k: p.grad.clone() for k, p in model.named_parameters()}
        optimizer.step()
    after = model.state_dict()
    save_file(gradient, place / "gradient.safetensors")
    save_file(after, place / "after.safetensors")
    np.savez(place / "after.npz", *[v.numpy() for v in after.values()])
    np.savez(place / "delta.npz", **{k: (after[k] - before[k]).numpy() for k in after})
    np.savez(place / "truth.npz", inputs=inputs.numpy(), labels=labels.numpy())
    return inputs, labels


def given(update, *more, build="build"):
    """The usual arguments."""
    return (
        *("attack", "--update", update, "--before", "before.safetensors"),
        *("--model", f"own_model:{build}", "--input-shape", "1,28,28", *more),
    )


@pytest.mark.parametrize(
    ("update", "kind"),
    [
        ("after.safetensors", "auto"),
        ("after.npz", "weights"),
        ("delta.npz", "delta"),
        ("gradient.safetensors", "gradient"),
    ],
)
def test_one_local_step_on_one_image_is_rebuilt(update, kind, place, capsys):
    save(place)
    more = ("--kind", kind, "--truth", "truth.npz", "--attack", "linear_inversion", "--json")
    assert call(*given(update, *more)) == EXPOSED_CODE
    out, err = capsys.readouterr()
    (record,) = json.loads(out)
    assert record["metrics"]["psnr"][0] > 20
    assert record["verdict"] == "exposed"
    assert "importing Python code that --model names: own_model:build" in err


def test_what_is_shown_without_the_truth_claims_no_decibels(place, capsys):
    save(place)
    more = ("--attack", "linear_inversion", "robbing_the_fed", "--learning-rate", "0.1")
    assert call(*given("after.safetensors", *more, "--out", "run")) == EXPOSED_CODE
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "batch size: 1 (not certain)",
        "local steps: 1: training on the image",
        "labels: 3:",
        "99.99999%",
        "robbing_the_fed not applicable: the server is honest",
        "exposed (certified): after.safetensors by linear_inversion:",
        "verdict: 1 exposed (certified) (attacks: 1 exposed (certified), 1 not applicable)",
        "it is not a PSNR",
        "report: run/report.html",
    ):
        assert words in text
    assert (place / "run" / "report.html").exists()
    assert "PSNR dB" not in text
    assert "unknown" not in text


def test_several_images_and_told_labels(place, capsys):
    _, labels = save(place, count=3)
    words = ",".join(map(str, labels.tolist()))
    more = ("--labels", words, "--attack", "linear_inversion", "--truth", "truth.npz", "--json")
    assert call(*given("after.safetensors", *more)) == EXPOSED_CODE
    told = json.loads(capsys.readouterr().out)[0]
    more = ("--labels", "truth.npz", "--attack", "linear_inversion", "--truth", "truth.npz")
    assert call(*given("after.safetensors", *more, "--json")) == EXPOSED_CODE
    assert json.loads(capsys.readouterr().out)[0] == told
    assert told["batch_size"] == 3
    assert told["threat"]["labels_known"]


def test_a_built_in_model_and_a_declared_defense(place, capsys):
    from leakbound import models
    from leakbound.randomness import stream

    model = models.mlp(input_shape=(1, 28, 28), classes=10, generator=stream(0, "model", "mlp"))
    rows = {k: 0.01 * torch.ones_like(v) for k, v in model.state_dict().items()}
    save_file(rows, place / "u.safetensors")
    arguments = (
        *("attack", "--update", "u.safetensors", "--kind", "gradient", "--model", "mlp"),
        *("--input-shape", "1x28x28", "--batch-size", "2", "--attack", "linear_inversion"),
        *("--defense", "gaussian_noise,noise_std=0.01", "--json"),
    )
    assert call(*arguments) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["defense"]["name"] == "gaussian_noise"
    assert record["defense"]["parameters"] == {"noise_std": 0.01}
    assert record["release"]["law"] == "Gaussian"
    assert "public images" in record["bounds_note"]


BAD = {
    "pickle": (("u.pt",), "convert with safetensors.torch.save_file"),
    "identical": (("before.safetensors", "--kind", "weights"), "are identical"),
    "no shape": (("after.safetensors", "--input-shape", ""), "--input-shape 1,28,28"),
    "words": (("after.safetensors", "--input-shape", "a,b"), "--input-shape 1,28,28"),
    "other model": (("after.safetensors", "--model", "own_model:convolutions"), "not fit"),
    "labels": (("after.safetensors", "--labels", "12"), "the model has 10 classes"),
    "empty folder": (("empty",), "holds no captured update"),
    "two": (("after.safetensors", "--round", "1"), "leave round out"),
    "cell": (("after.safetensors", "--malicious-server"), "leave it out with --update"),
    "missing": (("nowhere.npz",), "does not exist"),
    "missing before all": (("nope.pt", "--classes", "0"), "update is 'nope.pt', which does not"),
    "missing folder": (("seen",), "update is 'seen', which does not exist; give a file, or a f"),
    "labels in words": (("after.safetensors", "--labels", "cat"), "give class numbers such as 3,5"),
    "no examples": (("after.safetensors", "--batch-size", "0"), "batch_size is 0; give a whole"),
    "many": (("after.safetensors", "--batch-size", "100000000"), "batch_size is 100000000; give"),
    "steps": (("after.safetensors", "--local-steps", "-1"), "local_steps is -1; give a whole"),
    "part": (("after.safetensors", "--local-batch-size", "0"), "local_batch_size is 0; give"),
    "classes": (("after.safetensors", "--classes", "0"), "classes is 0; give a whole number"),
    "truth": (
        ("after.safetensors", "--truth", "truth.npz", "--input-range", "0", "0.5"),
        "(--input-range LOW HIGH)",
    ),
    "kind": (("gradient.safetensors",), "give kind: gradient or delta"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_code_2(name, place, capsys):
    save(place)
    torch.save({"w": torch.ones(1)}, place / "u.pt")
    (place / "empty").mkdir()
    arguments, words = BAD[name]
    assert call(*given(*arguments)) == 2
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err
    assert len([line for line in err.splitlines() if line.startswith("leakbound:")]) == 1


def test_names_of_attacks_are_whole_on_a_narrow_screen(place, capsys, monkeypatch):
    save(place)
    monkeypatch.setattr("leakbound.cli.captured.console.width", 80)
    more = ("--attack", "linear_inversion", "inverting_gradients_large_steps,steps=1")
    for truth in ((), ("--truth", "truth.npz")):
        assert call(*given("after.safetensors", *more, *truth)) == EXPOSED_CODE
        assert "inverting_gradients_large_steps " in capsys.readouterr().out


def test_an_interrupt_keeps_what_is_finished(place, capsys, monkeypatch):
    save(place)

    def interrupted(self, observation, generator):
        raise KeyboardInterrupt

    monkeypatch.setattr("leakbound.attacks.GradientMatching.__call__", interrupted)
    more = ("--attack", "linear_inversion", "gradient_matching", "--out", "run")
    assert call(*given("after.safetensors", *more)) == 130
    (line,) = (place / "run" / "records.jsonl").read_text().splitlines()
    assert json.loads(line)["attack"]["name"] == "linear_inversion"
    assert "1 experiment of 2 is still missing" in (place / "run" / "report.html").read_text(
        "utf-8"
    )
    err = " ".join(capsys.readouterr().err.split())
    assert "stopped; the results so far are in run: leakbound report run writes their page" in err
    assert "the same command runs all attacks again" in err


@pytest.mark.parametrize("option", ["--before", "--truth", "--labels", "--local-steps"])
def test_options_of_updates_need_one(option, capsys):
    assert call("attack", option, "1") == 2
    assert "give --update FILE too" in capsys.readouterr().err


def test_a_missing_update_is_named_before_any_option_is_asked_for(capsys):
    assert call("attack", "--update", "nope.pt", "--seed", "1", "--batch-size", "0") == 2
    error = capsys.readouterr().err
    assert error.startswith("leakbound: update is 'nope.pt', which does not exist; give a file")
    assert error.count("\n") == 1


def test_a_simulated_cell_takes_one_attack(capsys):
    assert call("attack", "--attack", "dlg", "idlg") == 2
    assert "give one (several go with --update)" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["rounds", "=3", "a b=1"])
def test_a_run_config_that_is_no_pairs_is_refused(text, tmp_path, capsys):
    assert call("capture", QUICKSTART, "--out", tmp_path, "--run-config", text) == 2
    assert "write key=value" in capsys.readouterr().err


def test_a_run_config_is_read_as_toml():
    from leakbound.cli.captured import _run_config

    found = _run_config("a=1 b=0.5 c=true d=word e='x'")
    assert found == {"a": 1, "b": 0.5, "c": True, "d": "word", "e": "x"}


@pytest.mark.slow
def test_a_convolution_network_by_default_attacks(place, capsys):
    save(place, "convolutions")
    more = ("--truth", "truth.npz", "--json")
    assert call(*given("after.safetensors", *more, build="convolutions")) == EXPOSED_CODE
    records = json.loads(capsys.readouterr().out)
    assert max(r["metrics"]["psnr"][0] for r in records if r["status"] == "ok") > 20


@pytest.mark.slow
def test_a_flower_app_is_captured_and_attacked(tmp_path, monkeypatch, capsys):
    pytest.importorskip("flwr")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(QUICKSTART)
    known = set(sys.modules)
    few = ("--clients", 2, "--run-config", "images-per-client=1 batch-size=1")
    assert call("capture", ".", "--out", tmp_path / "seen", *few) == 0
    assert "leakbound attack --update" in capsys.readouterr().out
    arguments = (
        *("attack", "--update", tmp_path / "seen", "--model", "quickstart.task:Net"),
        *("--input-shape", "1,28,28", "--attack", "gradient_matching,steps=20", "--json"),
    )
    assert call(*arguments) == EXPOSED_CODE
    records = json.loads(capsys.readouterr().out)
    assert [record["capture"]["round"] for record in records] == ["1", "1"]
    assert all(record["batch_size"] == 1 for record in records)
    for name in set(sys.modules) - known:
        if name.split(".")[0] == "quickstart":
            del sys.modules[name]
