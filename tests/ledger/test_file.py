"""The ledger's file: what is changed, removed or cut short is seen, and no round is lost."""

import json
import multiprocessing
import os
import random
import signal
import stat
import subprocess
import sys
import time

import pytest

from leakbound.ledger import Budget, Ledger


@pytest.fixture
def paid(tmp_path, facts, wide):
    """The path of a ledger of five rounds, of two mechanisms."""
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    for number, noise in enumerate((2.0, 2.0, 3.0, 2.0, 3.0)):
        ledger.charge(facts(noise), wide, round=f"round {number}")
    return path


def test_a_ledger_is_read_as_it_was_written(paid, facts):
    ledger = Ledger(paid)
    assert ledger.spent == [(facts(2.0), 3), (facts(3.0), 2)]
    lines = list(ledger.lines())
    assert [line.number for line in lines] == [1, 2, 3, 4, 5]
    assert [line.round for line in lines][-1] == "round 4"
    assert [line.facts is None for line in lines] == [False, True, False, True, True]
    assert lines[-1].seal == ledger.head
    epsilons = [line.after[0].epsilon for line in lines]
    assert epsilons == sorted(epsilons)


def test_a_refused_round_is_not_written_and_a_warned_one_is(paid, facts):
    before = paid.read_bytes()
    ledger = Ledger(paid)
    strict = ledger.charge(facts(2.0), Budget(max_epsilon=1.0))
    assert strict.refused
    assert strict.number is None
    assert paid.read_bytes() == before
    warned = ledger.charge(facts(2.0), Budget(max_epsilon=1.0, on_excess="warn"))
    assert not warned.refused
    assert warned.reasons == strict.reasons
    assert Ledger(paid).rounds == 6


def _changed(lines):
    lines[2] = lines[2].replace(b'"round 2"', b'"round 7"')


def _removed(lines):
    del lines[1]


def _moved(lines):
    lines[1], lines[3] = lines[3], lines[1]


def _shortened(lines):
    del lines[-1]
    del lines[-1]


def _doubled(lines):
    lines.append(lines[-1])


def _cheaper(lines):
    line = json.loads(lines[4])
    line["after"] = line["after"][:1]
    lines[4] = json.dumps(line, sort_keys=True, separators=(",", ":")).encode() + b"\n"


@pytest.mark.parametrize("change", [_changed, _removed, _moved, _shortened, _doubled, _cheaper])
def test_a_changed_chain_is_refused(paid, change):
    lines = paid.read_bytes().splitlines(keepends=True)
    change(lines)
    paid.write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match="cannot be trusted"):
        Ledger(paid)


def test_a_line_without_the_key_is_refused(paid, tmp_path, facts, wide):
    other = Ledger(tmp_path / "other.jsonl")
    for _ in range(6):
        other.charge(facts(9.0), wide)
    stranger = (tmp_path / "other.jsonl").read_bytes().splitlines(keepends=True)[-1]
    paid.write_bytes(paid.read_bytes() + stranger)
    with pytest.raises(ValueError, match="line 6: it was changed"):
        Ledger(paid)


def test_without_its_key_or_head_it_is_not_read(paid):
    key = paid.with_name(paid.name + ".key")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(paid.stat().st_mode) == 0o600
    kept = key.read_bytes()
    key.unlink()
    with pytest.raises(ValueError, match=r"key .* cannot be read"):
        Ledger(paid)
    key.write_bytes(kept)
    paid.with_name(paid.name + ".head.json").unlink()
    with pytest.raises(ValueError, match="its head is missing"):
        Ledger(paid)


def test_a_removed_ledger_is_missed(paid, facts, wide):
    """Its head still says how many rounds there were."""
    paid.unlink()
    with pytest.raises(ValueError, match="it has 0 rounds, and its head 5"):
        Ledger(paid)


def test_a_file_of_the_user_stays(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text("mine\n")
    with pytest.raises(ValueError, match="stays unchanged"):
        Ledger(path)
    assert path.read_text() == "mine\n"


@pytest.mark.parametrize("left", [1, 40, 700])
def test_a_line_that_a_kill_cut_is_dropped(paid, facts, wide, left):
    head = paid.with_name(paid.name + ".head.json")
    whole, before = paid.read_bytes(), head.read_bytes()
    Ledger(paid).charge(facts(2.0), wide)
    last = paid.read_bytes()[len(whole) :]
    paid.write_bytes(whole + last[:left])
    head.write_bytes(before)
    ledger = Ledger(paid)
    assert ledger.rounds == 5
    assert paid.read_bytes() == whole
    assert ledger.charge(facts(2.0), wide).number == 6


PAYS = """
import sys
from pathlib import Path
from leakbound.ledger import Budget, Ledger
from leakbound.risk.deployment import parse
ledger = Ledger(Path(sys.argv[1]))
ledger._with = lambda deployment, budget, job: ()
given = {"noise": {"multiplier": 2.0, "at": "client"}}
print("ready", flush=True)
class Wide(Budget):
    def exceeded(self, standings):
        return ()
while True:
    print(ledger.charge(parse(given), Wide(max_gain=1.0)).number, flush=True)
"""


def _killed_at_random(path, times, source):
    """Kill a paying process so many times; after each, compare the file with what it said."""
    done = 0
    for _ in range(times):
        process = subprocess.Popen(
            [sys.executable, "-c", PAYS, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "ready\n"
        time.sleep(source.uniform(0.0, 0.2))
        process.send_signal(signal.SIGKILL)
        said = [int(number) for number in process.communicate()[0].split("\n")[:-1]]
        ledger = Ledger(path)
        assert said == list(range(done + 1, done + 1 + len(said)))
        # A line may be on disk whose number was not said: its round did not train.
        assert done + len(said) <= ledger.rounds <= done + len(said) + 1
        assert [line.number for line in ledger.lines()] == list(range(1, ledger.rounds + 1))
        done = ledger.rounds
    return done


@pytest.mark.linux
@pytest.mark.parametrize("times", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_kills_lose_and_double_no_line(tmp_path, times):
    assert _killed_at_random(tmp_path / "ledger.jsonl", times, random.Random(times)) > times


def _pay(path, count, deployment, budget):
    ledger = Ledger(path)
    for _ in range(count):
        ledger.charge(deployment, budget)


def test_processes_of_a_node_share_it(tmp_path, facts, wide):
    path = tmp_path / "ledger.jsonl"
    spawn = multiprocessing.get_context("spawn")
    own = [spawn.Process(target=_pay, args=(path, 8, facts(), wide)) for _ in range(2)]
    for process in own:
        process.start()
    _pay(path, 8, facts(), wide)
    for process in own:
        process.join()
        assert process.exitcode == 0
    assert Ledger(path).spent == [(facts(), 24)]


def test_a_clock_that_goes_back_changes_nothing(paid, facts, wide, monkeypatch):
    from leakbound.ledger import file

    class Past(file.datetime):
        @classmethod
        def now(cls, zone=None):
            return cls(1999, 1, 1, tzinfo=zone)

    monkeypatch.setattr(file, "datetime", Past)
    assert Ledger(paid).charge(facts(2.0), wide).number == 6
    assert list(Ledger(paid).lines())[-1].at.startswith("1999")


@pytest.mark.linux
def test_a_round_that_cannot_be_written_is_not_paid(paid, facts, wide):
    ledger = Ledger(paid)
    if os.geteuid() == 0:
        paid.unlink()
        paid.mkdir()
    else:
        paid.chmod(0o400)
    with pytest.raises((ValueError, OSError)):
        ledger.charge(facts(2.0), wide)
