"""`leakbound train`: the table, its intervals, resuming, and what is refused."""

from __future__ import annotations

import json
import re

import pytest
from scipy import stats

from leakbound import audit, cli
from leakbound.assess.record import DefenseInfo, ModelInfo, Training
from leakbound.report.tables import Names, training_costs

PLAN = """
name = "costs <b>"
seeds = [0, 1, 2]
[data]
source = "digits"
[[models]]
name = "mlp"
hidden = [16]
[[attacks]]
name = "linear_inversion"
[[defenses]]
name = "none"
[[defenses]]
name = "gaussian_noise"
noise_std = 0.01
[utility]
rounds = 6
repeats = 3
"""


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(PLAN, encoding="utf-8")
    return path


def ran(*arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *map(str, arguments), "--workers", "1"])
    return ended.value.code


def test_a_table_with_intervals(plan, tmp_path, capsys):
    out = tmp_path / "run"
    assert ran(plan, "--out", out) == 0
    text = capsys.readouterr().out
    assert "6 trainings of 6 rounds with 4 clients" in text
    assert "no defense" in text
    assert "[" in text
    assert ran(plan, "--out", out, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    units = [json.loads(u) for u in (out / "utility.jsonl").read_bytes().splitlines()]
    losses = [u["training_loss"] for u in units if u["defense"]["name"] == "none"]
    assert rows[0]["loss"]["n"] == 3
    assert rows[0]["loss"]["mean"] == pytest.approx(sum(losses) / 3)
    low, high = stats.t.interval(0.95, 2, stats.tmean(losses), stats.sem(losses))
    assert rows[0]["loss"]["low"] == pytest.approx(low, rel=1e-3)
    assert rows[0]["loss"]["high"] == pytest.approx(high, rel=1e-3)


def test_an_audit_goes_on_in_the_folder_with_the_same_bytes(plan, tmp_path, capsys):
    out = tmp_path / "run"
    assert ran(plan, "--out", out) == 0
    trained = (out / "utility.jsonl").read_bytes()
    assert not (out / "records.jsonl").exists()
    audit.audit(audit.load(plan), out)
    audit.audit(audit.load(plan), tmp_path / "reference")
    for name in ("records.jsonl", "utility.jsonl", "run.json"):
        assert (out / name).read_bytes() == (tmp_path / "reference" / name).read_bytes()
    assert (out / "utility.jsonl").read_bytes() == trained
    assert len((out / "timings.jsonl").read_bytes().splitlines()) == 6 + 6
    assert ran(plan, "--out", out) == 0, "and trains nothing again"
    assert len((out / "timings.jsonl").read_bytes().splitlines()) == 6 + 6


def test_it_goes_on_after_a_stop(plan, tmp_path, capsys, monkeypatch):
    out, real = tmp_path / "run", audit.run
    count = iter(range(100))

    def stopped(*given, **more):
        for result in real(*given, **more):
            if next(count) == 2:
                raise KeyboardInterrupt
            yield result

    with monkeypatch.context() as patch:
        patch.setitem(audit.audit.__kwdefaults__, "run", stopped)
        assert ran(plan, "--out", out) == 130
    assert "nothing is lost" in capsys.readouterr().err
    assert (out / "utility.jsonl").read_bytes().count(b"\n") == 2
    assert ran(plan, "--out", out) == 0
    assert len((out / "timings.jsonl").read_bytes().splitlines()) == 6


def test_a_plan_that_trains_nothing_is_refused(plan, tmp_path, capsys):
    text = PLAN.partition("[utility]")[0]
    for own in (text, text + "[utility]\nrounds = 0\n"):
        plan.write_text(own, encoding="utf-8")
        assert ran(plan, "--out", tmp_path / "run") == 2
        words = capsys.readouterr().err
        assert "it has no table [utility]" in words
        assert "rounds = 40" in words
    assert not (tmp_path / "run").exists()


def test_without_out_the_folder_is_named_by_the_plan(plan, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ran(plan) == 0
    assert (tmp_path / "runs" / "costs-b-training" / "utility.jsonl").exists()


def test_failed_and_diverged_trainings_are_counted_not_averaged():
    def unit(loss, accuracy=0.5, status="ok"):
        return Training(
            training=f"{loss} {status}",
            model=ModelInfo(name="mlp", parameters={}),
            defense=DefenseInfo(
                name="none",
                parameters={},
                settings="none",
                guarantee="none",
                data_dependent_law=False,
            ),
            seed=0,
            rounds=1,
            optimizer="adam",
            status=status,
            training_loss=loss,
            accuracy=accuracy,
        )

    def costs(*units):
        (cost,) = training_costs(units, Names([], units)).values()
        return cost

    row = costs(unit(1.0), unit(3.0), unit(None), unit(None, None, "failed"))
    assert (row.loss.mean, row.loss.n, row.diverged, row.failed) == (2.0, 2, 1, 1)
    assert row.accuracy.n == 3
    row = costs(unit(None, None, "failed"))
    assert (row.loss, row.accuracy, row.failed) == (None, None, 1)


def test_a_failed_training_is_told(plan, tmp_path, capsys):
    odd = PLAN.replace('name = "gaussian_noise"\nnoise_std = 0.01', 'name = "mixup"')
    plan.write_text(odd + "batch_size = 1\n", encoding="utf-8")
    assert ran(plan, "--out", tmp_path / "run") == 1
    told = capsys.readouterr()
    assert re.search(r"3 trainings failed; the first: \S+", told.err)
    assert "no defense" in told.out
