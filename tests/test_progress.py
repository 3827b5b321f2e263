"""What a command says while it works: a line now and then where there is no terminal."""

import re
import time

import pytest
from rich.console import Console

from leakbound import audit
from leakbound.audit import estimate, parse
from leakbound.audit.context import PlanContext
from leakbound.audit.estimate import Clock
from leakbound.cli import main, shared
from leakbound.cli.shared import Bar

PLAN = {
    "data": {"source": "digits", "limit": 60},
    "models": [{"name": "mlp", "hidden": [4]}],
    "attacks": [{"name": "linear_inversion"}, {"name": "gradient_matching", "steps": 50}],
    "batch_sizes": [1, 2],
}


def said(capsys):
    return capsys.readouterr().err.splitlines()


def waited(capsys, words):
    """The lines so far, once one of them matches."""
    lines, limit = [], time.monotonic() + 600
    while time.monotonic() < limit:
        lines += said(capsys)
        if any(re.search(words, line) for line in lines):
            return lines
        time.sleep(0.01)
    raise AssertionError(lines)


def test_lines_come_though_nothing_ends(capsys, monkeypatch):
    monkeypatch.setattr(shared, "EVERY", 0.01)
    with Bar(Console(stderr=True)) as bar:
        bar(0, 12, "dlg · resnet18 \x1b[2J")
        waited(capsys, r"0 of 12 done after \d+ s, time left not known yet: dlg · resnet18 \\x1b")
        bar(0, 12, "dlg", 7500.0)
        waited(capsys, r"0 of 12 done after \d+ s, about 2 h 05 min left: dlg")
        bar(0, 12, "dlg", -1.0)
        waited(capsys, r"longer than estimated: dlg")
    assert re.fullmatch(r"0 of 12 done after \d+ s", said(capsys)[-1])


def test_the_time_left_follows_from_what_is_done_where_nobody_says_it():
    bar = Bar(Console(stderr=True))
    bar._began -= 100.0
    bar(4, 12, "dlg")
    assert bar.left == pytest.approx(200.0, abs=5.0)


def test_an_estimate_counts_steps_and_measures_a_gradient(monkeypatch):
    monkeypatch.setattr(estimate, "_gradient", lambda bench, model, size, seed: 0.1 * size)
    plan = parse(PLAN)
    seconds, basis = estimate.predicted_seconds(plan.experiments(), PlanContext(plan.data), 0)
    by_cell = {(c.attack.name, c.batch_size): seconds[c.id] for c in plan.experiments()}
    assert by_cell == {
        ("linear_inversion", 1): estimate.OVERHEAD,
        ("linear_inversion", 2): estimate.OVERHEAD,
        ("gradient_matching", 1): pytest.approx(estimate.OVERHEAD + 50 * 3 * 0.1),
        ("gradient_matching", 2): pytest.approx(estimate.OVERHEAD + 50 * 3 * 0.2),
    }
    assert "100 steps of searches were counted, each as 3 gradients" in basis
    assert "one gradient of mlp at batch size 2 took 0.2 s here" in basis


def test_an_estimate_counts_the_training_of_each_weights_once(monkeypatch):
    """It builds no trained model for it, as that would take as long as the training."""
    asked = set()

    def gradient(bench, model, size, seed):
        asked.add(model.train_steps)
        return 0.1 * size

    monkeypatch.setattr(estimate, "_gradient", gradient)
    model = {"name": "mlp", "train_steps": 7}
    plan = parse(PLAN | {"models": [model], "batch_sizes": [1], "seeds": [0, 1]})
    seconds, _ = estimate.predicted_seconds(plan.experiments(), PlanContext(plan.data), 0)
    training = 7 * 0.1 * 64
    search = 50 * 3 * 0.1
    assert sum(seconds.values()) == pytest.approx(2 * (training + search) + 4 * estimate.OVERHEAD)
    assert asked == {0}


def test_finished_units_correct_the_estimate(monkeypatch):
    clock = Clock({str(i): 10.0 for i in range(20)}, "steps", workers=2)
    assert clock.left == pytest.approx(100.0)
    now = time.monotonic()
    monkeypatch.setattr(estimate.time, "monotonic", lambda: now + 200)
    assert clock.left == pytest.approx(100.0), "a unit that is not finished tells nothing"
    for i in range(10):
        clock.finished(str(i))
    assert clock.left == pytest.approx(100 * 205 / 110, rel=0.01), "half is done after 200 s"


def test_a_long_audit_says_so_before_it_starts(tmp_path, capsys, monkeypatch):
    began = []

    def nothing(plan, done=(), *, started, **settings):
        began.append(capsys.readouterr().err)
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(audit, "run", nothing)
    text = """
        [data]
        source = "digits"
        limit = 60
        [[models]]
        name = "mlp"
        [[attacks]]
        name = "inverting_gradients"
        steps = STEPS
    """
    for steps, long in (("100_000_000", True), ("10", False)):
        path = tmp_path / f"{steps}.toml"
        path.write_text(text.replace("STEPS", steps))
        with pytest.raises(SystemExit):
            main(["audit", str(path), "--out", str(tmp_path / f"out-{steps}")])
        words = " ".join(began.pop().split())
        assert ("100,000,000 steps of searches were counted" in words) == long
        assert ("by an estimate" in words) == long
        assert not long or re.search(r"this takes about \d+ h \d\d min by an estimate", words)
    assert shared.LONG == 600


def test_times_are_read_easily():
    words = [shared.duration(seconds) for seconds in (4.2, 100, 7500)]
    assert words == ["4 s", "1 min 40 s", "2 h 05 min"]


def test_an_attack_tells_its_steps_and_the_time_left(capsys, monkeypatch):
    """Of all restarts together; an attack without a search has none."""
    monkeypatch.setattr(shared, "EVERY", 0.01)
    attack = ["attack", "--data", "digits", "--attack"]
    with pytest.raises(SystemExit) as end:
        main([*attack, "inverting_gradients,steps=20,restarts=2"])
    lines = said(capsys)
    assert end.value.code == 0
    assert any(
        re.fullmatch(
            r"\d+ of 40 steps done after \d+ s, (about \d+ s left|longer than estimated): "
            r"inverting_gradients,steps=20,restarts=2 \(2 restarts\)",
            line,
        )
        for line in lines
    ), lines
    assert re.fullmatch(r"40 of 40 steps done after \d+ s", lines[-1])
    with pytest.raises(SystemExit):
        main([*attack, "linear_inversion"])
    lines = said(capsys)
    assert re.fullmatch(r"linear_inversion: running for \d+ s", lines[-1])
    assert not [line for line in lines if "steps" in line]
