"""The ledger's file: what is changed, removed or cut short is seen, and no round is lost."""

import json
import multiprocessing
import os
import random
import signal
import stat
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
    key.chmod(0o600)
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


@pytest.fixture
def torn(paid, facts, wide):
    """Cuts the last of six lines after so many bytes, as a kill would; returns the whole file."""

    def cut(left):
        head = paid.with_name(paid.name + ".head.json")
        whole, before = paid.read_bytes(), head.read_bytes()
        Ledger(paid).charge(facts(2.0), wide)
        last = paid.read_bytes()[len(whole) :]
        paid.write_bytes(whole + last[:left])
        head.write_bytes(before)
        return whole

    return cut


@pytest.mark.parametrize("left", [1, 40, 700])
def test_a_line_that_a_kill_cut_does_not_count(paid, torn, facts, wide, left):
    whole = torn(left)
    before = paid.read_bytes()
    ledger = Ledger(paid)
    assert ledger.rounds == 5
    assert paid.read_bytes() == before, "reading changes nothing"
    assert ledger.charge(facts(2.0), wide).number == 6
    assert paid.read_bytes().startswith(whole)
    assert Ledger(paid).rounds == 6


def test_a_line_that_lost_its_end_is_not_cut_off(paid):
    """Its head knows it: an editor may have taken the last line's end."""
    whole = paid.read_bytes()
    paid.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="it has 4 rounds, and its head 5"):
        Ledger(paid)
    paid.write_bytes(whole)
    assert Ledger(paid).rounds == 5


def test_heads_that_could_not_be_written_are_written_later(paid, facts, wide, monkeypatch):
    """A full disk took two heads in a row; no line was added without the head before it."""
    from leakbound.ledger import file

    ledger = Ledger(paid)
    with monkeypatch.context() as full:
        full.setattr(file.files, "write", _full)
        for _ in range(2):
            with pytest.raises(ValueError, match="cannot be written"):
                ledger.charge(facts(2.0), wide)
            assert len(paid.read_bytes().splitlines()) == 6
    assert ledger.charge(facts(2.0), wide).number == 7
    assert Ledger(paid).rounds == 7


def _full(*given, **more):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("words", ["\ud800", "x" * 10_000, "\0\n\x1b[2J"])
def test_words_of_the_server_break_nothing(paid, facts, wide, words):
    Ledger(paid).charge(facts(2.0), wide, job=words, round=words)
    assert Ledger(paid).rounds == 6
    assert len(next(iter(Ledger(paid).lines(6))).job) <= 64


def test_what_no_reading_takes_is_not_written(paid, facts):
    before = paid.read_bytes()
    deployment = facts(2.0)
    wrong = type(deployment)(noise=type(deployment.noise)(seeded=0), weights="bogus")
    long = facts(2.0, weights="examples", sizes=[1] * 600_000)
    for given in (wrong, long):
        with pytest.raises(ValueError, match=r"cannot be trusted|bytes is over"):
            Ledger(paid).charge(given, Budget(max_gain=1.0))
    assert paid.read_bytes() == before


@pytest.mark.parametrize("text", ["", "ab", "z" * 64, "A" * 64])
def test_a_key_that_a_kill_or_a_stranger_left_is_refused(tmp_path, facts, wide, text):
    (tmp_path / "ledger.jsonl.key").write_text(text)
    with pytest.raises(ValueError, match="is no key"):
        Ledger(tmp_path / "ledger.jsonl").charge(facts(2.0), wide)


@pytest.mark.linux
def test_a_key_that_others_read_is_refused(paid):
    paid.with_name(paid.name + ".key").chmod(0o644)
    with pytest.raises(ValueError, match="can be read by others"):
        Ledger(paid)


@pytest.mark.parametrize("kept", [1, 3])
@pytest.mark.parametrize("head", [None, "plain", "later"])
def test_nobody_without_the_key_sets_a_ledger_back(paid, facts, wide, kept, head):
    lines = paid.read_bytes().splitlines(keepends=True)
    seal = json.loads(lines[kept - 1])["seal"]
    paid.write_bytes(b"".join(lines[:kept]))
    place = paid.with_name(paid.name + ".head.json")
    place.unlink()
    if head is not None:
        rounds = kept if head == "plain" else kept - 1
        place.write_text(json.dumps({"rounds": rounds, "seal": seal, "mac": "0" * 64}))
    with pytest.raises(ValueError, match="cannot be trusted"):
        Ledger(paid)


def test_a_line_that_is_cut_off_while_a_node_runs_is_missed(paid, facts, wide):
    ledger = Ledger(paid)
    paid.write_bytes(b"".join(paid.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match="was changed or cut off"):
        ledger.charge(facts(2.0), wide)


def test_a_line_without_an_end_takes_no_memory(paid):
    with paid.open("ab") as stream:
        stream.write(b"x" * (3 << 20))
    with pytest.raises(ValueError, match="line 6 is too long"):
        Ledger(paid)


def test_no_lock_lies_beside_a_file_of_the_user(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("mine\n")
    with pytest.raises(ValueError, match="stays unchanged"):
        Ledger(path)
    assert [one.name for one in tmp_path.iterdir()] == ["notes.txt"]


def _pays_until_killed(path, deployment, said):
    """In a process of its own: pay for rounds, and say the number of each."""
    ledger = Ledger(path)
    ledger._with = lambda deployment, budget: ()  # the law takes time, and no line
    budget = Budget(max_gain=1.0, on_excess="warn")
    while True:
        os.write(said, b"%d\n" % ledger.charge(deployment, budget).number)


def _killed_at_random(path, deployment, times, source):
    """Kill a paying process so many times; after each, compare the file with what it said."""
    done = 0
    for _ in range(times):
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                _pays_until_killed(path, deployment, theirs)
            finally:
                os._exit(1)
        os.close(theirs)
        time.sleep(source.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, "it ended by itself"
        with os.fdopen(ours, "rb") as stream:
            said = [int(line) for line in stream.read().split(b"\n")[:-1]]
        ledger = Ledger(path)
        assert said == list(range(done + 1, done + 1 + len(said)))
        # A line may be on disk whose number was not said: its round did not train.
        assert done + len(said) <= ledger.rounds <= done + len(said) + 1
        assert [line.number for line in ledger.lines()] == list(range(1, ledger.rounds + 1))
        done = ledger.rounds
    return done


@pytest.mark.linux
@pytest.mark.parametrize("times", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_kills_lose_and_double_no_line(tmp_path, facts, times):
    path = tmp_path / "ledger.jsonl"
    assert _killed_at_random(path, facts(), times, random.Random(times)) > times


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
