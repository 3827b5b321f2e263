"""Schemas: drafts against what is known of the file, and TOML that comes back the same."""

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leakbound.cli import main
from leakbound.data import Schema, rows
from leakbound.data import schema as schema_module
from leakbound.domains import Column

MIXED = """\
id,age,income,visits,sex,born,empty,same,note,big,code,sick
p001,34,1200.5,0,f,1990-01-02,,x,lorem one,5000000000,007,no
p002,51,,1,m,1972-03-04 10:00,NA,x,lorem two,7000000000,010,yes
p003,?,880.25,2,f,2000-02-29,null,x,lorem three,5000000001,007,no
p004,29,1e3,1,,1995-12-31,,x,lorem four,6000000000,011,no
"""


def draft(tmp_path, text, target=None, name="t.csv"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return Schema.infer(path, target)


def named(schema):
    return {column.name: column for column in schema.columns}


def test_every_kind_of_column(tmp_path, monkeypatch):
    monkeypatch.setattr(schema_module, "FEW", 3)
    found = draft(tmp_path, MIXED, "sick")
    columns = named(found)
    assert (found.target, found.classes, found.confirmed) == ("sick", ("no", "yes"), False)
    assert found.ignore == ("id", "empty", "same", "note")
    notes = found.notes
    assert "no two rows share" in notes["id"]
    assert notes["empty"] == "every value is missing"
    assert notes["same"] == "every value is 'x'"
    age = columns["age"]
    assert (age.kind, age.low, age.high, age.missing) == ("integer", 29, 51, True)
    income = columns["income"]
    assert (income.kind, income.low, income.high) == ("continuous", 880.25, 1200.5)
    assert columns["visits"].kind == "integer"
    assert notes["visits"].startswith('ask: number or category? A category has levels = ["0", "1"')
    sex = columns["sex"]
    assert (sex.kind, sex.levels, sex.missing) == ("categorical", ("f", "m"), True)
    born = columns["born"]
    days = [np.datetime64(d, "D").astype(int) for d in ("1972-03-04", "2000-02-29")]
    assert (born.kind, born.unit, born.low, born.high) == ("date", "", *days)
    assert notes["born"] == (
        "times of day are left out; ask: a date of birth? That is a quasi-identifier"
    )
    assert "low = 1972-03-04\nhigh = 2000-02-29\n" in found.text()
    assert columns["big"].kind == "continuous"
    assert "float32 inputs round" in notes["big"]
    assert columns["code"].levels == ("007", "010", "011")


def test_medians_and_spreads_are_numpys(tmp_path):
    values = np.random.default_rng(0).lognormal(3, 1, 500).round(3)
    text = "x,y,label\n" + "".join(f"{v},{k % 2 * 5},{k % 2}\n" for k, v in enumerate(values))
    found = draft(tmp_path, text)
    x = named(found)["x"]
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    assert (x.low, x.high) == (values.min(), values.max())
    assert x.typical == pytest.approx(middle, rel=1e-5)
    assert x.spread == pytest.approx((high - low) / 1.349, rel=1e-5)
    assert found.classes == ("0", "1")
    assert found.notes["label"] == "ask whether this is the label"
    rare = "x,label\n" + "1,a\n" * 98 + "3,b\n" * 2
    assert named(draft(tmp_path, rare))["x"].spread == pytest.approx(
        np.std([1] * 98 + [3] * 2), rel=1e-5
    )


def test_a_sample_of_a_long_table_is_a_fair_one(tmp_path, monkeypatch):
    """Rows that come in order: each has the same chance, whichever block it is in."""
    monkeypatch.setattr(schema_module, "SAMPLE", 2_000)
    text = "x,label\n" + "".join(f"{k},{k % 3}\n" for k in range(40_000))
    x = named(draft(tmp_path, text))["x"]
    assert (x.low, x.high) == (0, 39_999)
    error = 40_000 * 0.5 / np.sqrt(2_000)  # one standard deviation of the median's estimate
    assert abs(x.typical - 20_000) < 4 * error
    assert abs(1.349 * x.spread - 20_000) < 6 * error
    assert x == named(Schema.infer(tmp_path / "t.csv"))["x"]


@pytest.mark.parametrize(("bad", "kind"), [(1, "continuous"), (2, "ignored")])
def test_columns_with_few_texts_are_numbers(tmp_path, bad, kind):
    lines = [f"{k / 7},{k % 2}" for k in range(150)]
    for k in range(bad):
        lines[10 + k] = f"=HYPERLINK({k}),0"
    text = "x,label\n" + "\n".join(lines) + "\n"
    if kind == "ignored":
        with pytest.raises(ValueError, match="no column is left"):
            draft(tmp_path, text)
        return
    found = draft(tmp_path, text)
    assert named(found)["x"].kind == kind
    assert found.notes["x"] == (
        "1 values are no number, such as '=HYPERLINK(0)' in line 12: mend them"
    )


def test_texts_that_are_no_categories(tmp_path):
    lines = (f"{k % 2};z{k % 1001};{k % 1002:05};{k % 2}\n" for k in range(3000))
    found = draft(tmp_path, "a;z;zip;label\n" + "".join(lines))
    assert (found.delimiter, found.ignore) == (";", ("z", "zip"))
    assert "over 1000 texts" in found.notes["z"]
    assert "over 1000 codes" in found.notes["zip"]
    long = "a,b,label\n" + "".join(f"{'y' * (k + 190)},{k % 2},{k % 2}\n" for k in range(20))
    assert "over 200 characters" in draft(tmp_path, long).notes["a"]
    numbers = "n,b,label\n" + "".join(f"{k},{k % 2},{k % 2}\n" for k in range(200))
    assert draft(tmp_path, numbers).notes["n"] == "ask: an identifier? No two rows share a value"


def test_a_number_can_be_the_label(tmp_path):
    text = "a,price\n" + "".join(f"{k % 2},{100 + k}\n" for k in range(50))
    found = draft(tmp_path, text, "price")
    assert (found.target, found.classes) == ("price", ())
    assert found.notes["price"] == "a number, so that there are no classes"
    gap = draft(tmp_path, text + "1,\n", "price")
    assert gap.notes["price"].startswith("1 rows have no label: leave them out")


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_dialects_give_the_same_draft(tmp_path, delimiter, encoding, end):
    lines = [["größe", "quoted", "y"], ["1.5", '"a,;\tb"', "0"], ["2.5", '"c ""d"""', "1"]]
    path = tmp_path / "t.csv"
    path.write_bytes(end.join(delimiter.join(row) for row in lines).encode(encoding))
    found = Schema.infer(path)
    assert found.delimiter == delimiter
    assert named(found)["größe"].low == 1.5
    assert named(found)["quoted"].levels == ("a,;\tb", 'c "d"')


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "it is empty"),
        ("\n\n", "it is empty"),
        ("a,b\n", "a header, but no row"),
        ("a,b\n\n\n", "a header, but no row"),
        ("a,a\n1,2\n", "names 'a' twice"),
        ("1,2\n3,4\n", "line 1 holds only numbers, such as 1"),
        ("a,b\n1,2\n3\n", "line 3 has 1 values, but the header has 2"),
        ("a,b\n1,2\n\n3,4,5\n", "line 4 has 3 values"),
        ("a,b\n1,\0\n", "line 2 holds a NUL byte"),
        (b"a,b\n1,2\n1,\xff\xfe\n", "line 3 is not UTF-8 text"),
        ("a,b\n1,2\n".encode("utf-16"), "line 1 is not UTF-8 text"),
        ('a,b\n1,"2\n3,4\n', "close every quotation mark"),
        ('a,b\n1,"2"x\n', "line 2: .* close every quotation mark"),
        ("a,b\n1," + "x" * 200_000 + "\n", "line 2: field larger than field limit"),
        ("a\n1\n2\n", "no column is left beside the label 'a'"),
        ("a,b\n1,1\n1,1\n", "target is '', which cannot be the label"),
        (",".join(f"c{k}" for k in range(10_001)) + "\n", "10001 columns"),
    ],
)
def test_malformed_files_are_one_clear_line(tmp_path, content, words):
    path = tmp_path / "t.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=words) as caught:
        Schema.infer(path)
    assert str(caught.value).startswith(f"table {str(path)!r}: ")
    assert "\n" not in str(caught.value)


def test_a_row_without_an_end_does_not_take_all_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "_LONGEST", 1 << 16)
    for text in ("a,b\n1," + "x" * 70_000, "a,b\n" + '1,"x\n' + '","\n' * 30_000):
        (tmp_path / "t.csv").write_text(text)
        with pytest.raises(ValueError, match="a row has over 65536 characters"):
            Schema.infer(tmp_path / "t.csv")


def test_the_delimiter_is_found_where_the_first_lines_end_within_a_row(tmp_path):
    text = "n;x,mm;y\n" + "".join(f'"{k % 3}\nlines";{k},5;{k % 2}\n' for k in range(60))
    for before in ("", '"one";1,5;0\n'):
        found = draft(tmp_path, text.replace("y\n", "y\n" + before, 1))
        assert (found.delimiter, found.target) == (";", "y")


def test_the_label_and_the_file_must_exist(tmp_path):
    with pytest.raises(ValueError, match="'sik', which cannot be the label; did you mean 'sick'"):
        draft(tmp_path, MIXED, "sik")
    with pytest.raises(ValueError, match="'same', which cannot be the label; every value is 'x'"):
        draft(tmp_path, MIXED, "same")
    for name in ("missing.csv", "."):
        with pytest.raises(ValueError, match="cannot be read"):
            Schema.infer(tmp_path / name)


def test_random_damage_gives_only_value_errors(tmp_path):
    source, path = random.Random(0), tmp_path / "t.csv"
    lines = (f"{k},{k / 7:.3f},{'abc'[k % 3]},2020-01-{k % 28 + 1:02},{k % 2}\n" for k in range(40))
    good, refused = ("age,dose,group,day,sick\n" + "".join(lines)).encode(), []
    for _ in range(300):
        data = bytearray(good)
        for _ in range(source.randint(1, 3)):
            at = source.randrange(len(data))
            data[at : at + source.randint(0, 3)] = source.choice(
                [b"", b'"', b",", b"\n", b"\0", b"\xff", b"\xef\xbb\xbf", b"1e999", b"\r", b"-"]
            )
        path.write_bytes(data[: source.randint(200, 4 * len(data))])
        try:
            made = Schema.infer(path)
        except ValueError as error:
            refused.append(str(error))
        else:
            made.save(tmp_path / "made.toml")
            assert Schema.load(tmp_path / "made.toml") == made
    assert 20 < len(refused) < 280
    assert all(text.startswith("table ") and "\n" not in text for text in refused)


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
finite = st.floats(-1e12, 1e12, allow_subnormal=False)


days = st.integers(-700_000, 2_900_000)


@st.composite
def columns(draw, name):
    kind = draw(st.sampled_from(["categorical", "integer", "continuous", "date"]))
    flags = {"missing": draw(st.booleans()), "sensitive": draw(st.booleans())}
    own = {}
    if kind == "categorical":
        own["levels"] = tuple(draw(st.lists(texts, min_size=2, max_size=5, unique=True)))
        own["encoding"] = draw(st.sampled_from(["onehot", "code", "embedding"]))
        return Column(name, kind, unit=draw(st.just("") | texts), **own, **flags)
    pair = st.lists(days if kind == "date" else finite, min_size=2, max_size=2, unique=True)
    low, high = sorted(draw(pair))
    if kind == "integer":
        low, high = low // 1, high // 1 + 1
    own["tolerance"] = draw(st.none() | st.floats(1e-9, 1e9))
    own["typical"] = draw(st.none() | (days if kind == "date" else finite))
    own["scale"] = draw(st.none() | st.floats(1e-3, 1e9))
    own["spread"] = draw(st.none() | st.floats(1e-9, 1e9))
    own["decimal"] = draw(st.sampled_from(".,"))
    own["censored"] = draw(st.sampled_from(["", "limit", *["missing"] * flags["missing"]]))
    if kind == "date":
        own["format"] = draw(st.sampled_from(["%Y-%m-%d", "%d.%m.%y"]) | texts)
    unit = draw(st.just("") | texts)
    return Column(name, kind, float(low), float(high), unit=unit, **own, **flags)


@st.composite
def schemas(draw):
    names = draw(st.lists(texts, min_size=2, max_size=6, unique=True))
    split = draw(st.integers(1, len(names) - 1))
    return Schema(
        tuple(draw(columns(name)) for name in names[:split]),
        names[split],
        tuple(draw(st.just([]) | st.lists(texts, min_size=2, max_size=4, unique=True))),
        tuple(names[split + 1 :]),
        draw(st.booleans()),
        draw(st.sampled_from(",;\t|")),
        draw(st.sampled_from(".,")),
        draw(st.just("") | texts),
        {name: draw(st.text(max_size=20)) for name in names},
    )


@settings(deadline=None, max_examples=50)
@given(schema=schemas())
def test_a_schema_comes_back_from_its_text(tmp_path_factory, schema):
    path = tmp_path_factory.getbasetemp() / "schema.toml"
    path.write_text(schema.text(), encoding="utf-8", newline="")
    assert Schema.load(path) == schema


GOOD = Schema((Column("age", "integer", 0, 120),), "sick", ("no", "yes"), confirmed=True)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"integer"', '"intger"', "column 'age' has kind 'intger'"),
        ("sensitive", "sensitiv", "column 'age' has no key 'sensitiv'; did you mean 'sensitive'"),
        ("confirmed", "confirm", "the schema has no key 'confirm'; did you mean 'confirmed'"),
        ("high = 120", 'high = "old"', "column 'age': high is 'old'; give a finite number"),
        ("high = 120", "high = inf", "high is 'inf'; give a finite number"),
        ("high = 120", "high = true", "high is 'True'"),
        ("high = 120", f"high = {'9' * 400}", "give a finite number"),
        ("high = 120", "high = -1", "runs from 0.0 to -1.0"),
        ("= false\n", "= 0\n", "sensitive is '0'; give true or false"),
        ('["no", "yes"]', '["no", 1]', "classes is .*; give a list of texts"),
        ('["no", "yes"]', '["no"]', "classes are no; give two"),
        ('"age"', '""', "a column has name ''"),
        ('"age"', "5", "a column has name 5"),
        ('"sick"', '"age"', "column 'age' has two places"),
        ('target = "sick"', "", "it has no target"),
        ("[[columns]]", "[columns]", "is no list of tables"),
        ('","', '":"', "delimiter is ':'"),
        ("ignore = []", 'ignore = ["a", "a"]', "column 'a' has two places"),
        ("[[columns]]", "[[columns", "is not valid TOML"),
        ("ignore = []", "ignore = " + "[" * 2000, "is not valid TOML"),
    ],
)
def test_errors_of_a_schema_name_the_file_and_the_mend(tmp_path, old, new, words):
    path = tmp_path / "t.toml"
    assert old in GOOD.text()
    path.write_text(GOOD.text().replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ValueError, match=words) as caught:
        Schema.load(path)
    assert str(caught.value).startswith(f"schema {str(path)!r}")


def test_files_that_are_no_schema(tmp_path):
    path = tmp_path / "t.toml"
    for content, words in ((b"\xff", "is not UTF-8"), (b"#" * (1 << 22) + b"#", "is over")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            Schema.load(path)
    for place in (tmp_path, tmp_path / "missing.toml"):
        with pytest.raises(ValueError, match="cannot be read"):
            Schema.load(place)


def test_a_users_file_stays(tmp_path):
    path = tmp_path / "t.toml"
    GOOD.save(path)
    replace(GOOD, target="other").save(path)  # leakbound's own
    assert Schema.load(path).target == "other"
    path.write_text(path.read_text().replace("other", "mine"))
    with pytest.raises(ValueError, match="it stays unchanged"):
        GOOD.save(path)
    assert Schema.load(path).target == "mine"


def call(*words):
    with pytest.raises(SystemExit) as stop:
        main(list(map(str, words)))
    return stop.value.code


def test_the_command_drafts_shows_and_overwrites_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text(MIXED.replace("same", "[red]=SUM(A1)"), encoding="utf-8")
    assert call("schema", "t.csv", "--target", "sick") == 0
    shown = capsys.readouterr().out
    assert "[red]=SUM(A1)" in shown
    assert "leakbound attack --data table:t.csv\n" in shown
    assert Schema.load(Path("t.toml")).target == "sick"
    assert call("attack", "--data", "t.csv") == 2
    assert "'t.toml' is a draft, on which no verdict rests" in capsys.readouterr().err
    Path("t.toml").write_text("mine")
    assert call("schema", "t.csv") == 2
    assert "stays unchanged" in capsys.readouterr().err
    assert Path("t.toml").read_text() == "mine"
    assert call("schema", "t.csv", "--out", "made/other.toml") == 0
    assert "table:t.csv --schema made/other.toml" in capsys.readouterr().out
    assert call("schema", "t.csv", "--out", "t.txt") == 2
    assert "name a file that ends in .toml" in capsys.readouterr().err


MEMORY = """
import resource, sys
from pathlib import Path
from leakbound.data import Schema
Schema.infer(Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
Schema.infer(Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.linux
def test_memory_does_not_grow_with_the_rows(tmp_path):
    line = "{0},{1}.5,{2},{3}\n"
    for name, count in (("small.csv", 100_000), ("large.csv", 400_000)):
        lines = (line.format(k, k % 977, "abc"[k % 3], k % 2) for k in range(count))
        (tmp_path / name).write_text("n,x,c,label\n" + "".join(lines))
    words = [sys.executable, "-c", MEMORY, tmp_path / "small.csv", tmp_path / "large.csv"]
    grown = int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert grown < 8_000  # KiB; the file has 300,000 rows more
