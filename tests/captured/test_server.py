"""What a malicious server gets from such a training: simulated, beside the update, not from it."""

import re
from dataclasses import replace

import torch
from torch import nn

from leakbound import data
from leakbound.attacks import RobbingTheFed
from leakbound.captured import run, server
from leakbound.core import Batch
from leakbound.defenses import GaussianNoise, chain
from leakbound.randomness import stream, uniform

from .flat import attack_update

SHAPE = (1, 8, 8)
UNIT = {"input_shape": SHAPE, "kind": "weights", "attacks": "inverting_gradients,steps=2"}
COUNT = re.compile(r"reconstructs (\d+) of (\d+) public examples .* from (\d+) other updates")


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(6 * 64, 10)
    )


def attacked(count=4, steps=5, model=None, **given):
    """The outcome for AdamW on uniform noise, which no public digit looks like."""
    model = model or net()
    batch = Batch(uniform((count, *SHAPE), stream(0, "inputs")), torch.arange(count))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    rule = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        rule.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
        rule.step()
    known = {"optimizer": "adamw", "learning_rate": 1e-3, "steps": steps, "examples": count}
    return attack_update(
        dict(model.state_dict()), model, before=before, **{**UNIT, **known, **given}
    )


def said(outcome):
    return outcome.records[0].capture


def test_it_is_simulated_with_the_user_s_plan_and_changes_no_verdict():
    outcome = attacked(public="digits")
    right, total, updates = map(int, COUNT.search(said(outcome).server).groups())
    assert total == 4 * updates
    assert right > 0.7 * total
    assert "updates of 4 examples, simulated in float32 with 5 steps of AdamW." in (
        said(outcome).server
    )
    assert said(outcome).server.endswith("This update shows nothing of such a server.")
    assert outcome.verdict.startswith("undecided")
    # One sentence of such a server is enough.
    assert "malicious server" not in said(outcome).measured


def test_minibatches_are_named():
    outcome = attacked(count=8, steps=2, batch_size=4, public="digits")
    assert "of 8 examples, simulated" in said(outcome).server
    assert "2 steps of AdamW on 4 of them at a time." in said(outcome).server


def test_without_public_examples_the_table_says_it():
    capture = said(attacked())
    assert capture.server is None
    assert "malicious server that sends its own layer first reconstructed" in capture.measured
    assert "this update shows nothing of such a server" in capture.measured


def test_what_cannot_be_simulated_is_left_out():
    digits = data.load("digits")
    public = digits.batch(torch.arange(40))
    found = attacked(public="digits").inferred[0]
    halves = public, public
    criterion = None  # it is asked for nothing here
    assert server.simulated(found, (None, None), criterion, 9.0) is None
    assert server.simulated(replace(found, rate_known=False), halves, criterion, 9.0) is None
    assert server.simulated(found, halves, criterion, 0.0) is None
    noisy = replace(found, declared=chain(GaussianNoise(0.1)))
    assert server.simulated(noisy, halves, criterion, 9.0) is None
    seen = found.observation
    planted = RobbingTheFed(bins=8).plant(replace(seen.task, public=public))
    other = replace(found, observation=replace(seen, task=planted))
    assert server.simulated(other, halves, criterion, 9.0) is None


class Picky(nn.Module):
    """Takes no image that a layer has brightened."""

    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, inputs):
        if bool((inputs > 1).any()):
            raise RuntimeError("only values up to 1")
        return self.inner(inputs)


def test_a_model_that_refuses_the_layer_is_no_error():
    assert said(attacked(public="digits", model=Picky())).server is None


def test_the_truth_is_never_in_it(monkeypatch):
    """The simulation gets neither the update nor what was known of its examples."""
    seen = []
    kept = server.simulated

    def heard(inferred, *rest):
        seen.append(kept(inferred, *rest))
        blank = replace(
            inferred.observation,
            update=replace(
                inferred.observation.update,
                rows=torch.zeros_like(inferred.observation.update.rows),
            ),
            labels=None,
        )
        seen.append(kept(replace(inferred, observation=blank, labels=None), *rest))
        return seen[0]

    monkeypatch.setattr(server, "simulated", heard)
    attacked(public="digits")
    assert seen[0] is not None
    assert seen[0] == seen[1]


def test_it_takes_its_share_of_the_time_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(server, "simulated", lambda *given: asked.append(given[-1]))
    attacked(public="digits", seconds=20.0)
    assert len(asked) == 1
    assert asked[0] <= 1.0


def test_terminal_and_page_say_it(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_ask_server", with_words)
    attacked(out=tmp_path)
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "Words of a server." in page


def with_words(work, at):
    work.cases[at] = replace(work.cases[at], server="Words of a server.")
