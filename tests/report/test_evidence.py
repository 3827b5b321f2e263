"""The evidence: three kinds of risk kept apart, nothing green that nobody stated, nothing private
where no picture was asked for."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import jsonschema
import msgspec
import pytest
from msgspec.structs import replace

from leakbound.report import evidence, tables
from leakbound.report.evidence import STATEMENTS
from leakbound.report.evidence.parts import Epsilons, clean
from leakbound.report.folder import read
from leakbound.report.rerun import digest

VALIDATOR = jsonschema.Draft202012Validator(json.loads(evidence.schema()))
SIGNS = re.compile(r"complian|certif|conform|accredit|approv|attest|complies|audit.?proof", re.I)


def accountant(noise):
    return Epsilons(1e-5, 4 / noise, 8 / noise)


def made(folder, *, images=True, **statements):
    """The annex and the JSON value of one run folder, once it is valid."""
    run = read(folder)
    subject = evidence.of_run(run, statements, accountant, images=images)
    content = evidence.document([subject], images=images)
    return evidence.annex(content, [run]), valid(content)


def signed(folder, **statements):
    """The sign-off page of one run folder."""
    subject = evidence.of_run(read(folder), statements, accountant, images=True)
    return evidence.page(evidence.document([subject], images=True), [{"run.json": "0" * 64}])


def valid(content):
    """The JSON value of a report."""
    value = json.loads(json.dumps(msgspec.to_builtins(content), allow_nan=False))
    VALIDATOR.validate(value)
    return value


def section(text, number):
    """The text of one numbered part of the annex."""
    found = re.search(rf"<h3[^>]*>{number} .*?</section>", text, re.DOTALL)
    return found.group() if found else ""


def test_measured_bounded_and_declared_stand_apart(tmp_path, make_bounded):
    text, content = made(make_bounded(tmp_path / "run"))
    assert [section(text, n)[:60].split(">")[1][:12] for n in (1, 2, 3)] == [
        "1 Measured</", "2 Bounded</h", "3 Declared</",
    ]  # fmt: skip
    subject = content["subjects"][0]
    (row,) = [c for c in subject["configurations"] if c["defense"] == "no defense"]
    share = row["reconstructed"]
    assert (share["hits"], share["n"], share["level"]) == (6, 6, 0.95)
    # exact for all of n; the largest of two attacks, each with half the error
    assert share["low"] == pytest.approx(0.0125 ** (1 / 6))
    bound = subject["bounded"]["bounds"][0]
    theorem = subject["bounded"]["theorems"][bound["theorem"] - 1]
    assert theorem["equation"] == "paper A, section 2.2"
    assert theorem["assumptions"] == ["one"]
    assert bound["prior"] == theorem["prior"]
    assert theorem["covers"] == "all attackers"
    assert "paper A, section 2.2" in section(text, 2)
    assert "paper A, section 2.2" not in section(text, 1) + section(text, 3)
    assert subject["bounded"]["missing"][0]["reason"] in section(text, 2)


def test_what_nobody_states_is_not_stated_and_never_green(tmp_path, make_bounded):
    text, content = made(make_bounded(tmp_path / "run"))
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


def test_a_statement_is_declared_and_nothing_more(tmp_path, make_bounded):
    said = {name: f"{name} is as I say <b>" for name in STATEMENTS}
    text, content = made(make_bounded(tmp_path / "run"), **said)
    subject = content["subjects"][0]
    items = {item["name"]: item for item in subject["declared"]["items"]}
    for name in STATEMENTS:
        assert items[name]["value"] == said[name]
        assert items[name]["status"] == "declared"
        assert html.escape(said[name]) in section(text, 3)
    assert {one["accepted_by"] for one in subject["thresholds"]} == {said["accepted_by"]}


def test_thresholds_tell_their_origin(tmp_path, make_assessment, make_run):
    plan = {"name": "a", "psnr": 20.0, "risk": {"probability": 0.01, "prior": "mixture"}}
    _, content = made(make_run(tmp_path / "run", [make_assessment()], plan=plan))
    matched, accepted = content["subjects"][0]["thresholds"]
    assert matched["origin"].startswith("plan: criterion.psnr; it is the default")
    assert (accepted["value"], accepted["origin"]) == (0.01, "plan: risk.probability")
    assert matched["accepted_by"] == accepted["accepted_by"] == "not stated"
    _, content = made(make_run(tmp_path / "other", [make_assessment()], plan={"name": "a"}))
    matched, accepted = content["subjects"][0]["thresholds"]
    assert matched["origin"] == "the records; the plan names none"
    assert (accepted["value"], accepted["origin"]) == (None, "not stated")


@pytest.mark.parametrize(
    ("threat", "answers"),
    [
        ({"labels_known": True, "defense_known": True, "server": "honest",
          "statistics_known": False},
         {"labels": "yes", "defense": "yes", "statistics": "no", "malicious": "no",
          "mask": "yes"}),
        ({"labels_known": False, "defense_known": False, "server": "malicious",
          "statistics_known": True},
         {"labels": "no", "defense": "no", "statistics": "yes", "malicious": "yes",
          "mask": "no"}),
    ],
)  # fmt: skip
def test_the_table_says_what_attackers_knew(tmp_path, make_assessment, make_run, threat, answers):
    release = {"law": "Exact", "data_dependent": False, "withheld": 0.9, "unit": "client"}
    _, content = made(make_run(tmp_path / "run", [make_assessment(threat=threat, release=release)]))
    known = {line["name"]: line for line in content["subjects"][0]["attacker"]["auxiliary"]}
    assert {name: known[name]["answer"] for name in answers} == answers
    assert {known[name]["answer"] for name in ("batch_size", "model", "local_plan")} == {"yes"}
    assert {known[name]["answer"] for name in ("norms", "history", "noise")} == {"no"}
    assert all(line["source"] for line in known.values())


def test_experiments_that_differ_are_not_summed_up_as_yes(tmp_path, make_assessment, make_run):
    threat = make_assessment().threat
    cells = [make_assessment(threat=replace(threat, labels_known=one)) for one in (False, True)]
    _, content = made(make_run(tmp_path / "run", cells))
    known = {line["name"]: line for line in content["subjects"][0]["attacker"]["auxiliary"]}
    assert known["labels"]["answer"] == "in some experiments"


def test_a_claim_of_differential_privacy_answers_every_question(
    tmp_path, make_assessment, make_run, dp_sgd
):
    folder = make_run(tmp_path / "run", [make_assessment(defense=dp_sgd), make_assessment()])
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
    tmp_path, make_assessment, make_run, name, dp_sgd
):
    """Neither what is computed nor any other statement answers it."""
    folder = make_run(tmp_path / "run", [make_assessment(defense=dp_sgd), make_assessment()])
    others = {other: "said" for other in STATEMENTS if other != name}
    for said, status in ((others, "not stated"), (others | {name: "two guards"}, "declared")):
        text, content = made(folder, **said)
        (claim,) = content["subjects"][0]["differential_privacy"]
        (line,) = [item for item in claim["items"] if item["name"] == name]
        assert line["status"] == status
        assert ("two guards" in section(text, 9)) == (status == "declared")


def test_an_unknown_mechanism_has_no_epsilon(tmp_path, make_assessment, make_run, dp_sgd):
    for settings in (
        "MyMechanism()",
        dp_sgd.settings * 2,
        dp_sgd.settings.replace("0.5", "1e999"),
    ):
        folder = make_run(
            tmp_path / "run", [make_assessment(defense=replace(dp_sgd, settings=settings))]
        )
        _, content = made(folder)
        (claim,) = content["subjects"][0]["differential_privacy"]
        assert claim["epsilons"] is None
        items = {item["name"]: item for item in claim["items"]}
        assert items["parameters"]["status"] == items["sensitivity"]["status"] == "not stated"


def test_no_defense_that_claims_nothing_gets_the_questions(tmp_path, make_bounded):
    text, content = made(make_bounded(tmp_path / "run"))
    assert content["subjects"][0]["differential_privacy"] == []
    assert "No defense here claims differential privacy." in section(text, 9)


def test_the_corridor_joins_both_sides(tmp_path, make_bounded):
    text, content = made(make_bounded(tmp_path / "run"))
    rows = content["subjects"][0]["configurations"]
    noisy = [row for row in rows if row["error_bound"] is not None]
    assert len(noisy) == 4
    part = section(text, 6)
    assert part.count('class="excluded" x=') == len(noisy)
    assert part.count('class="reached" x=') == len(rows)
    assert part.count("no theorem") == len(rows) - len(noisy)


def test_a_strip_is_as_long_as_its_number(make_assessment, make_bound):
    from leakbound.report.evidence.charts import WIDTH, mean_errors, probabilities

    known = make_assessment(baseline=[None, None], psnr=[10.0, 10.0], bounds=[make_bound(30.0)])
    (row,) = tables.configurations([known], tables.Names([known]))
    (strip,) = mean_errors([row], None).rows
    assert strip.reached == pytest.approx(WIDTH * 5 / 30, abs=0.1)  # the axis runs from 5 to 35
    assert strip.excluded == pytest.approx(WIDTH * 25 / 30, abs=0.1)
    bound = tables.SuccessBoundRow(0.5, "sample", (), None, None, None, "p", 0.001, 1, 1, 1)
    row = replace(row, reconstructed=tables.share(1, 10), success_bound=bound)
    (strip,) = probabilities([row]).rows
    assert strip.reached == pytest.approx(WIDTH * 3 / 4, abs=0.1)  # from 1e-4 to 1, in decades


def test_the_strongest_attack_stands_with_its_pictures(tmp_path, make_bounded):
    text, content = made(make_bounded(tmp_path / "run"))
    assert content["images"] is True
    subject = content["subjects"][0]
    assert {one["attack"] for one in subject["strongest"]} == {"inverting_gradients"}
    shown = [name for one in subject["strongest"] for name in one["pictures"].values()]
    assert text.count("data:image/png") == len(shown)
    assert sum("leak_map" in one["pictures"] for one in subject["strongest"]) == 4
    for one in subject["strongest"]:
        (row,) = [c for c in subject["configurations"] if c["defense"] == one["defense"]]
        assert max(one["score"]) == row["best_score"]
        (own,) = [
            a for a in read(tmp_path / "run").assessments if a.experiment == one["experiment"]
        ]
        assert list(own.scores) == one["score"]


@pytest.mark.parametrize("kind", ["floored", "grid"])
def test_without_images_nothing_of_the_data_is_left(tmp_path, make_bounded, make_grid, kind):
    folder = (make_bounded if kind == "floored" else make_grid)(tmp_path / "run", seeds=2)
    text, content = made(folder, images=False)
    written = text + json.dumps(content)
    assert "data:image" not in written
    assert "<img" not in text
    assert not re.search(r"[0-9a-f]{16}\.png", written)
    assert {one["pictures"] for one in content["subjects"][0]["strongest"]} == {None}
    assert content["images"] is content["private_pictures"] is False
    assert "This page shows no example of the data." in text
    assert 'class="reached"' in text  # plots are no pictures of the data


def test_own_data_is_said_on_top(tmp_path, make_assessment, make_pictures, make_run):
    folder = tmp_path / "run"
    folder.mkdir()
    own = [make_assessment(pictures=make_pictures(folder, 0, 2, 0.1, 0))]
    words = "This page holds pictures of private data."
    assert words in made(make_run(folder, own, own_data=True))[0]
    assert words not in made(make_run(folder, own, own_data=False))[0]
    assert words not in made(make_run(folder, own, own_data=True), images=False)[0]


def test_utility_is_paired_by_seed_with_an_interval(
    tmp_path, make_assessment, make_run, make_training, dp_sgd
):
    plain = make_assessment().defense
    known = [(plain, 0, 0.9), (plain, 1, 0.8), (dp_sgd, 0, 0.7), (dp_sgd, 1, 0.7)]
    units = [make_training(*one) for one in known]
    _, content = made(make_run(tmp_path / "run", [make_assessment()], units))
    plain, private = content["subjects"][0]["utility"]
    assert plain["lost"] is None
    lost = private["lost"]
    assert lost["mean"] == pytest.approx(0.15)
    half = 12.7062047364 * 0.0707106781 / 2**0.5  # t quantile of one degree of freedom
    assert (lost["high"] - lost["low"]) / 2 == pytest.approx(half, rel=1e-6)


@pytest.mark.parametrize("what", ["plan", "verdict", "matched", "picture", "probability"])
def test_a_folder_that_was_changed_is_said_on_top(tmp_path, make_bounded, make_bound, change, what):
    folder = make_bounded(tmp_path / "run")
    # made up with a verdict that no bound gives: repair it
    change(
        folder,
        lambda a: {"verdict": "undecided"} if a.verdict == "protected from strangers" else {},
    )
    info = json.loads((folder / "run.json").read_text())
    info["plan_hash"] = digest(info["plan"])
    (folder / "run.json").write_text(json.dumps(info))
    assert "Does not hold:" not in made(folder)[0]
    last = read(folder).assessments[-1].experiment
    own = {"verdict": {"verdict": "protected from strangers"}, "matched": {"matched": (True, True)}}
    chance = {"psnr": None, "probability": 0.5, "accepted": 0.01, "excludes_threshold": True}
    own["probability"] = {"verdict": "protected from strangers", "bounds": (make_bound(**chance),)}
    if what == "plan":
        info["plan"]["seeds"] = [7]
        (folder / "run.json").write_text(json.dumps(info))
    elif what == "picture":
        picture = sorted((folder / "pictures").iterdir())[0]
        picture.write_bytes(picture.read_bytes() + b"x")
    else:
        change(folder, lambda a: own[what] if a.experiment == last else {})
    assert "Does not hold:" in made(folder)[0]
    assert "Do not sign before you know why." in signed(folder)


def test_unfinished_and_failed_runs_say_so(tmp_path, make_assessment, make_run):
    own = [make_assessment(), make_assessment(status="failed", reason="RuntimeError: x", seed=1)]
    text, content = made(make_run(tmp_path / "run", own, experiments=6))
    for written in (text, signed(tmp_path / "run")):
        assert "The run is not finished: 2 of 6 experiments are here." in written
        assert "1 of 2 experiments failed" in written
    assert content["subjects"][0]["measured"]["experiments"]["failed"] == 1


def test_no_word_of_a_stamp(tmp_path, make_bounded):
    own = Path(evidence.__file__).parent
    root = own.parent
    files = [*own.glob("*.py"), *root.glob("templates/evidence*"), *root.glob("templates/model*")]
    files += [root.parent / "cli" / "evidence.py"]
    docs = root.parents[2] / "docs" / "evidence.md"
    files += [docs] if docs.exists() else []
    texts = [path.read_text(encoding="utf-8") for path in files]
    text, _ = made(make_bounded(tmp_path / "run"))
    texts += [text, signed(tmp_path / "run")]
    for text in texts:
        of_an_attack = "certified=bool(record.certificate)", "a.certificate"
        for words in (*of_an_attack, "exposed (certified)", "CERTIFIED", "approvers"):
            text = text.replace(words, "")
        found = SIGNS.search(text)
        assert found is None, found


def test_hostile_text_is_escaped_cut_and_visible(
    tmp_path, make_grid, make_assessment, make_run, hostile
):
    text, _ = made(make_grid(tmp_path / "run", seeds=1))
    for written in (text, signed(tmp_path / "run", accepted_by=hostile)):
        assert hostile not in written
        assert "<script" not in written
        assert "<img src=x" not in written
    name = "a\u202eb\x00" + "x" * 5000
    text, content = made(
        make_run(tmp_path / "odd", [make_assessment(attack=name)], plan={"name": name})
    )
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


ODD_PLANS = [
    {},
    {"name": 3, "models": [1], "attacks": {}, "defenses": None},
    {"name": "x", "models": [{"name": "m", "settings": [[1, 2, 3]]}], "attacks": []},
    {"name": "x", "error_bound": [], "risk": "no", "psnr": "20", "public": 3},
    {"psnr": 10**299, "risk": {"probability": -1e299, "prior": 3}},
    {"deep": [[[[[[[]]]]]]]},
]


@pytest.mark.parametrize("plan", ODD_PLANS, ids=range(len(ODD_PLANS)))
def test_odd_plans_are_shown(tmp_path, make_assessment, make_run, plan):
    text, content = made(make_run(tmp_path / "run", [make_assessment()], plan=plan))
    assert "None" not in re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL)
    assert content["subjects"][0]["rerun"]["plan"] is None


@pytest.mark.parametrize(
    ("info", "place"),
    [
        ({"data": {}}, "data"),
        ({"plan": []}, "plan"),
        ({"versions": {"torch": 2}}, r"versions\[...\]"),
        ({"machine": {"device": [3]}}, r"machine\[...\]"),
        ({"experiments": -1}, "experiments"),
        ({"experiments": 10**60}, "experiments"),
        ({"own_data": "no"}, "own_data"),
        ({"pictures": "no"}, "pictures"),
        ({"code": 7}, "code"),
        ({"plan_hash": 3}, "plan_hash"),
    ],
)
def test_a_damaged_run_json_is_refused(tmp_path, make_assessment, make_run, info, place):
    folder = make_run(tmp_path / "run", [make_assessment()], **info)
    with pytest.raises(ValueError, match=rf"run\.json is damaged: .*`\$\.{place}`"):
        read(folder)


CHANCE = {"name": "p", "value": 0.5, "prior": "x", "rests_on_prior": True, "covers": "all"}
CHANCE |= {"psnr": None, "on_average": False, "excludes_threshold": False}
ODD_ASSESSMENTS = [
    {"seed": -(2**63), "batch_size": 2**63 - 1},
    {"criterion": {"value": 1000.0, "within": 1e-300}},
    {"psnr": []},
    {"psnr": [None, None]},
    {"status": "not_applicable", "reason": "no"},
    {"bounds": [CHANCE | {"probability": 0.0, "accepted": 0.0}]},
]


@pytest.mark.parametrize("change", ODD_ASSESSMENTS, ids=range(len(ODD_ASSESSMENTS)))
def test_odd_records_are_shown(tmp_path, make_assessment, make_run, change):
    made(make_run(tmp_path / "run", [make_assessment(**change)]))


def test_captured_updates_say_what_was_inferred_and_what_is_proved(tmp_path, make_captured):
    text, content = made(make_captured(tmp_path / "run"))
    (subject,) = content["subjects"]
    assert [check["holds"] for check in subject["checks"]] == [True, True, True]
    (row,) = subject["measured"]["captured"]
    assert (row["explained"], row["at_best_length"]) == (1.0, True)
    assert row["proof"].startswith("this is the input as the model was fed it")
    (best,), (kind,) = subject["strongest"], subject["configurations"]
    assert best["proof"] == row["proof"]
    assert (kind["verdict"], kind["proved"]) == ("exposed (certified)", 1)
    assert "1 input revealed exactly" in text
    assert "<strong>Proof:</strong>" in text
    names = {found["name"] for found in subject["attacker"]["inferred"]}
    assert names >= {"labels", "batch size"}
    assert subject["rerun"]["plan"] is None
    assert "The true examples of captured updates are not known" in text


def test_several_runs_stand_on_one_page(tmp_path, make_assessment, make_run):
    runs = [
        read(make_run(tmp_path / n, [make_assessment()], plan={"name": n})) for n in ("one", "two")
    ]
    subjects = [evidence.of_run(run, {}, accountant, images=True) for run in runs]
    content = evidence.document(subjects, images=True)
    valid(content)
    text = evidence.annex(content, runs)
    assert re.findall(r"<h2[^>]*>Run: (\w+)", text) == ["one", "two"]
    for written in (text, evidence.page(content)):
        ids = re.findall(r' id="([^"]+)"', written)
        assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(re.findall(r' id="([^"]+)"', text))


def test_same_runs_same_bytes(tmp_path, make_bounded):
    folders = [make_bounded(tmp_path / name) for name in ("one", "two")]
    for write in (lambda folder: made(folder)[0], signed):
        one, two = map(write, folders)
        assert one == two


def test_the_page_is_shut_off_from_the_network(tmp_path, make_bounded):
    text, _ = made(make_bounded(tmp_path / "run"))
    page = signed(tmp_path / "run")
    assert re.findall(r'(?:src|href)="(?!data:|#)([^"]*)"', page) == []
    assert "<script" not in text + page
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text).group(1)
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline'")
    assert "script-src" not in policy
    assert re.findall(r'(?:src|href)="(?!data:|#)([^"]*)"', text) in (
        [],
        ["https://doi.org/10.6028/NIST.SP.800-226"],
    )


def test_every_part_of_the_schema_says_what_it_is():
    schema = json.loads(evidence.schema())
    assert len(schema["$defs"]) > 30
    parts = {"the document": schema, **schema["$defs"]}
    assert [name for name, part in parts.items() if len(part.get("description", "")) < 15] == []


def test_every_statement_is_on_the_page_of_the_documentation():
    docs = Path(evidence.__file__).parents[4] / "docs" / "evidence.md"
    if not docs.exists():
        pytest.skip("installed without its documentation")
    text = docs.read_text(encoding="utf-8")
    assert [name for name in STATEMENTS if f"| `{name}` |" not in text] == []


def test_the_schema_is_sound_and_refuses_what_it_should(tmp_path, make_bounded):
    schema = json.loads(evidence.schema())
    jsonschema.Draft202012Validator.check_schema(schema)
    _, content = made(make_bounded(tmp_path / "run"))
    for change in (
        lambda c: c.update(schema="leakbound-report/2"),
        lambda c: c.update(more=1),
        lambda c: c["subjects"][0]["declared"]["items"][0].update(status="fine"),
        lambda c: c["subjects"][0]["configurations"][0].update(verdict="safe"),
        lambda c: c["subjects"][0]["attacker"]["auxiliary"][0].update(answer="maybe"),
        lambda c: c["subjects"][0].pop("rerun"),
    ):
        copy = json.loads(json.dumps(content))
        change(copy)
        assert not VALIDATOR.is_valid(copy)
