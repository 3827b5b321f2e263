import json
import stat

import pytest

from leakbound._util.files import encode
from leakbound.audit.records import Journal

RECORDS = [{"schema": 1, "cell": f"c{i}", "value": i / 3, "text": "é\n"} for i in range(3)]


@pytest.fixture
def path(tmp_path):
    journal = Journal(tmp_path / "records.jsonl", "cell")
    for record in RECORDS:
        journal.append(record)
    journal.close()
    return journal.path


def test_a_record_is_one_canonical_line(path):
    lines = path.read_bytes().splitlines(keepends=True)
    assert [json.loads(line) for line in lines] == RECORDS
    assert lines[0] == b'{"cell":"c0","schema":1,"text":"\\u00e9\\n","value":0.0}\n'
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ValueError, match="JSON compliant"):
        encode({"value": float("nan")})


def test_a_cut_anywhere_costs_one_record(path):
    whole = path.read_bytes()
    start = whole.rstrip(b"\n").rindex(b"\n") + 1
    for end in range(start, len(whole)):
        for tail in (b"", b"\0" * 7):
            path.write_bytes(whole[:end] + tail)
            journal = Journal(path, "cell")
            if end == start and not tail:
                assert list(journal.read()) == ["c0", "c1"]
                continue
            with pytest.warns(UserWarning, match="1 damaged line"):
                assert list(journal.read()) == ["c0", "c1"]
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
        b'{"cell":"c1","schema":1,"x":NaN}',
        b'{"cell":1,"schema":1}',
        b'{"schema":1,"cell":"c1"}',
        b'{"cell":"c1","schema":1}\r',
    ],
)
def test_a_damaged_middle_line_is_dropped(path, line):
    first, _, last = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, line, last, b""]))
    journal = Journal(path, "cell")
    with pytest.warns(UserWarning, match="damaged line"):
        assert list(journal.read()) == ["c0", "c2"]
    journal.append(RECORDS[1])
    journal.finish(["c0", "c1", "c2"])
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == RECORDS


@pytest.mark.parametrize("schema", ["2", "0", '"1"', "[]", "true", "null"])
def test_other_schemas_are_refused_and_kept(path, schema):
    path.write_bytes(path.read_bytes() + b'{"schema": %s, "new": 1}\n' % schema.encode())
    before = path.read_bytes()
    with pytest.raises(ValueError, match="use a newer leakbound"):
        Journal(path, "cell").read()
    assert path.read_bytes() == before


def test_dropped_records_leave_the_file_with_the_next_write(path):
    journal = Journal(path, "cell")
    journal.read()
    before = path.read_bytes()
    journal.drop(["c1", "unknown"])
    assert path.read_bytes() == before
    journal.append({"schema": 1, "cell": "c9"})
    journal.close()
    assert list(Journal(path, "cell").read()) == ["c0", "c2", "c9"]
