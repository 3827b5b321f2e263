"""The evidence: three kinds of risk kept apart, nothing green that nobody stated, nothing private
where no picture was asked for."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import jsonschema
import pytest

from leakbound.report import evidence
from leakbound.report.evidence_text import clean
from leakbound.report.evidence_told import STATEMENTS
from leakbound.report.folder import read

VALIDATOR = jsonschema.Draft202012Validator(json.loads(evidence.schema()))
SIGNS = re.compile(r"complian|certif|conform|accredit|approv|attest|complies|audit.?proof", re.I)


def accountant(noise):
    return {"delta": 1e-5, "add_remove": 4 / noise, "replace": 8 / noise}


def made(folder, *, images=True, **statements):
    """The page and the JSON value of one run folder, once it is valid."""
    run = read(folder)
    subject = evidence.of_run(run, statements, accountant, images=images)
    content = evidence.document([subject], images=images)
    VALIDATOR.validate(json.loads(json.dumps(content, allow_nan=False)))
    return evidence.page(content, [run]), content


def section(text, number):
    """The text of one numbered part of the page."""
    found = re.search(rf"<h3[^>]*>{number} .*?</section>", text, re.DOTALL)
    return found.group() if found else ""


def test_measured_bounded_and_declared_stand_apart(tmp_path, make_floored):
    text, content = made(make_floored(tmp_path / "run"))
    assert [section(text, n)[:60].split(">")[1][:12] for n in (1, 2, 3)] == [
        "1 Measured</", "2 Bounded</h", "3 Declared</",
    ]  # fmt: skip
    subject = content["subjects"][0]
    (row,) = [c for c in subject["measured"]["combinations"] if c["defense"] == "no defense"]
    share = row["rebuilt"]
    assert (share["hits"], share["n"], share["level"]) == (6, 6, 0.95)
    assert share["low"] == pytest.approx(0.025 ** (1 / 6))  # exact for all of n
    bound = subject["bounded"]["bounds"][0]
    theorem = subject["bounded"]["theorems"][bound["theorem"] - 1]
    assert theorem["equation"] == "paper A, eq. (1)"
    assert theorem["assumptions"] == ["one"]
    assert bound["prior"] == theorem["prior"]
    assert theorem["covers"] == "all attackers"
    assert "paper A, eq. (1)" in section(text, 2)
    assert "paper A, eq. (1)" not in section(text, 1) + section(text, 3)
    assert subject["bounded"]["missing"][0]["reason"] in section(text, 2)


def test_what_nobody_states_is_not_stated_and_never_green(tmp_path, make_floored):
    text, content = made(make_floored(tmp_path / "run"))
    items = content["subjects"][0]["declared"]["items"]
    silent = [item for item in items if item["name"] in STATEMENTS]
    assert len(silent) == len(STATEMENTS)
    assert all(item["value"] is None and item["status"] == "not stated" for item in silent)
    rows = re.findall(r'<tr class="unstated-row">.*?</tr>', section(text, 3))
    assert len(rows) >= len(STATEMENTS)
    for row in rows:
        assert 'class="status unstated"' in row
        assert "badge" not in row
    style = text[text.index("<style>") : text.index("</style>")]
    rule = re.search(r"\.status\.unstated \{(.*?)\}", style, re.DOTALL).group(1)
    assert "--protected" not in rule
    for color in re.findall(r"--unstated(?:-ground)?: #([0-9a-f]{6})", style):
        red, green, _ = (int(color[i : i + 2], 16) for i in (0, 2, 4))
        assert red > green, color  # amber on every ground


def test_a_statement_is_declared_and_nothing_more(tmp_path, make_floored):
    said = {name: f"{name} is as I say <b>" for name in STATEMENTS}
    text, content = made(make_floored(tmp_path / "run"), **said)
    subject = content["subjects"][0]
    items = {item["name"]: item for item in subject["declared"]["items"]}
    for name in STATEMENTS:
        assert items[name]["value"] == said[name]
        assert items[name]["status"] == "declared"
        assert html.escape(said[name]) in section(text, 3)
    assert {one["accepted_by"] for one in subject["thresholds"]} == {said["accepted_by"]}


def test_thresholds_tell_their_origin(tmp_path, make_cell, make_run):
    plan = {"name": "a", "threshold": 20.0, "risk": {"probability": 0.01, "prior": "mixture"}}
    _, content = made(make_run(tmp_path / "run", [make_cell()], plan=plan))
    rebuilt, accepted = content["subjects"][0]["thresholds"]
    assert rebuilt["origin"].startswith("plan: thresholds.psnr; it is the default")
    assert (accepted["value"], accepted["origin"]) == (0.01, "plan: risk.probability")
    assert rebuilt["accepted_by"] == accepted["accepted_by"] == "not stated"
    _, content = made(make_run(tmp_path / "other", [make_cell()], plan={"name": "a"}))
    rebuilt, accepted = content["subjects"][0]["thresholds"]
    assert rebuilt["origin"] == "the records; the plan names none"
    assert (accepted["value"], accepted["origin"]) == (None, "not stated")


@pytest.mark.parametrize(
    ("threat", "answers"),
    [
        ({"labels_known": True, "defense_known": True, "server": "honest"},
         {"labels": "yes", "defense": "yes", "statistics": "no", "plant": "no", "mask": "yes"}),
        ({"labels_known": False, "defense_known": False, "server": "malicious",
          "statistics_known": True},
         {"labels": "no", "defense": "no", "statistics": "yes", "plant": "yes", "mask": "no"}),
    ],
)  # fmt: skip
def test_the_ledger_says_what_was_told(tmp_path, make_cell, make_run, threat, answers):
    release = {"law": "Exact", "private": False, "withheld": 0.9}
    _, content = made(make_run(tmp_path / "run", [make_cell(threat=threat, release=release)]))
    told = {line["name"]: line for line in content["subjects"][0]["attacker"]["ledger"]}
    assert {name: told[name]["answer"] for name in answers} == answers
    assert {told[name]["answer"] for name in ("batch_size", "model", "local_plan")} == {"yes"}
    assert {told[name]["answer"] for name in ("norms", "history", "noise")} == {"no"}
    assert all(line["from"] for line in told.values())


def test_cells_that_differ_are_not_summed_up_as_yes(tmp_path, make_cell, make_run):
    threat = make_cell()["threat"]
    cells = [make_cell(threat=threat | {"labels_known": known}) for known in (False, True)]
    _, content = made(make_run(tmp_path / "run", cells))
    told = {line["name"]: line for line in content["subjects"][0]["attacker"]["ledger"]}
    assert told["labels"]["answer"] == "in some cells"


def test_a_claim_of_differential_privacy_answers_every_question(
    tmp_path, make_cell, make_run, dp_sgd
):
    folder = make_run(tmp_path / "run", [make_cell(defense=dp_sgd), make_cell()])
    text, content = made(folder)
    (claim,) = content["subjects"][0]["differential_privacy"]
    items = {item["name"]: item for item in claim["items"]}
    for words in ("Unit of privacy", "Epsilon and delta", "Neighboring relation", "Mechanism",
                  "Sensitivity", "Composition", "Accountant", "Trust model", "Floating point",
                  "Source of randomness", "Side channels", "Parameters that depend on data",
                  "Utility", "Bias", "Exposure before the mechanism",
                  "Privacy budget over later releases",
                  "Data security and access control"):  # fmt: skip
        assert words in section(text, 9)
    assert claim["epsilons"] == {"delta": 1e-5, "add_remove": 8.0, "replace": 16.0}
    assert items["parameters"]["value"].startswith("epsilon 8 at delta 1e-05")
    assert "2 in L2 norm" in items["sensitivity"]["value"]
    assert "4, one replaced" in items["sensitivity"]["value"]
    assert "EXPERIMENT ONLY" in items["randomness"]["value"]
    for name in ("trust_model", "side_channels", "hyperparameters", "bias", "data_collection",
                 "data_security", "privacy_budget", "utility"):  # fmt: skip
        assert items[name]["status"] == "not stated", name
    assert claim["unanswered"] == 8


@pytest.mark.parametrize("name", ["data_security", "privacy_budget"])
def test_a_question_of_the_deployment_is_answered_by_its_own_statement(
    tmp_path, make_cell, make_run, name, dp_sgd
):
    """Neither what is computed nor any other statement answers it."""
    folder = make_run(tmp_path / "run", [make_cell(defense=dp_sgd), make_cell()])
    others = {other: "said" for other in STATEMENTS if other != name}
    for said, status in ((others, "not stated"), (others | {name: "two guards"}, "declared")):
        text, content = made(folder, **said)
        (claim,) = content["subjects"][0]["differential_privacy"]
        (line,) = [item for item in claim["items"] if item["name"] == name]
        assert line["status"] == status
        assert ("two guards" in section(text, 9)) == (status == "declared")


def test_a_document_without_the_later_questions_is_still_one(tmp_path, make_cell, make_run, dp_sgd):
    _, content = made(make_run(tmp_path / "run", [make_cell(defense=dp_sgd)]))
    subject = content["subjects"][0]
    (claim,) = subject["differential_privacy"]
    for lines in (claim["items"], subject["declared"]["items"]):
        lines[:] = [one for one in lines if one["name"] not in ("data_security", "privacy_budget")]
    VALIDATOR.validate(content)
    assert "Data security" not in evidence.page(content)


def test_an_unknown_mechanism_has_no_epsilon(tmp_path, make_cell, make_run, dp_sgd):
    for settings in (
        "MyMechanism()",
        dp_sgd["settings"] * 2,
        dp_sgd["settings"].replace("0.5", "1e999"),
    ):
        folder = make_run(tmp_path / "run", [make_cell(defense=dp_sgd | {"settings": settings})])
        _, content = made(folder)
        (claim,) = content["subjects"][0]["differential_privacy"]
        assert claim["epsilons"] is None
        items = {item["name"]: item for item in claim["items"]}
        assert items["parameters"]["status"] == items["sensitivity"]["status"] == "not stated"


def test_no_defense_that_claims_nothing_gets_the_questions(tmp_path, make_floored):
    text, content = made(make_floored(tmp_path / "run"))
    assert content["subjects"][0]["differential_privacy"] == []
    assert "No defense here claims differential privacy." in section(text, 9)


def test_the_corridor_joins_both_sides(tmp_path, make_floored):
    text, content = made(make_floored(tmp_path / "run"))
    rows = content["subjects"][0]["corridor"]["mean_error"]
    noisy = [row for row in rows if row["ceiling"] is not None]
    assert len(noisy) == 4
    part = section(text, 6)
    assert part.count('class="excluded" x=') == len(noisy)
    assert part.count('class="reached" x=') == len(rows)
    assert part.count("no theorem") == len(rows) - len(noisy)


def test_a_strip_is_as_long_as_its_number():
    from leakbound.report.evidence_plots import WIDTH, mean_errors, probabilities

    row = {"attack": 10.0, "ceiling": 30.0, "without_update": None}
    (strip,) = mean_errors([row], None).rows
    reached = float(re.search(r'class="reached" x="0" y="4" width="([\d.]+)"', strip).group(1))
    excluded = float(re.search(r'class="excluded" x="([\d.]+)"', strip).group(1))
    assert reached == pytest.approx(WIDTH * 5 / 30, abs=0.1)  # the axis runs from 5 to 35
    assert excluded == pytest.approx(WIDTH * 25 / 30, abs=0.1)
    share = {"hits": 1, "n": 10, "value": 0.1, "low": 0.01, "high": 0.4}
    (strip,) = probabilities([{"rebuilt": share, "bound": 0.5, "accepted": 0.001}]).rows
    reached = float(re.search(r'class="reached" x="0" y="4" width="([\d.]+)"', strip).group(1))
    assert reached == pytest.approx(WIDTH * 3 / 4, abs=0.1)  # from 1e-4 to 1, in decades


def test_the_strongest_attack_stands_with_its_pictures(tmp_path, make_floored):
    text, content = made(make_floored(tmp_path / "run"))
    assert content["images"] is True
    subject = content["subjects"][0]
    assert {one["attack"] for one in subject["strongest"]} == {"inverting_gradients"}
    shown = [name for one in subject["strongest"] for name in one["pictures"].values()]
    assert text.count("data:image/png") == len(shown)
    assert sum("leak_map" in one["pictures"] for one in subject["strongest"]) == 4
    for one in subject["strongest"]:
        (row,) = [c for c in subject["measured"]["combinations"] if c["defense"] == one["defense"]]
        assert max(one["psnr"]) == row["best_psnr"]
        (record,) = [r for r in read(tmp_path / "run").cells if r["cell"] == one["cell"]]
        assert record["metrics"]["psnr"] == one["psnr"]


@pytest.mark.parametrize("kind", ["floored", "grid"])
def test_without_images_nothing_of_the_data_is_left(tmp_path, make_floored, make_grid, kind):
    folder = (make_floored if kind == "floored" else make_grid)(tmp_path / "run", seeds=2)
    text, content = made(folder, images=False)
    written = text + json.dumps(content)
    assert "data:image" not in written
    assert "<img" not in text
    assert not re.search(r"[0-9a-f]{16}\.png", written)
    assert {one["pictures"] for one in content["subjects"][0]["strongest"]} == {None}
    assert content["images"] is content["private_pictures"] is False
    assert "This page holds no picture of the data." in text
    assert 'class="reached"' in text  # plots are no pictures of the data


def test_values_of_a_private_table_are_never_shown(tmp_path, make_cell, make_run):
    column = {"name": "age", "mean": 0.0, "worst": 0.0, "matched": 1.0}
    column |= {"truth": [41.53125], "reconstruction": [41.53125]}
    text, content = made(make_run(tmp_path / "run", [make_cell(columns=[column])]))
    assert "41.5" not in text + json.dumps(content)


def test_own_data_is_said_on_top(tmp_path, make_cell, make_pictures, make_run):
    folder = tmp_path / "run"
    folder.mkdir()
    cells = [make_cell(pictures=make_pictures(folder, 0, 2, 0.1, 0))]
    words = "This page holds pictures of private data."
    assert words in made(make_run(folder, cells, own_data=True))[0]
    assert words not in made(make_run(folder, cells, own_data=False))[0]
    assert words not in made(make_run(folder, cells, own_data=True), images=False)[0]


def test_utility_is_paired_by_seed_with_an_interval(
    tmp_path, make_cell, make_run, make_training, dp_sgd
):
    plain = make_cell()["defense"]
    known = [(plain, 0, 0.9), (plain, 1, 0.8), (dp_sgd, 0, 0.7), (dp_sgd, 1, 0.7)]
    units = [make_training(*one) for one in known]
    _, content = made(make_run(tmp_path / "run", [make_cell()], units))
    plain, private = content["subjects"][0]["utility"]
    assert plain["lost"] is None
    lost = private["lost"]
    assert lost["mean"] == pytest.approx(0.15)
    half = 12.7062047364 * 0.0707106781 / 2**0.5  # t quantile of one degree of freedom
    assert (lost["high"] - lost["low"]) / 2 == pytest.approx(half, rel=1e-6)


@pytest.mark.parametrize("what", ["plan", "verdict", "picture", "probability"])
def test_a_folder_that_was_changed_is_told_on_top(tmp_path, make_floored, what):
    folder = make_floored(tmp_path / "run")
    lines = (folder / "records.jsonl").read_text().splitlines()
    for line in range(len(lines)):  # made up with a verdict that no bound gives: repair it
        lines[line] = lines[line].replace('"verdict": "protected"', '"verdict": "undecided"')
    from leakbound.report.evidence_plan import hash_of

    header = json.loads((folder / "run.json").read_text())
    header["plan_hash"] = hash_of(header["plan"])
    (folder / "run.json").write_text(json.dumps(header))
    (folder / "records.jsonl").write_text("\n".join(lines))
    assert "Does not hold:" not in made(folder)[0]
    if what == "plan":
        header["plan"]["seeds"] = [7]
        (folder / "run.json").write_text(json.dumps(header))
    elif what == "picture":
        picture = sorted((folder / "pictures").iterdir())[0]
        picture.write_bytes(picture.read_bytes() + b"x")
    else:
        first = json.loads(lines[-1])
        first["verdict"] = "protected"
        if what == "probability":
            more = {"probability": 0.5, "accepted": 0.01, "excludes_threshold": True}
            first["bounds"] = [json.loads(json.dumps(BOUND | more))]
        (folder / "records.jsonl").write_text("\n".join([*lines[:-1], json.dumps(first)]))
    assert "Does not hold:" in made(folder)[0]


BOUND = {"name": "p", "value": 0.5, "psnr": None, "prior": "x", "rests_on_prior": True}
BOUND |= {"covers": "all", "on_average": False, "equation": None, "assumptions": []}


def test_unfinished_and_failed_runs_say_so(tmp_path, make_cell, make_run):
    cells = [make_cell(), make_cell(status="failed", reason="RuntimeError: x", seed=1)]
    text, content = made(make_run(tmp_path / "run", cells, cells=6))
    assert "The run is not finished: 2 of 6 cells are here." in text
    assert "1 of 2 cells failed" in text
    assert content["subjects"][0]["measured"]["cells"]["failed"] == 1


def test_no_word_of_a_stamp(tmp_path, make_floored):
    root = Path(evidence.__file__).parent
    files = [*root.glob("evidence*.py"), *root.glob("templates/evidence*"), *root.glob("schema/*")]
    files += [root.parent / "commands_evidence.py"]
    docs = root.parents[2] / "docs" / "evidence.md"
    files += [docs] if docs.exists() else []
    texts = [path.read_text(encoding="utf-8") for path in files]
    texts += [made(make_floored(tmp_path / "run"))[0]]
    for text in texts:
        own = "capture.certificate", '"certificate"', "exposed (certified)"  # of an attack
        for words in own:
            text = text.replace(words, "")
        found = SIGNS.search(text)
        assert found is None, found


def test_hostile_text_is_escaped_cut_and_visible(tmp_path, make_grid, make_cell, make_run, hostile):
    text, _ = made(make_grid(tmp_path / "run", seeds=1))
    assert hostile not in text
    assert "<script" not in text
    name = "a\u202eb\x00" + "x" * 5000
    text, content = made(make_run(tmp_path / "odd", [make_cell(attack=name)], plan={"name": name}))
    assert "\u202e" not in text
    assert "\x00" not in text
    assert len(content["subjects"][0]["name"]) == 600


def test_clean_bounds_depth_and_numbers():
    deep = value = []
    for _ in range(400):
        value.append([])
        value = value[0]
    assert json.dumps(clean(deep)).count("[") < 20
    assert clean([10**400, float("nan"), True, None, 3]) == [None, None, True, None, 3]


ODD_HEADERS = [
    {"plan": {}},
    {"plan": {"name": 3, "models": [1], "attacks": {}, "defenses": None}},
    {"plan": {"name": "x", "models": [{"name": "m", "settings": [[1, 2, 3]]}], "attacks": [], }},
    {"plan": {"name": "x", "floor": [], "risk": "no", "threshold": "20", "public": 3}},
    {"plan": {"threshold": 10**299, "risk": {"probability": -1e299, "prior": 3}}},
    {"data": {}, "versions": {}, "machine": {}},
    {"data": {"examples": "many", "deep": [[[[[[[]]]]]]]}, "machine": {"device": 3}},
    {"cells": -1, "own_data": "no", "pictures": "no", "code": 7},
    {"cells": 10**60, "own_data": None, "code": {"a:b": "c"}},
    {"plan_hash": "<b>"},
]  # fmt: skip


@pytest.mark.parametrize("header", ODD_HEADERS, ids=range(len(ODD_HEADERS)))
def test_odd_headers_are_shown_or_refused_kindly(tmp_path, make_cell, make_run, header):
    text, content = made(make_run(tmp_path / "run", [make_cell()], **header))
    assert "None" not in re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL)
    assert content["subjects"][0]["rerun"]["plan"] is None


ODD_CELLS = [
    {"seed": 10**299, "batch_size": -3},
    {"threshold": {"metric": "ssim", "value": 0.5}},
    {"threshold": {"metric": "psnr", "value": 1e299}},
    {"release": {"withheld": "all"}},
    {"psnr": []},
    {"psnr": [None, None]},
    {"status": "not_applicable", "reason": "no"},
    {"bounds": [BOUND | {"excludes_threshold": False, "probability": 0.0, "accepted": 0.0}]},
]


@pytest.mark.parametrize("change", ODD_CELLS, ids=range(len(ODD_CELLS)))
def test_odd_records_are_shown(tmp_path, make_cell, make_run, change):
    psnr = change.get("psnr", [1.0, 2.0])
    cell = {**make_cell(), **{k: v for k, v in change.items() if k != "psnr"}}
    if cell["status"] != "ok":
        cell |= {"metrics": None, "blind": None}
    else:
        cell |= {"metrics": {"psnr": psnr}, "blind": {"psnr": [3.0] * len(psnr)}}
    made(make_run(tmp_path / "run", [cell]))


def test_several_runs_stand_on_one_page(tmp_path, make_cell, make_run):
    runs = [read(make_run(tmp_path / n, [make_cell()], plan={"name": n})) for n in ("one", "two")]
    subjects = [evidence.of_run(run, {}, accountant, images=True) for run in runs]
    content = evidence.document(subjects, images=True)
    VALIDATOR.validate(content)
    text = evidence.page(content, runs)
    assert re.findall(r"<h2[^>]*>Run: (\w+)", text) == ["one", "two"]
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_same_runs_same_bytes(tmp_path, make_floored):
    one, two = (made(make_floored(tmp_path / name))[0] for name in ("one", "two"))
    assert one == two


def test_the_page_is_shut_off_from_the_network(tmp_path, make_floored):
    text, _ = made(make_floored(tmp_path / "run"))
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text).group(1)
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline'")
    assert "script-src" not in policy
    assert re.findall(r'(?:src|href)="(?!data:|#)([^"]*)"', text) in (
        [],
        ["https://doi.org/10.6028/NIST.SP.800-226"],
    )


def test_every_field_of_the_schema_is_documented():
    docs = Path(evidence.__file__).parents[3] / "docs" / "evidence.md"
    if not docs.exists():
        pytest.skip("installed without its documentation")
    text, names = docs.read_text(encoding="utf-8"), set()

    def collect(part):
        for one in part if isinstance(part, list) else part.values():
            if isinstance(one, dict | list):
                collect(one)
        names.update(part.get("properties", {}) if isinstance(part, dict) else ())

    collect(json.loads(evidence.schema()))
    assert len(names) > 100
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []
    assert [name for name in STATEMENTS if f"| `{name}` |" not in text] == []


def test_the_schema_is_sound_and_refuses_what_it_should(tmp_path, make_floored):
    schema = json.loads(evidence.schema())
    jsonschema.Draft202012Validator.check_schema(schema)
    _, content = made(make_floored(tmp_path / "run"))
    for change in (
        lambda c: c.update(schema="leakbound-report/2"),
        lambda c: c.update(more=1),
        lambda c: c["subjects"][0]["declared"]["items"][0].update(status="fine"),
        lambda c: c["subjects"][0]["measured"]["combinations"][0].update(verdict="safe"),
        lambda c: c["subjects"][0]["attacker"]["ledger"][0].update(answer="maybe"),
        lambda c: c["subjects"][0].pop("rerun"),
    ):
        copy = json.loads(json.dumps(content))
        change(copy)
        assert not VALIDATOR.is_valid(copy)
