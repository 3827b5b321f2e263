"""Captured updates of tables: from a schema and a CSV to a verdict, by the command line."""

import csv
import json

import pytest
import torch
from torch import nn

from leakbound import data, tensors
from leakbound.assess import read as read_records
from leakbound.assess.record import Assessment, Chance
from leakbound.cli import main
from leakbound.cli.captured import EXPOSED_CODE
from leakbound.data.schema import Schema

MODEL = """
import torch
class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear({width}, 40), torch.nn.ReLU(), torch.nn.Linear(40, 1))
"""


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A CSV of 400 patients with a confirmed schema, and an update of some of them under BCE."""
    monkeypatch.chdir(tmp_path)
    source = torch.Generator().manual_seed(0)
    draws = torch.rand(400, 6, generator=source)
    with (tmp_path / "t.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["age", "weight", "blood", "city", "smoker", "sick"])
        for one in draws.tolist():
            blood, city = (
                "ABO"[int(3 * one[2])],
                ["north", "south", "=east", "west"][int(4 * one[3])],
            )
            writer.writerow(
                [int(18 + 70 * one[0]), f"{45 + 60 * one[1]:.1f}", blood, city,
                 "yes" if one[4] < 0.3 else "no", "yes" if one[5] < 0.4 else "no"]
            )  # fmt: skip
    drafted = Schema.infer("t.csv", target="sick")
    drafted.save(tmp_path / "t.toml")
    text = (tmp_path / "t.toml").read_text().replace("confirmed = false", "confirmed = true")
    (tmp_path / "s.toml").write_text(text)
    rows = data.load("t.csv", schema=tmp_path / "s.toml")
    width = rows.inputs.shape[1]
    (tmp_path / "table_net.py").write_text(MODEL.format(width=width))
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 40), nn.ReLU(), nn.Linear(40, 1))

    def captured(places):
        batch = rows.batch(torch.tensor(places))
        model.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits
        loss(model(batch.inputs), batch.labels[:, None].float()).backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        after = {name: p.detach() - 0.1 * p.grad for name, p in model.named_parameters()}
        tensors.write(tmp_path / "before.safetensors", before)
        tensors.write(tmp_path / "after.safetensors", after)
        lines = (tmp_path / "t.csv").read_text().splitlines()
        kept = [lines[0], *(lines[1 + place] for place in places)]
        (tmp_path / "truth.csv").write_text("\n".join(kept) + "\n")

    return captured


def attack(*more, schema="s.toml"):
    given = ["--before", "before.safetensors", "--model", "table_net:Net", "--schema", schema]
    with pytest.raises(SystemExit) as ended:
        main(["attack", "--update", "after.safetensors", *given, "--loss", "bce", *more])
    return ended.value.code


def records(folder):
    return list(read_records(folder / "records.jsonl", Assessment))


def test_one_row_under_bce_is_certified_without_its_truth(table, tmp_path, capsys):
    table([7])
    assert attack("--attack", "linear_inversion", "--out", "rep") == EXPOSED_CODE
    assert "exposed (certified)" in capsys.readouterr().out
    (record,) = records(tmp_path / "rep")
    row = next(csv.DictReader((tmp_path / "truth.csv").read_text().splitlines()))
    found = {column.name: column.reconstruction[0] for column in record.columns}
    assert found == {name: row[name] for name in found} | {"weight": found["weight"]}
    assert float(found["weight"]) == pytest.approx(float(row["weight"]), rel=1e-3)
    assert (record.model.loss, record.data.domain) == ("bce", "table")
    page = (tmp_path / "rep" / "report.html").read_text()
    assert "PSNR" not in page.split("<style")[0]


def test_rows_are_counted_against_a_truth_and_decoys(table, tmp_path):
    table([1, 2, 3, 4])
    more = ["--batch-size", "4", "--truth", "truth.csv", "--public", "table:t.csv"]
    assert (
        attack(*more, "--attack", "span_decoding", "--attack", "tab_leak,steps=2", "--out", "rep")
        == EXPOSED_CODE
    )
    span, few = records(tmp_path / "rep")
    assert span.verdict == "exposed"
    assert span.scores == (100.0,) * 4
    assert span.chance.excluded
    assert few.verdict == "undecided"
    assert few.columns[0].agreement
    plan = json.loads((tmp_path / "rep" / "run.json").read_text())["plan"]
    assert plan["schema"] == "s.toml"


def test_a_draft_is_refused(table, capsys):
    table([7])
    assert attack(schema="t.toml") == 2
    assert "is a draft" in capsys.readouterr().err


def test_known_columns_are_put_in_and_do_not_count(table, tmp_path, capsys):
    table([1, 2, 3, 4])
    # In another order of columns, and with one that the schema does not know.
    with (tmp_path / "known.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["note", "city", "age"])
        for row in csv.DictReader((tmp_path / "truth.csv").read_text().splitlines()):
            writer.writerow(["-", row["city"], row["age"]])
    known = ["--known", "age,city", "--known-values", "known.csv"]
    attack(*known, "--attack", "tab_leak,steps=2", "--out", "rep")
    (record,) = records(tmp_path / "rep")
    assert (record.criterion.known, record.criterion.of) == ("age,city", 3)
    assert record.threat.known == "age,city"
    assert record.batch_size == 4
    assert {column.name for column in record.columns} == {"weight", "blood", "smoker"}
    # The truth gives the same known values.
    more = ["--truth", "truth.csv", "--public", "table:t.csv"]
    attack(*more, "--known", "age,city", "--attack", "span_decoding", "--out", "two")
    (record,) = records(tmp_path / "two")
    assert record.scores == (100.0,) * 4
    assert {column.name for column in record.columns} == {"weight", "blood", "smoker"}
    # Of victims among the public rows, who knows age and city finds the rest there.
    assert 0 < sum(record.matched) < 4
    lines = (tmp_path / "t.csv").read_text().splitlines()
    (tmp_path / "p.csv").write_text("\n".join([lines[0], *lines[6:]]) + "\n")
    others = ["--truth", "truth.csv", "--public", "table:p.csv", "--known", "age,city"]
    assert attack(*others, "--attack", "span_decoding", "--out", "three") == EXPOSED_CODE
    (record,) = records(tmp_path / "three")
    assert record.verdict == "exposed"
    # Who also knows the label may complete one of the few unknown parts without the update.
    assert sum(record.matched) >= 3
    assert record.chance.replays == 9
    capsys.readouterr()
    assert attack("--known", "age,city") == 2
    assert "--known-values FILE" in capsys.readouterr().err
    assert attack("--known", "age,city", "--known-values", "known.csv", "--batch-size", "3") == 2
    assert "known holds values of shape (4, 5)" in capsys.readouterr().err
    assert attack("--known-values", "known.csv") == 2
    assert "name the parts too" in capsys.readouterr().err


def test_columns_that_the_schema_marks_are_known(table, tmp_path, capsys):
    table([1, 2, 3, 4])
    text = (tmp_path / "s.toml").read_text()
    marked = text.replace('name = "age"\n', 'name = "age"\nknown = true\n')
    (tmp_path / "marked.toml").write_text(marked)
    assert "\nknown = true" in Schema.load("marked.toml").text()
    more = ["--attack", "tab_leak,steps=2", "--batch-size", "4"]
    attack(*more, "--truth", "truth.csv", "--out", "one", schema="marked.toml")
    assert records(tmp_path / "one")[0].threat.known == "age"
    attack(*more, "--truth", "truth.csv", "--known", "none", "--out", "two", schema="marked.toml")
    assert records(tmp_path / "two")[0].threat.known == ""
    capsys.readouterr()
    attack(*more, "--out", "three", schema="marked.toml")
    assert "nobody says the values" in capsys.readouterr().err
    assert records(tmp_path / "three")[0].threat.known == ""


def test_one_unknown_column_is_read_without_its_truth(table, tmp_path, capsys):
    """Who knows all but a column reads it from an update of four; nobody gives the truth."""
    table([1, 2, 3, 4])
    sick = data.load("t.csv", schema=tmp_path / "s.toml").labels[1:5].int().tolist()
    known = ["--known", "all but smoker", "--known-values", "truth.csv"]
    more = [
        *known,
        "--labels",
        ",".join(map(str, sick)),
        "--learning-rate",
        "0.1",
        "--local-steps",
        "1",
    ]
    name = ["--attack", "attribute_filter"]
    assert attack(*more, *name, "--out", "rep") == EXPOSED_CODE
    (record,) = records(tmp_path / "rep")
    assert record.verdict == "attribute exposed"
    [fact] = [fact for fact in record.facts if fact.kind == "attribute"]
    true = [
        row["smoker"] for row in csv.DictReader((tmp_path / "truth.csv").read_text().splitlines())
    ]
    assert fact.items == tuple(true[place] for place in fact.examples)
    assert fact.level <= 0.01
    shown = " ".join(capsys.readouterr().out.split())
    assert "smoker is read: " in shown
    page = (tmp_path / "rep" / "report.html").read_text()
    assert "reveals smoker of" in page
    assert "of whom all else is known (wrong with probability" in page
    # The same people, of whom all but the outcome is known.
    label = ["--known", "all", *known[2:], "--learning-rate", "0.1", "--local-steps", "1"]
    assert attack(*label, "--out", "label") == EXPOSED_CODE
    (record,) = records(tmp_path / "label")
    assert (record.attack.name, record.verdict) == ("attribute_filter", "attribute exposed")
    [fact] = [fact for fact in record.facts if fact.kind == "attribute"]
    assert fact.items == tuple(str(sick[place]) for place in fact.examples)
    # Another update, of other people, does not fit what is known.
    table([11, 12, 13, 14])
    (tmp_path / "others.csv").write_bytes((tmp_path / "truth.csv").read_bytes())
    table([1, 2, 3, 4])
    others = ["--known", "all but smoker", "--known-values", "others.csv", *more[4:]]
    attack(*others, *name, "--out", "two")
    (record,) = records(tmp_path / "two")
    assert record.verdict != "attribute exposed"


def test_undeclared_noise_is_in_the_replays_too(table, tmp_path, monkeypatch):
    """A replay of the true rows is the update itself: what nobody declared stays in it."""
    table([1, 2, 3, 4])
    after, _ = tensors.read(tmp_path / "after.safetensors")
    draw = torch.Generator().manual_seed(1)
    noisy = {name: p + 1e-5 * torch.randn(p.shape, generator=draw) for name, p in after.items()}
    tensors.write(tmp_path / "after.safetensors", noisy)
    lines = (tmp_path / "t.csv").read_text().splitlines()
    (tmp_path / "p.csv").write_text("\n".join([lines[0], *lines[6:]]) + "\n")
    apart = []

    def replayed(criterion, truth, candidates, decoys, replay):
        apart.append(float((replay(truth.inputs, 0) - candidates).abs().max()))
        apart.append(float((candidates - truth.inputs).abs().max()))
        return Chance(p_value=1.0, decoys=0, level=0.01)

    monkeypatch.setattr("leakbound.assess.measure.replayed", replayed)
    more = ["--truth", "truth.csv", "--public", "table:p.csv", "--known", "age,city"]
    attack(*more, "--attack", "span_decoding", "--out", "rep")
    same, off = apart
    assert same < 1e-5 < 1e-4 < off
