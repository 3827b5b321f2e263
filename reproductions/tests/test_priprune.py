"""The study of paper D: its cells, its journal, its claims on made-up records, and a small run."""

import json
import math
from dataclasses import replace

import pytest
import torch

from leakbound.defenses import Withhold
from leakbound_reproductions import words
from leakbound_reproductions.claim import Verdict
from leakbound_reproductions.outcome import SCALES
from leakbound_reproductions.priprune import cell as cells
from leakbound_reproductions.priprune import claims, comparisons, idle, reproduce, run, study
from leakbound_reproductions.priprune.measured import Measured
from leakbound_reproductions.priprune.study import Cell, Study
from leakbound_reproductions.reproductions import REPRODUCTIONS

PARTS = {"rate", "batch", "size", "rounds", "defended", "table", "search", "chain", "skew"}


def _cell(seed=0, part="x", **settings):
    base = {
        "data": "digits",
        "size": 8,
        "model": "conv,depth=1,width=1.0,hidden=16,activation=tanh",
        "pruning": "prune_fl,rate=0.3,every=2",
        "images": 300,
        "shared": 4,
        "steps": 10,
        "rounds": 3,
        "marks": (1, 3),
    }
    return Cell(part, seed, **(base | settings))


@pytest.mark.parametrize("name", SCALES)
def test_a_built_in_plan_names_what_there_is(name):
    study = Study.read(name)
    for cell in study.cells():
        cells.defense(cell.defense)
        if cell.pruning != "none":
            assert cells.built("scheme", cell.pruning).rate < 1
        assert set(cell.attacks) <= set(cells.attacks(1))
        assert all(1 <= mark <= cell.rounds for mark in cell.marks)
    if name != "paper":
        again = {"rate_again", "kept_again", "size_again"}
        parts = PARTS | (again if name == "cpu" else set())
        assert set(study.parts) == parts
        assert {cell.part for cell in study.cells()} == parts


def test_a_cell_of_two_parts_is_run_once():
    assert _cell(part="a").id == _cell(part="b").id != _cell(seed=1).id


def test_the_three_terms_keep_the_papers_ratio():
    study = Study.read("cpu")
    own = study.parts["search"]
    for cell in study.cells(["search"]):
        link = cells.defense(cell.defense).links[0]
        share = link.privacy / (link.sharing * own["weights"])
        wanted = [
            p / (s * 6_603_710) for p in own["privacy"] for s in own["sharing"] if p == link.privacy
        ]
        assert any(math.isclose(share, w, rel_tol=1e-3) for w in wanted)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Study.read("cpu").cells(["rates"]), "'rates' is not in the plan"),
        (lambda: Study.read("nowhere.toml"), "nowhere.toml"),
        (lambda: cells.defense("withold"), "withhold"),
        (lambda: cells.defense("withhold,rats=0.1"), "rate"),
    ],
    ids=["part", "plan", "defense", "setting"],
)
def test_what_is_wrong_is_named(call, words):
    with pytest.raises((ValueError, OSError), match=words):
        call()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[base]\ndata = 'digits'\n", "base lacks 'every'"),
        ("[base]\nrouns = 3\n", "did you mean 'rounds'"),
        ("[parts.rates]\nseeds = 1\n", "did you mean 'rate'"),
        (
            "[base]\ndata = 'digits'\nsize = 8\nmodel = 'mlp'\nevery = 2\n[parts.rate]\nseeds = 1",
            "part 'rate' lacks 'rates'",
        ),
    ],
    ids=["base", "key", "part", "setting"],
)
def test_a_plan_that_is_wrong_is_told_what(tmp_path, text, words):
    path = tmp_path / "plan.toml"
    path.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=words):
        Study.read(str(path)).cells()


def test_specs_are_read():
    chain = cells.defense("withhold,rule=mix,rate=0.6,pseudo=false + clip,clip_norm=2")
    assert chain.links[0] == Withhold("mix", 0.6, pseudo=False)
    assert chain.links[1].clip_norm == 2.0


def test_one_cell_gives_the_same_record_twice_and_measures_what_it_says():
    cell = _cell(defense="withhold,rate=0.25", attacks=("sgi", "rounds"))
    first, second = cells.run(cell), cells.run(cell)
    assert first == second == json.loads(json.dumps(first))
    assert [(a["round"], a["attack"]) for a in first["attacked"]] == [
        (1, "sgi"), (1, "rounds"), (3, "sgi"), (3, "rounds"),
    ]  # fmt: skip
    assert {a["status"] for a in first["attacked"]} == {"ok"}
    truth = cells.truth(cell)[0, 0].double().flatten()
    for row in first["attacked"]:
        guess = torch.tensor(row["guess"]).double() / 255
        psnr = -10 * math.log10(float((guess - truth).square().mean()))
        assert abs(psnr - row["psnr"][0]) < 0.3  # the guess is kept in 256 levels
    for one in first["rounds"]:
        assert abs(one["rate"] - 0.25) < 0.02
        assert one["mask_bits"] > 0
        assert abs(one["density"] - 0.7) < 0.01


def test_no_defense_withholds_nothing_and_its_mask_tells_nothing():
    record = cells.run(_cell(marks=(3,)))
    assert record["rounds"][0]["mask_bits"] == record["rounds"][0]["rate"] == 0
    assert record["accuracy"] == record["own_accuracy"]


@pytest.mark.parametrize("skew", ["equal", "5.0", "class"])
def test_clients_split_all_other_images(skew):
    cell = _cell(skew=skew, clients=5)
    parts, labels = cells._split(cell)
    assert len(parts) == 5 + 2
    assert sum(part.size for part in parts[:-2]) == cell.images
    assert labels == parts[0].labels.tolist()
    assert parts[0].size == cell.target


def test_a_journal_goes_on_after_a_line_that_was_cut(tmp_path):
    wanted = [_cell(seed=s, rounds=1, marks=(), attacks=()) for s in (0, 1)]
    whole = run.records(wanted, tmp_path, workers=1)
    path = tmp_path / "cells.jsonl"
    lines = path.read_text("utf-8").splitlines()
    path.write_text(lines[0] + "\n" + lines[1][:50], "utf-8")
    again = run.records(wanted, tmp_path, workers=1)
    assert again == whole
    assert set(run.read(path)) == {cell.id for cell in wanted}


def _record(cell, psnr, accuracy=0.95, attack="sgi", rate=0.3):
    chance = {"nmi": {"corrected": [psnr / 100], "permuted": [0.3], "unrelated": [0.3]}}
    rows = [
        {"round": mark, "attack": name, "status": "ok", "psnr": [psnr], "nmi": [psnr / 50],
         "ssim": [0.5], "adjusted_mi": [psnr / 60], "chance": chance}
        for mark in cell.marks for name in cell.attacks
    ]  # fmt: skip
    return {
        "id": cell.id,
        "weights": 1000,
        "accuracy": accuracy,
        "own_accuracy": accuracy,
        "rates": {str(cell.rounds): [rate]},
        "rounds": [{"round": m, "rate": rate, "density": 0.7, "mask_bits": 80} for m in cell.marks],
        "attacked": rows,
    }


def _measured(rows):
    return Measured([(cell, _record(cell, **values)) for cell, values in rows])


def _words(found, number):
    return [row.word for row in comparisons.comparisons(found) if row.number == number]


@pytest.mark.parametrize(("sign", "word"), [(1, "holds"), (-1, "does not hold")])
def test_claims_on_rates_and_on_blind_attacks(sign, word):
    rows = []
    for seed in range(4):
        for rate in (0.1, 0.9):
            cell = _cell(seed, "rate", pruning=f"snip,rate={rate}", attacks=("sgi",), marks=(1,))
            rows.append((cell, {"psnr": 20 - sign * 10 * rate + 0.1 * seed}))
    assert _words(_measured(rows), "4-1") == [word] * 2
    pairs = []
    for seed in range(4):
        cell = _cell(seed, "rate", attacks=("sgi",), marks=(1,))
        record = _record(cell, 20 + 0.1 * seed)
        blind = _record(_cell(seed, "rate", attacks=("gi",), marks=(1,)), 20 - sign * 3)
        record["attacked"] += blind["attacked"]
        pairs.append((cell, record))
    assert _words(Measured(pairs), "4-2") == [word] * 2


@pytest.mark.parametrize(
    ("drop", "word"), [(0.002, "holds"), (0.05, "does not hold"), (0.012, "undecided")]
)
def test_accuracy_within_a_point(drop, word):
    rows = []
    for seed in range(5):
        noise = 0.004 * (seed - 2)
        base = _cell(seed, "defended")
        rows.append((base, {"psnr": 30.0, "accuracy": 0.95}))
        own = _cell(seed, "defended", defense="pri_prune")
        rows.append((own, {"psnr": 10.0 + seed, "accuracy": 0.95 - drop + noise}))
    found = comparisons.comparisons(_measured(rows))
    (within,) = [c for c in found if "within 1 point" in c.statement]
    assert within.word == word
    assert any(c.word == "holds" and "leaks less than PruneFL alone" in c.statement for c in found)


def test_the_strongest_attack_counts():
    pairs = []
    for seed in range(3):
        cell = _cell(seed, attacks=("sgi",), marks=(3,))
        record = _record(cell, 10.0)
        record["attacked"] += _record(_cell(seed, attacks=("rounds",), marks=(3,)), 30.0)[
            "attacked"
        ]
        pairs.append((cell, record))
    name, reached = Measured(pairs).strongest(3)
    assert (name, set(reached.values())) == ("rounds", {30.0})


def test_attacks_are_compared_on_the_seeds_that_all_attacked():
    pairs = []
    for seed, (alone, together) in enumerate([(10.0, 20.0), (12.0, 18.0), (40.0, None)]):
        cell = _cell(seed, attacks=("sgi",), marks=(1, 3))
        record = _record(cell, alone)
        if together:
            record["attacked"] += _record(_cell(attacks=("rounds",), marks=(3,)), together)[
                "attacked"
            ]
        pairs.append((cell, record))
    found = Measured(pairs)
    assert found.strongest(3) == ("rounds", {0: 20.0, 1: 18.0})
    assert found.strongest(1) == ("sgi", {0: 10.0, 1: 12.0, 2: 40.0})
    assert found.worst() == ("round 3, rounds", {0: 20.0, 1: 18.0})


def test_attackers_of_several_rounds_attack_the_first_seeds():
    many = {"rounds", "mixed"}
    found = Study.read("cpu")
    for part in ("defended", "table", "search"):
        own = found.parts[part]
        for cell in found.cells([part]):
            first = cell.seed < own["strong_seeds"]
            pseudo = cell.defense != "none" and "pseudo=false" not in cell.defense
            assert bool(many & set(cell.attacks)) == (first and (pseudo or part == "table"))
            assert ("ordered" in cell.attacks) == ("largest" in cell.defense)


RANKS = {"largest": 0.0, "mix": 1.0, "random": 2.0}


def _true(cell, wrong=0):
    """PSNR and accuracy as the paper has them; `wrong` turns one claim round."""
    noise = 0.02 * ((cell.seed * 5 + len(cell.defense)) % 7 - 3)
    right, psnr = 0.95, 30.0 + noise
    if cell.part == "rate":
        rate = float(cell.pruning.split("rate=")[1].split(",")[0])
        psnr -= (10 if wrong != 1 else -10) * rate**2
    if cell.part == "batch":
        psnr -= cell.target if wrong != 3 else -cell.target
    if cell.part == "size":
        depth = int(cell.model.split("depth=")[1][0])
        psnr += {1: 0.0, 2: 8.0, 4: 9.0 if wrong != 4 else -9.0}[depth]
    for rule, rank in RANKS.items():
        if rule in cell.defense:
            psnr -= 12.0 - 2 * rank
            kept = "pseudo=false" not in cell.defense
            right -= 0.001 if kept == (wrong != 6) else 0.03 * (3 - rank)
            psnr -= 5.0 * kept
            psnr -= 8.0 * ("rate=0.6" in cell.defense)
    if wrong == 5 and "rule=mix" in cell.defense:
        psnr -= 9.0
    if "pri_prune" in cell.defense:
        psnr -= 22.0 if wrong not in (7, 8) else 1.0 if wrong == 7 else -1.0
        right -= 0.002
    if cell.part == "search":
        psnr -= float(cell.defense.split("privacy=")[1].split(",")[0]) * (
            0.3 if wrong != 9 else -0.3
        )
    return {"psnr": psnr, "accuracy": right + 0.001 * (cell.seed % 2)}


def _small(wrong=0):
    pairs = []
    weights = {1: 1000, 2: 2000, 4: 9000}
    for cell in Study.read("minutes").cells():
        if cell.marks:
            record = _record(cell, **_true(cell, wrong))
            gained = {"gi": -6.0, "sgi_pruned": 0.0}
            for row in record["attacked"]:
                off = gained.get(row["attack"], 0.0) * (-1 if wrong == 2 else 1)
                row["nmi"] = [(row["psnr"][0] + off) / 50]
            depth = int(cell.model.split("depth=")[1][0])
            pairs.append((cell, record | {"weights": weights[depth]}))
    return Measured(pairs)


def test_all_claims_hold_where_the_paper_is_right():
    found = claims.claims(_small(), "made up")
    assert [claim.number for claim in found] == [f"4-{i}" for i in range(1, 10)]
    assert {claim.number: claim.verdict for claim in found} == {
        claim.number: Verdict.HOLDS for claim in found
    }
    for claim in found:
        assert "seeds" in claim.scale
        assert all(one.n >= 3 for one in claim.findings), claim.number
    (eighth,) = (claim for claim in found if claim.number == "4-8")
    assert "0.22 - 0.12" in eighth.findings[0].paper
    assert "prune_fl" in eighth.why, "the strongest attacker is a remark"


@pytest.mark.parametrize("wrong", range(1, 10))
def test_a_claim_falls_where_the_paper_is_wrong(wrong):
    found = {claim.number: claim.verdict for claim in claims.claims(_small(wrong), "made up")}
    assert found[f"4-{wrong}"] is Verdict.FAILS, found


def _in_time(early, late):
    """PriPrune and the largest 60 % beside PruneFL: NMI in rounds 1 and 20."""
    pairs = []
    for seed in range(6):
        for defense in ("none", "withhold,rule=largest,rate=0.6", "pri_prune"):
            cell = _cell(seed, "defended", defense=defense, rounds=20, marks=(1, 20))
            record = _record(cell, 30.0)
            for row, value in zip(record["attacked"], (early[defense], late[defense]), strict=True):
                row["nmi"] = [value + 0.001 * (seed % 3)]
            pairs.append((cell, record))
    return claims.as_base(Measured(pairs), "made up")


LARGEST = {"none": 0.7, "withhold,rule=largest,rate=0.6": 0.4}


def test_rounds_in_which_no_mask_can_withhold_yet_are_not_judged():
    """Alpha starts at 0.2: logit -1.39, 0.1 a step."""
    assert idle.first(Measured([(_cell(defense="pri_prune"), {})])) == 14
    assert idle.first(Measured([(_cell(defense="pri_prune,start=0.45"), {})])) == 3
    assert idle.first(Measured([(_cell(), {})])) == 0
    same, half = LARGEST | {"pri_prune": 0.7}, LARGEST | {"pri_prune": 0.41}
    found = _in_time(same, half)
    assert found.verdict is Verdict.HOLDS
    assert "Before round 14" in found.why
    assert "30 % in round 20" in found.why
    assert "SGI in round 20;" in found.scale
    assert _in_time(half, same).verdict is Verdict.FAILS


def test_what_is_measured_again_has_seeds_of_its_own():
    plan = Study.read("cpu")
    for new, old in (
        ("rate_again", "rate"),
        ("kept_again", "defended"),
        ("size_again", "size"),
    ):
        seeds = [{cell.seed for cell in plan.cells([part])} for part in (new, old)]
        assert not seeds[0] & seeds[1]
        assert len(seeds[0]) >= 40


def _torn(part, wrong):
    """A first run whose seeds contradict each other, so that it decides nothing."""
    right, against = (_small(way).where(part=part).pairs for way in (0, wrong))
    return [pair[cell.seed % 2] for (cell, _), *pair in zip(right, right, against, strict=True)]


def _later(part, wrong=0):
    """The same part again, on other seeds."""
    pairs = _small(wrong).where(part=part).pairs
    return [(replace(cell, part=f"{part}_again", seed=cell.seed + 100), rec) for cell, rec in pairs]


@pytest.mark.parametrize(
    ("part", "wrong", "judge"), [("rate", 1, claims.rate_lowers), ("size", 4, claims.size_raises)]
)
def test_what_a_first_run_left_undecided_is_judged_by_the_second(part, wrong, judge):
    def judged(*runs):
        pairs = [pair for run in runs for pair in run if not pair[0].dense_server]
        return judge(Measured(pairs), "made up")

    torn = _torn(part, wrong)
    assert judged(torn).verdict is Verdict.UNDECIDED
    assert judged(torn, _later(part)).verdict is Verdict.HOLDS
    assert judged(torn, _later(part, wrong)).verdict is Verdict.FAILS
    every = judged(torn).findings
    found = judged(torn, _later(part))
    assert "A first run was undecided" in found.why
    assert all(f"{one.statement}: {words.measured(one)}" in found.why for one in every)
    for first, second in ((0, wrong), (wrong, 0)):
        pairs = _small(first).where(part=part).pairs
        found = judged(pairs, _later(part, second))
        assert found.verdict is judged(pairs).verdict, "a decision stays"
        assert "do not change the verdict" in found.why


def test_one_rules_accuracy_is_judged_by_the_second_run():
    again = [(c, rec) for c, rec in _later("defended") if "rule=random" in c.defense]
    judged = claims.pseudo_raises(Measured(_torn("defended", 6)), Measured(again), "made up")
    word = {one.statement: one.verdict for one in judged.findings}
    accuracy = "{}: accuracy with pseudo-pruning minus that of real pruning"
    assert word[accuracy.format("random")] is Verdict.HOLDS
    assert {word[accuracy.format(rule)] for rule in ("largest", "mix")} == {Verdict.UNDECIDED}
    assert "First run, random: accuracy" in judged.why
    assert f"{len({c.seed for c, _ in again})} others for the accuracy of one rule" in judged.scale


@pytest.mark.parametrize("part", ["batch", "size"])
def test_psnr_decides_nothing_where_the_paper_does_not_show_it(part):
    judge = {"batch": claims.batch_lowers, "size": claims.size_raises}[part]
    pairs = _small().where(part=part).pairs
    for _, record in pairs:
        for row in record["attacked"]:
            row["psnr"] = [60 - row["psnr"][0]]
    found = judge(Measured(pairs), "made up")
    assert found.verdict is Verdict.HOLDS
    assert "PSNR" in found.why


def test_one_scheme_that_gains_nothing_is_enough():
    pairs = [
        (cell, _record(cell, 31.0) if "pri_prune" in cell.defense and "snip" in cell.pruning else r)
        for cell, r in _small().where(part="table").pairs
    ]
    assert claims.table(Measured(pairs), "").verdict is Verdict.FAILS


def test_without_cells_a_claim_says_why():
    for claim in claims.claims(Measured([]), "nothing"):
        assert claim.verdict is Verdict.UNTESTED
        assert "fewer than two seeds" in claim.why


def test_models_are_compared_in_depth():
    weights = {"conv,depth=1,hidden=4": 1, "conv,depth=2,hidden=4": 2, "conv,depth=2,hidden=8": 3}
    assert list(claims.in_depth(weights)) == ["conv,depth=1,hidden=4", "conv,depth=2,hidden=4"]
    assert claims.in_depth({}) == {}


def test_the_papers_weights_for_each_scheme():
    for cell in Study.read("cpu").cells(["table"]):
        if cell.defense != "none":
            link = cells.defense(cell.defense).links[0]
            accuracy, privacy, share = study.PAPER[cell.pruning.split(",")[0]]
            assert (link.accuracy, link.privacy) == (accuracy, privacy)
            assert link.sharing * 9000 == pytest.approx(share * 6_603_710, rel=1e-3)


def test_the_paper_reproduced_gives_every_claim_and_its_files(tmp_path, monkeypatch):
    """The whole way at a tiny plan, really trained and attacked; a second call runs nothing."""
    whole = Study.read("minutes")
    base = whole.base | {"rounds": 2, "marks": [1, 2], "steps": 2, "images": 200, "shared": 2}
    few = {
        "rate": {"seeds": 2, "rates": [0.1, 0.9]},
        "batch": {"seeds": 2, "sizes": [1, 2]},
        "size": whole.parts["size"] | {"seeds": 2},
        "rounds": {"seeds": 1},
        "defended": {"seeds": 2, "defenses": ["none", "pri_prune,start=0.45"]},
        "table": {"seeds": 2, "weights": 1000},
    }
    monkeypatch.setattr(reproduce.Study, "read", lambda scale: Study(base, few))
    monkeypatch.setattr(study, "SCHEMES", ("snip",))
    monkeypatch.setattr(reproduce.page.theory, "rows", lambda study: [])
    told = []
    given = {"workers": 1, "color": "photos", "tell": lambda *now: told.append(now)}
    found = reproduce.reproduce("minutes", tmp_path, **given)
    assert [claim.number for claim in found.claims] == [f"4-{i}" for i in range(1, 10)]
    assert {c.number for c in found.claims if c.verdict is Verdict.UNTESTED} >= {"4-5", "4-9"}
    numbers = {number for figure in found.figures for number in figure.numbers}
    assert numbers == {*REPRODUCTIONS["priprune"].figures}
    for name in (*(figure.file for figure in found.figures), *found.pages):
        assert (tmp_path / name).stat().st_size > 2000, name
    assert found.pages == ("tables.md",)
    assert "parameters.png" in {figure.file for figure in found.figures}
    counts = [now for now in told if now[0] == "cells"]
    assert counts[0][1] == 0
    assert counts[-1][1] == counts[-1][2]
    told.clear()
    assert reproduce.reproduce("minutes", tmp_path, **given) == found
    assert [now for now in told if now[0] == "cells"] == [counts[-1]]
    with pytest.raises(ValueError, match="scale is 'hours'"):
        reproduce.reproduce("hours", tmp_path, **given)
