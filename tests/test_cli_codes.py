"""Exit code 1 is a verdict of several commands, and no fault of any code gives it.

Python's own code for an exception is 1: "exposed", "broken", "leaks more than it claims".
"""

from importlib import import_module

import pytest
import torch

from leakbound import cli
from leakbound.audit_epsilon import finding
from leakbound.cli import deployment
from leakbound.cli.options import VERBS
from leakbound.gate import policy

VERDICTS = {
    "audit-epsilon": {finding.CONSISTENT, finding.LEAKS, finding.UNKNOWN},
    "bound": {deployment.PROTECTED, deployment.OPEN, deployment.NOT_STATED},
    "check": set(policy.CODES.values()),
    "audit": {0, 1},  # 1: experiments failed
    "attack": {0, 1, 2},  # 1: an attack failed; 2: none applies
    "train": {0, 1},  # 1: trainings failed
}
WORDS = {
    "attack": [],
    "audit": ["--quick"],
    "audit-epsilon": ["a:b"],
    "bound": ["--deployment", "facts.toml"],
    "calibrate": ["--target", "psnr>=20 with probability<=0.01"],
    "capture": ["app", "--out", "out"],
    "check": ["policy.toml"],
    "compare": ["one", "two"],
    "evidence": ["run"],
    "ledger": ["ledger.jsonl"],
    "list": [],
    "reidentify": ["run"],
    "report": ["run"],
    "schema": ["rows.csv"],
    "train": ["plan.toml"],
    "train-prior": ["--data", "digits", "--out", "prior.safetensors"],
}
"""What each command needs at least."""
FAULTS = [
    IndexError("index 3 is out of bounds"),
    KeyError("x"),
    TypeError("'NoneType'"),
    AttributeError("no attribute"),
    ZeroDivisionError(),
    AssertionError(),
    RuntimeError("shapes cannot be multiplied"),
    RecursionError("too deep"),
    ImportError("no module"),
    NotImplementedError(),
    StopIteration(),
    torch.linalg.LinAlgError("singular"),
    SystemExit(1),
    SystemExit("text"),
    SystemExit(0),
]


def call(words):
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    return caught.value.code


def test_every_verb_is_tested():
    assert set(WORDS) == set(VERBS)
    assert set(VERDICTS) < set(VERBS)


def test_no_verdict_has_the_code_of_a_fault():
    others = {cli.CRASHED, cli.CLOSED, *cli.STOPPED.values()}
    for codes in VERDICTS.values():
        assert not codes & others
        assert codes - {0, 2} <= {1, 3}


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_a_fault_of_a_command_is_no_verdict(verb, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    module, _, name = VERBS[verb][1].partition(":")
    for fault in FAULTS:

        def broken(command, fault=fault):
            raise fault

        monkeypatch.setattr(import_module(module), name, broken)
        assert call([verb, *WORDS[verb]]) == cli.CRASHED == 70
        shown = capsys.readouterr().err
        assert "Traceback" in shown
        assert "is a fault of leakbound, or of the code that it ran, and no result" in shown


def test_a_user_who_is_mistaken_gets_no_traceback(monkeypatch, capsys):
    monkeypatch.setattr("leakbound.cli.listing.listing", lambda command: int("x"))
    assert call(["list"]) == 2
    assert "Traceback" not in capsys.readouterr().err
