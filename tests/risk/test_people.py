"""Persons in tables and folders: they are counted, kept in one split, and named as the unit."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image

from leakbound import data
from leakbound.audit import DataSpec, PlanContext
from leakbound.audit.context import persons_of
from leakbound.bounds.counting import same_law
from leakbound.cli import main
from leakbound.data.schema import Schema
from leakbound.domains import Column
from leakbound.opacus import risk
from leakbound.risk import calibrate
from leakbound.risk.deployment import parse, state
from leakbound.risk.examples import Examples

PEOPLE, MOST = 400, 4
SCHEMA = Schema(
    (Column("age", "integer", 0, 120), Column("sex", "categorical", levels=("f", "m"))),
    "sick",
    ("no", "yes"),
    confirmed=True,
    person="patient",
)
COLUMNS = tuple(Column(f"x{k}", "continuous", 0.0, 1.0, typical=0.5, spread=0.37) for k in range(6))


def written(folder, columns=COLUMNS):
    """A table in which person p has 1 + p % 4 rows, all alike but for their first value."""
    draw = np.random.default_rng(0)
    path = folder / "t.csv"
    with path.open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(["patient", *(column.name for column in columns), "sick"])
        for person in range(PEOPLE):
            own = draw.random(len(columns))
            for _ in range(1 + person % MOST):
                own[0] = draw.random()
                table.writerow([f"P{person}", *own.round(4), "no" if person % 3 else "yes"])
    schema = Schema(columns, "sick", ("no", "yes"), confirmed=True, person="patient")
    path.with_suffix(".toml").write_text(schema.text(), encoding="utf-8")
    return str(path)


def test_a_schema_names_the_person(tmp_path):
    assert 'person = "patient"' in SCHEMA.text()
    path = tmp_path / "t.csv"
    path.write_text("patient,age,sex,sick\nb,50,f,no\na,40,m,yes\nb,51,f,no\n")
    SCHEMA.save(tmp_path / "t.toml")
    assert Schema.load(tmp_path / "t.toml") == SCHEMA
    found = data.load(str(path))
    assert found.people.tolist() == found.origins.tolist() == [0, 1, 0]
    assert found.person_names == ("b", "a")
    assert found.inputs.shape == (3, 3)
    path.write_text("patient,age,sex,sick\n,50,f,no\n")
    with pytest.raises(ValueError, match="line 2, column 'patient': no value, so nobody knows"):
        data.load(str(path))
    path.write_text("age,sex,sick\n50,f,no\n")
    with pytest.raises(ValueError, match="no column 'patient', which the schema names"):
        data.load(str(path))
    with pytest.raises(ValueError, match="two places in columns, target, person and ignore"):
        Schema((Column("age"),), "sick", person="age")
    columns = {"age": np.array([50.0, 40]), "sex": np.array([0.0, 1]), "sick": np.array([0.0, 1])}
    np.savez(tmp_path / "t.npz", **columns, patient=np.array([7, 7]))
    assert data.load(f"table:{tmp_path / 't.npz'}").people.tolist() == [0, 0]


def test_photographs_are_no_persons():
    masks = data.load("photo_masks", size=8, limit=20)
    assert masks.people is None
    assert masks.origins is not None


def test_no_person_is_in_two_splits(tmp_path):
    context = PlanContext(DataSpec(written(tmp_path)))
    people = context.dataset.people
    parts = [set(people[places].tolist()) for places in context.drawn.values()]
    assert sum(map(len, parts)) == PEOPLE
    assert len(set.union(*parts)) == PEOPLE
    assert sum(map(len, context.drawn.values())) == len(people)
    batch, who = context.batches(8, 2, 0), persons_of(context, 8, 2, 0)
    inputs = torch.cat([part.inputs for part in batch])
    for row, person in zip(inputs, who, strict=True):
        same = (context.dataset.inputs == row).all(1)
        assert people[same].tolist() == [int(person)]
    # Their other examples are decoys, too: a batch without them would stand out.
    others = context.others(8, 2, 0)
    own = context.dataset.inputs[torch.isin(people, who)]
    here = (others.inputs[:, None] == own).all(2).any(0)
    assert int(here.sum()) == len(own) - len(who)


def attacked(capsys, *more):
    given = ["attack", "--attack", "linear_inversion", "--error-bound", "none", "--json", *more]
    with pytest.raises(SystemExit) as end:
        main([*given, "--defense", "dp_sgd,noise_multiplier=9"])
    return end.value.code, json.loads(capsys.readouterr().out)


def test_an_audit_counts_the_persons_of_its_batch(tmp_path, capsys):
    """A person's rows are near each other, and no others are: that counts them once."""
    more = ("--data", written(tmp_path), "--batch-size", "100")
    _, record = attacked(capsys, *more)
    (bound,) = record["bounds"]
    context = PlanContext(DataSpec(more[1]))
    most = int(persons_of(context, 100, 1, 0).bincount().max())
    assert 1 < most <= MOST
    assert bound["unit"] == f"one person with at most {most} examples"
    words = " ".join(bound["assumptions"])
    assert f"unit: {bound['unit']} in this update, as counted" in words
    assert f"the noise of one is divided by {most}" in words
    assert "a test found" not in words
    code, record = attacked(capsys, *more, "--people", str(most - 1))
    assert (code, record["status"]) == (1, "failed")
    said = f"people is {most - 1}, but the update holds {most} examples of one person"
    assert said in record["reason"]
    _, record = attacked(capsys, *more, "--people", str(most))
    (declared,) = record["bounds"]
    assert declared["probability"] >= bound["probability"]  # near ones may be of other people


def test_rows_of_one_person_are_no_doubt_about_the_law(tmp_path):
    """Their rows are alike, in the private part as in the public one."""
    context = PlanContext(DataSpec(written(tmp_path)))
    split = context.drawn
    rows = [context.dataset.inputs[split[name]].double().numpy() for name in ("public", "private")]
    naive = same_law(*rows, np.random.default_rng(0))
    assert naive < 0.01 < context.same_law


def test_public_examples_are_drawn_by_person(tmp_path):
    source = written(tmp_path)
    examples = Examples.of(source)
    assert examples.persons == MOST
    sample = examples.prior()
    assert sample.n == PEOPLE
    assert "for a random example of a random source" in sample.name
    assert (examples.people(None), examples.people(9)) == (MOST, 9)
    with pytest.raises(ValueError, match=r"people is 2, but the data hold 4 examples of one perso"):
        calibrate("columns>=1 with probability<=0.1", data=source, people=2)
    counted, one = (
        calibrate("columns>=1 with probability<=0.1", data=source, **more)
        for more in ({}, {"people": 8})
    )
    assert counted.setting.people == MOST
    assert one.noise_multiplier == pytest.approx(2 * counted.noise_multiplier, rel=1e-3)


def test_a_random_example_needs_declared_sizes(tmp_path):
    """The largest number of a person's examples in a sample is no cap."""
    source, target = written(tmp_path), "columns>=1 with probability<=0.2"
    with pytest.raises(ValueError, match="people is not given; declare the largest number"):
        calibrate(target, data=source, people_mean=2.5)
    with pytest.raises(ValueError, match="give a mean from 1 to people = 5"):
        calibrate(target, data=source, people=5, people_mean=6.0)
    with pytest.raises(ValueError, match="data that say who is who"):
        calibrate("psnr>=30 with probability<=0.1", data="digits", people=5, people_mean=2.0)
    person, example = (
        calibrate(target, data=source, people=5, **more) for more in ({}, {"people_mean": 2.5})
    )
    assert "2 times the mean size, as declared" in example.prior
    assert example.corridor.log_kappa[0] == pytest.approx(
        person.corridor.log_kappa[0] + np.log(2), rel=1e-6
    )


def test_a_folder_level_names_persons(tmp_path, capsys):
    for person in range(6):
        for k in range(1 + person % 3):
            folder = tmp_path / "images" / f"P{person}" / "scan"
            folder.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(10 * person + k).integers(0, 255, (8, 8), np.uint8)
            Image.fromarray(pixels).save(folder / f"{k}.png")
    source = f"folder:{tmp_path / 'images'}"
    assert Examples.of(source, person="outer_folder").persons == 3
    with pytest.raises(SystemExit):
        main(["bound", "--noise-multiplier", "2", "--data", source, "--person", "outer_folder"])
    said = " ".join(capsys.readouterr().out.split())
    assert "unit: one person with at most 3 examples" in said
    assert "may have more in the private data, declare it: --people" in said


def test_opacus_states_a_person():
    for history in ([(2.0, 0.05, 100)], [(2.0, 0.05, 60), (3.0, 0.05, 40)]):
        one, three = (risk(history, dim=64, norm=4.0, psnr=20, people=people) for people in (1, 3))
        assert "This holds for one example," in str(one)
        assert "This holds for one person with at most 3 examples," in str(three)
        assert three.epsilon > 2 * one.epsilon
        assert all(b[1] > a[1] for a, b in zip(one.rises, three.rises, strict=True))
        assert three.attained == one.attained
    # Three examples at a rate of .05 and noise 2 are one at 1 - .95^3 and noise 2/3.
    by_hand = risk([(2 / 3, 1 - 0.95**3, 100)], dim=64, norm=4.0, psnr=20)
    assert by_hand.epsilon == pytest.approx(risk(
        [(2.0, 0.05, 100)], dim=64, norm=4.0, psnr=20, people=3).epsilon)  # fmt: skip


def test_sites_need_people_and_fit_the_population():
    with pytest.raises(ValueError, match=r"record.sites is 2, but record.people is not stated"):
        parse({"record": {"sites": 2}})
    with pytest.raises(ValueError, match=r"record.sites is 9, more than participation.population"):
        parse({"record": {"sites": 9, "people": 1}, "participation": {"population": 4}})


def test_sites_that_are_not_stated_are_all():
    """As every missing key: the worst case, which the row names; without one there is no bound."""
    facts = {
        "clip": {"norm": 1.0, "kind": "l2", "at": "client"},
        "rounds": 1,
        "noise": {"multiplier": 4.0, "at": "client", "seeded": False},
        "correlation": "none",
    }

    def person(population, **record):
        who = {"law": "all"} | ({} if population is None else {"population": population})
        given = parse(facts | {"record": {"people": 2, **record}, "participation": who})
        return next(row for row in state(given) if row.unit == "person")

    stated, unstated = person(5, sites=5), person(5)
    assert (stated.missing, unstated.missing) == ((), ("record.sites",))
    assert unstated.rises == stated.rises
    assert unstated.epsilon == stated.epsilon
    assert person(5, sites=1).rises[0][1] < unstated.rises[0][1] < 1
    for population in (None, 101):
        row = person(population)
        assert row.missing == ("record.sites",)
        assert (row.epsilon, row.rises[0][1]) == (None, 1.0)
        assert "at how many clients a person has examples is not stated" in row.reason
