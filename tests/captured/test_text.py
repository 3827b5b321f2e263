"""Captured updates of language models, from Python and from the command line."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import leakbound as lb
from leakbound import models
from leakbound._util import memory
from leakbound.captured import load
from leakbound.captured.assess import public_examples
from leakbound.captured.observe import COPIES, task_of
from leakbound.cli import main
from leakbound.cli.captured import EXPOSED_CODE
from leakbound.client import local_update
from leakbound.core import LocalPlan, Task
from leakbound.domains import TokenDomain, of_shape
from leakbound.losses import next_labels
from leakbound.randomness import stream

from .flat import attack_update

V, N, RATE = 60, 8, 0.1


def attack(*words):
    with pytest.raises(SystemExit) as ended:
        main(["attack", *words])
    return ended.value.code


def build():
    return models.decoder(input_shape=(N,), classes=V, width=32, generator=stream(0, "text"))


def trained(tokens, padding=None):  # on either side: the side changes no gradient
    """The weights before and after one step of SGD."""
    model = build()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    domain = TokenDomain(V, N, padding)
    task = Task.of(model, domain=domain, loss="next_token", plan=LocalPlan(1, RATE))
    labels = tokens if padding is None else next_labels(tokens, padding)
    step = task.unflatten(RATE * local_update(task, tokens, labels))
    return before, {k: v - step[k] for k, v in before.items()}


@pytest.fixture
def tokens():
    return torch.randint(V, (2, N), generator=torch.Generator().manual_seed(3))


def test_two_sequences_explain_the_update(tokens):
    before, after = trained(tokens)
    found = attack_update(
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
    assert attack(*words, *told, "--truth", "truth.safetensors") == EXPOSED_CODE
    shown = capsys.readouterr().out
    assert "1 words exposed" in shown
    assert "words occur" in shown
    assert "tokens right" in shown
    assert attack(*words, *told) == EXPOSED_CODE
    shown = capsys.readouterr().out
    assert "share of tokens" in shown
    assert "100%" in shown
    assert attack(*words) == 2  # the number of sequences
    assert "--batch-size" in capsys.readouterr().err
    assert attack(*words, *told, "--input-shape", "1,8") == 2
    assert "give their length" in capsys.readouterr().err


def test_padding_is_told_on_the_command_line(tokens, tmp_path, monkeypatch, capsys):
    """Training scores no padding, so who takes it for text explains less."""
    tokens = tokens.clamp_min(1)
    tokens[1, 4:] = 0
    before, after = trained(tokens, 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_padded.py").write_text(
        "from leakbound import models, stream\n"
        f"build = lambda **_: models.decoder(input_shape=({N},), classes={V}, width=32, "
        "generator=stream(0, 'text'))\n"
    )
    save_file(before, "before.safetensors")
    save_file(after, "after.safetensors")
    words = [
        "--update",
        "after.safetensors",
        "--before",
        "before.safetensors",
        "--local-steps",
        "1",
    ]
    words += ["--model", "own_padded:build", "--input-shape", str(N), "--learning-rate", str(RATE)]
    words += ["--batch-size", "2", "--attack", "token_span"]
    attack(*words, "--vocabulary", str(V), "--padding", "0")
    assert "100%" in capsys.readouterr().out
    attack(*words, "--vocabulary", str(V))
    assert "100%" not in capsys.readouterr().out
    assert attack(*words, "--padding", "0") == 2
    assert "give --vocabulary or --tokenizer" in capsys.readouterr().err


def test_padding_before_sequences_on_the_command_line(tokens, tmp_path, monkeypatch, capsys):
    tokens = tokens[:1].clamp_min(1)
    tokens[0, :3] = 0
    before, after = trained(tokens, 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_behind.py").write_text(
        "from leakbound import models, stream\n"
        f"build = lambda **_: models.decoder(input_shape=({N},), classes={V}, width=32, "
        "generator=stream(0, 'text'))\n"
    )
    save_file(before, "before.safetensors")
    save_file(after, "after.safetensors")
    words = ["--update", "after.safetensors", "--before", "before.safetensors"]
    words += ["--model", "own_behind:build", "--input-shape", str(N), "--vocabulary", str(V)]
    words += ["--learning-rate", str(RATE), "--local-steps", "1", "--batch-size", "1"]
    words += ["--attack", "token_span"]
    attack(*words, "--padding", "0,left")
    assert "100%" in capsys.readouterr().out
    attack(*words, "--padding", "0")
    assert "100%" not in capsys.readouterr().out
    for wrong in ("left,0", "0,up", "-1"):
        assert attack(*words, f"--padding={wrong}") == 2
        assert "or 0,left if it stands before" in capsys.readouterr().err


def test_floats_are_no_tokens(tokens, tmp_path):
    before, after = trained(tokens)
    with pytest.raises(ValueError, match="give inputs as whole numbers"):
        attack_update(
            load(after, before, kind="weights"),
            build(),
            domain=TokenDomain(V, N),
            loss="next_token",
            examples=2,
            truth=lb.Batch(tokens.float(), tokens),
        )


def test_what_does_not_fit_into_memory_is_refused_before(tokens, monkeypatch):
    """With both numbers; with just enough, the attack begins."""
    model = nn.Linear(3, 2)
    update = load({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, kind="gradient")
    form = of_shape((3,))
    needed = COPIES * 8 * 4
    monkeypatch.setattr(memory, "free_bytes", lambda: needed - 1)
    with pytest.raises(ValueError, match=r"8 numbers.*GB of memory are free.*requires_grad_"):
        task_of(model, update, form)
    monkeypatch.setattr(memory, "free_bytes", lambda: needed)
    task_of(model, update, form)
    monkeypatch.setattr(memory, "free_bytes", lambda: None)  # another system
    task_of(model, update, form)


@pytest.mark.linux
def test_a_large_update_is_compared_tensor_by_tensor(tmp_path):
    """Deciding the kind of two files takes the memory of one tensor, not of all as doubles."""
    code = (
        "import resource, sys, torch; from safetensors.torch import save_file\n"
        "from leakbound import captured\n"
        "own = {f'{k}': torch.randn(1024, 1024).bfloat16() for k in range(64)}\n"
        "save_file(own, 'before.safetensors'); own['3'] = own['3'] + 0.01\n"
        "save_file(own, 'after.safetensors'); del own\n"
        "start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "kind = captured.load('after.safetensors', 'before.safetensors').kind\n"
        "print(kind, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    kind, grown = done.stdout.split()
    assert kind == "weights"
    assert int(grown) < 512 * 1024  # KiB; the two files are 256 MiB, all as doubles 1,024


def test_public_text_in_other_tokens_than_the_models_is_refused():
    """Its words have numbers of their own, so it says nothing of the model's."""
    own = lb.data.load("topics").domain
    assert public_examples("topics", TokenDomain(own.vocabulary, 16)).domain.words == own.words
    with pytest.raises(ValueError, match="in the model's own tokens"):
        public_examples("topics", TokenDomain(own.vocabulary + 1, 16))
