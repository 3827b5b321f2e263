"""The plan that the evidence holds is the plan that ran: same hash, same records, byte for byte."""

from __future__ import annotations

import html
import json
import re
import tomllib

import pytest

from leakbound import audit
from leakbound.assess.record import DataFacts, RunInfo
from leakbound.audit import load, parse
from leakbound.audit.plan import plain
from leakbound.report import evidence
from leakbound.report.evidence.parts import Epsilons
from leakbound.report.folder import read
from leakbound.report.rerun import command_of, digest, toml_of

SMALL = {
    "name": 'tiny "one"\\ \u202e\x7f é 😀',
    "seeds": [3, 1],
    "batch_sizes": [2],
    "data": {"source": "digits", "limit": 60},
    "models": [{"name": "mlp", "hidden": [8]}],
    "attacks": [{"name": "linear_inversion"}, {"name": "dlg", "steps": 3}],
    "defenses": [
        {"name": "none"},
        {"links": [{"name": "magnitude_pruning", "rate": 0.9},
                   {"name": "gaussian_noise", "noise_std": 0.01}]},
        {"name": "dp_sgd", "noise_multiplier": [1, 2.5]},
    ],
    "threat": {"labels_known": False},
    "criterion": {"psnr": 17},
    "utility": {"rounds": 1, "repeats": 1, "batch_size": 4},
    "risk": {"probability": 0.01, "prior": "gaussian"},
}  # fmt: skip
OTHER = [
    {},
    {"models": [{"name": "package.module:build", "rates": [1, 2.0], "train_steps": [0, 5]}]},
    {"models": [{"name": "mlp", "hidden": [8, 4], "weights": "w.safetensors"}]},
    {"risk": {"probability": 0}, "error_bound": {"kind": "none"}},
    {"utility": {"rounds": 0}},
    {"metrics": {"lpips_weights": "lpips.safetensors"}, "threat": {"server": "malicious"}},
    {"data": {"source": "folder:my images/é", "size": 16, "channels": 1}},
    {"defenses": [{"name": "secure_aggregation", "clients": 3}, {"name": "mixup", "share": 0.5}]},
    {"criterion": {"psnr": 1e-05}, "seeds": [2**62]},
]


@pytest.mark.parametrize("change", OTHER, ids=range(len(OTHER)))
def test_a_plan_comes_back_as_it_was(change):
    plan = parse({**SMALL, **change})
    stored = json.loads(json.dumps(plain(plan)))
    text = toml_of(stored)
    again = parse(tomllib.loads(text))
    assert again == plan
    assert again.hash == plan.hash == digest(stored)
    assert text.isprintable() or {c for c in text if not c.isprintable()} == {"\n"}


def test_the_command_keeps_what_the_records_depend_on():
    def info(pictures=True, **machine):
        data = DataFacts(source="x", fingerprint="f", examples=1, shape=(1,))
        known = {"plan": {}, "plan_hash": "", "data": data, "versions": {}, "own_data": False}
        return RunInfo(**known, machine=machine, pictures=pictures, experiments=1)

    assert command_of(info(), "a.toml", "b") == "leakbound audit a.toml --out b"
    assert command_of(info(pictures=False)).endswith("--no-examples")
    assert command_of(info(device="H200")).endswith("--device cuda")


@pytest.mark.parametrize("pictures", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_evidence_runs_again_to_the_same_bytes(tmp_path, pictures):
    first = tmp_path / "first"
    audit.audit(parse(SMALL), first, pictures=pictures)
    run = read(first)
    nothing = Epsilons(1e-5, None, None)
    subject = evidence.of_run(run, {}, lambda noise: nothing, images=True)
    text = evidence.annex(evidence.document([subject], images=True), [run])
    found = re.search(r'<pre class="plan" id="plan-1">\n(.*?)</pre>', text, re.DOTALL).group(1)
    (tmp_path / "evidence.toml").write_text(html.unescape(found), encoding="utf-8")
    assert html.unescape(found) == subject.rerun.plan
    command = subject.rerun.command.split()
    assert command[:5] == ["leakbound", "audit", "evidence.toml", "--out", "rerun"]
    assert command[5:] == ([] if pictures else ["--no-examples"])
    audit.audit(load(tmp_path / "evidence.toml"), tmp_path / "rerun", pictures=pictures)
    for name in ("records.jsonl", "utility.jsonl", "run.json"):
        assert (tmp_path / "rerun" / name).read_bytes() == (first / name).read_bytes(), name


@pytest.mark.parametrize(
    "change",
    [
        {"models": []},
        {"attacks": [{"name": "x"}]},
        {"attacks": [{"name": "x", "settings": [["name", "y"]]}]},
        {"attacks": [{"name": "x", "settings": [["a", None]]}]},
        {"defenses": [[{"name": "x", "settings": "no"}]]},
        {"data": 3},
        {"utility": [1]},
        {"seeds": None},
    ],
)
def test_what_is_no_plan_is_said_to_be_none(change):
    stored = {**json.loads(json.dumps(plain(parse(SMALL)))), **change}
    with pytest.raises(ValueError, match="has not the form of a plan"):
        toml_of(stored)
