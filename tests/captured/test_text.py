"""Captured updates of language models, from Python and from the command line."""

import pytest
import torch
from safetensors.torch import save_file

import leakbound as lb
from leakbound import models
from leakbound.captured import load
from leakbound.cli import main
from leakbound.client import local_update
from leakbound.domains import TokenDomain
from leakbound.random import stream
from leakbound.types import LocalPlan, Task

V, N, RATE = 60, 8, 0.1


def attack(*words):
    with pytest.raises(SystemExit) as ended:
        main(["attack", *words])
    return ended.value.code


def build():
    return models.decoder(input_shape=(N,), classes=V, width=32, generator=stream(0, "text"))


def trained(tokens):
    """The weights before and after one step of SGD."""
    model = build()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    task = Task.of(model, domain=TokenDomain(V, N), loss="next_token", plan=LocalPlan(1, RATE))
    step = task.unflatten(RATE * local_update(task, tokens, tokens))
    return before, {k: v - step[k] for k, v in before.items()}


@pytest.fixture
def tokens():
    return torch.randint(V, (2, N), generator=torch.Generator().manual_seed(3))


def test_two_sequences_explain_the_update(tokens):
    before, after = trained(tokens)
    found = lb.attack_update(
        load(after, before, kind="weights"),
        build(),
        domain=TokenDomain(V, N),
        loss="next_token",
        attacks=["token_span"],
        examples=2,
        learning_rate=RATE,
        steps=1,
    )
    assert sorted(found.best.inputs.tolist()) == sorted(tokens.tolist())
    explained = found.records[0].capture.explained
    assert explained.share > 0.99999
    assert {f.name: f.value for f in found.records[0].capture.findings}["labels"] == "the tokens"


def test_from_the_command_line(tokens, tmp_path, monkeypatch, capsys):
    before, after = trained(tokens)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_text.py").write_text(
        "from leakbound import models, stream\n"
        f"build = lambda **_: models.decoder(input_shape=({N},), classes={V}, width=32, "
        "generator=stream(0, 'text'))\n"
    )
    save_file(before, "before.safetensors")
    save_file(after, "after.safetensors")
    save_file({"inputs": tokens, "labels": tokens.clone()}, "truth.safetensors")
    words = ["--update", "after.safetensors", "--before", "before.safetensors"]
    words += ["--model", "own_text:build", "--input-shape", str(N), "--vocabulary", str(V)]
    told = ["--batch-size", "2", "--learning-rate", str(RATE), "--local-steps", "1"]
    assert attack(*words, *told, "--truth", "truth.safetensors") == 0
    shown = capsys.readouterr().out
    assert "1 exposed" in shown
    assert "tokens right" in shown
    assert attack(*words, *told) == 0
    shown = capsys.readouterr().out
    assert "share of tokens" in shown
    assert "100.00000 %" in shown
    assert attack(*words) == 2  # the number of sequences
    assert "--batch-size" in capsys.readouterr().err
    assert attack(*words, *told, "--input-shape", "1,8") == 2
    assert "give their length" in capsys.readouterr().err


def test_floats_are_no_tokens(tokens, tmp_path):
    before, after = trained(tokens)
    with pytest.raises(ValueError, match="give inputs as whole numbers"):
        lb.attack_update(
            load(after, before, kind="weights"),
            build(),
            domain=TokenDomain(V, N),
            loss="next_token",
            examples=2,
            truth=lb.Batch(tokens.float(), tokens),
        )
