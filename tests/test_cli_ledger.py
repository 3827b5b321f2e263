"""What `leakbound ledger` shows of a ledger, and what it refuses."""

import json

import pytest

from leakbound.cli import main
from leakbound.ledger import Budget, Ledger
from leakbound.risk.deployment import parse

GIVEN = {
    "clip": {"norm": 1.0, "kind": "l2", "at": "client"},
    "noise": {"multiplier": 2.4, "at": "client", "seeded": False},
    "participation": {"law": "all"},
    "unit": "client",
}


def call(*words):
    with pytest.raises(SystemExit) as end:
        main(["ledger", *map(str, words)])
    return end.value.code


@pytest.fixture
def path(tmp_path):
    """A ledger of twelve rounds whose correlation is not stated."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for number in range(12):
        given = parse(GIVEN | ({} if number % 3 else {"correlation": "none"}))
        ledger.charge(given, Budget(max_gain=1.0, on_excess="warn"), round=f"[b]{number}")
    return ledger.path


def test_it_shows_what_all_rounds_cost(path, capsys):
    assert call(path, "--last", 3) == 0
    shown = capsys.readouterr().out
    assert "12 rounds, whole chain" in shown
    assert "no bound" in shown
    assert "not stated, so its worst case counts: correlation" in shown
    assert [f"[b]{number}" in shown for number in (8, 9, 10, 11)] == [False, True, True, True]


def test_it_writes_json_and_a_picture(path, tmp_path, capsys):
    out = tmp_path / "out"
    assert call(path, "--json", "--out", out) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rounds"] == 12
    assert found["head"] == Ledger(path).head
    assert sorted(one["rounds"] for one in found["mechanisms"]) == [4, 8]
    assert [one["number"] for one in found["last"]] == list(range(3, 13))
    assert (out / "ledger.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "ledger.json").read_text())["head"] == found["head"]


def test_a_broken_chain_ends_with_an_error(path, capsys):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4] + lines[5:]))
    assert call(path) == 2
    assert "cannot be trusted: line 5" in capsys.readouterr().err


def test_a_missing_ledger_is_not_made(tmp_path, capsys):
    assert call(tmp_path / "none.jsonl") == 2
    assert "does not exist" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
