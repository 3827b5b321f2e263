import os
import stat
import tracemalloc

import pytest
from msgspec.structs import replace

from leakbound.assess.record import DefenseInfo, ModelInfo, Training, decode, encode
from leakbound.audit.journal import Journal

DEFENSE = DefenseInfo(
    name="é\n", parameters={}, settings="", guarantee="none", data_dependent_law=False
)


def record(name, value=0.5, **changes):
    """A training that failed: the shortest record there is."""
    known = {"training": name, "seed": 0, "status": "failed", "reason": "x", "rounds": 1}
    known |= {"optimizer": "adam", "training_loss": value}
    return Training(**known, defense=DEFENSE, model=ModelInfo(name="m", parameters={}), **changes)


RECORDS = [record(f"u{i}", value=i / 3) for i in range(3)]
LINE = encode(RECORDS[1])


@pytest.fixture
def path(tmp_path):
    journal = Journal(tmp_path / "utility.jsonl", Training)
    for one in RECORDS:
        journal.append(one)
    journal.close()
    return journal.path


def test_a_record_is_one_canonical_line(path):
    lines = path.read_bytes().splitlines(keepends=True)
    assert [decode(line, Training) for line in lines] == RECORDS
    assert lines[0].startswith(b'{"accuracy":null,"auc":null,"auc_error":null,')
    assert b'"name":"\\u00e9\\n"' in lines[0]
    assert os.name == "nt" or stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ValueError, match="JSON compliant"):
        encode(record("u", value=float("nan")))


def test_a_cut_anywhere_costs_one_record(path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # 700 times, and the disk is not looked at
    whole = path.read_bytes()
    start = whole.rstrip(b"\n").rindex(b"\n") + 1
    for end in range(start, len(whole)):
        for tail in (b"", b"\0" * 7):
            path.write_bytes(whole[:end] + tail)
            journal = Journal(path, Training)
            if end == start and not tail:
                assert journal.read() == {"u0", "u1"}
                continue
            with pytest.warns(UserWarning, match="1 damaged line"):
                assert journal.read() == {"u0", "u1"}
            assert path.read_bytes() == whole[:end] + tail, "reading writes nothing"
            journal.append(RECORDS[2])
            journal.close()
            assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\0\0",
        b"{}",
        b"[1]",
        b"\xff",
        b"[" * 100_000,
        LINE.replace(b"0.333", b"NaN"),
        LINE.replace(b'"u1"', b"1"),
        LINE.replace(b'"rounds":', b'"rounds": '),
        LINE[:-1] + b"\r",
        LINE.replace(b'"failed"', b"[]")[:-1],
        LINE.replace(b'"schema":1', b'"schema":2')[:-1],
        LINE.replace(b'"seed":0', b'"seed":true')[:-1],
        LINE.replace(b'"seed":0', b'"more":1,"seed":0')[:-1],
        LINE.replace(b"0.333", b"1e301")[:-1],
        LINE.replace(b'"x"', b'"\\ud800"')[:-1],
        b'{"schema":1,"training":"u1"}',
    ],
)
def test_a_damaged_middle_line_is_dropped(path, line):
    first, _, last = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, line, last, b""]))
    journal = Journal(path, Training)
    with pytest.warns(UserWarning, match="damaged line"):
        assert journal.read() == {"u0", "u2"}
    journal.append(RECORDS[1])
    journal.finish(["u0", "u1", "u2"])
    assert [decode(line, Training) for line in path.read_bytes().splitlines()] == RECORDS


def test_records_that_do_not_fit_leave_the_file_with_the_next_write(path):
    journal = Journal(path, Training)
    before = path.read_bytes()
    assert journal.read(lambda one: one.training != "u1") == {"u0", "u2"}
    assert path.read_bytes() == before
    journal.append(record("u9"))
    journal.finish(["u9", "u2", "u0"])
    journal.append(RECORDS[1])
    journal.close()
    wanted = [record("u9"), RECORDS[2], RECORDS[0], RECORDS[1]]
    assert [decode(line, Training) for line in path.read_bytes().splitlines()] == wanted
    assert journal.ends == dict.fromkeys(["u9", "u2", "u0", "u1"], "failed")


def test_of_several_records_of_one_unit_the_last_stands(path):
    with path.open("ab") as stream:
        stream.write(encode(record("u0", value=9.0)))
    journal = Journal(path, Training)
    assert journal.read() == {"u0", "u1", "u2"}
    journal.finish(["u0", "u1"])
    lines = path.read_bytes().splitlines()
    values = [decode(line, Training).training_loss for line in lines]
    assert values == [9.0, RECORDS[1].training_loss]


def test_memory_does_not_hold_the_records(tmp_path):
    """A record of 100 kB: reading, appending and finishing need room for a few, not for all."""
    path, long = tmp_path / "utility.jsonl", "x" * 100_000
    journal = Journal(path, Training)
    for i in range(60):
        journal.append(replace(record(f"u{i}"), reason=f"{i}{long}"))
    journal.close()
    tracemalloc.start()
    try:
        journal = Journal(path, Training)
        assert len(journal.read()) == 60
        journal.append(record("u60"))
        journal.finish([f"u{60 - i}" for i in range(61)])
        journal.close()
        assert tracemalloc.get_traced_memory()[1] < 2e6
    finally:
        tracemalloc.stop()
