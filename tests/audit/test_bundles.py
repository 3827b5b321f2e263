"""Cells that are computed together: every record is the one that its cell has alone."""

from collections import Counter

import pytest
import torch

from leakbound import audit
from leakbound.assess.record import encode
from leakbound.attacks import BestOf
from leakbound.attacks.matching import attack as matching
from leakbound.audit import engine
from leakbound.audit import experiment as experiments
from leakbound.audit.engine import bundles, run_experiments
from leakbound.audit.plan import Experiment
from leakbound.core import NotApplicable


@pytest.fixture
def table(table):
    """Two models, two attacks, four defenses, two seeds, batches of one and two."""
    del table["utility"]
    table["models"] = [
        {"name": "mlp", "hidden": [16]},
        {"name": "conv", "depth": 2, "width": 0.1, "hidden": 9},
    ]
    table["attacks"] = [
        {"name": "inverting_gradients", "steps": 3, "restarts": 2},
        {"name": "linear_inversion"},
    ]
    table["defenses"] = [
        {"name": "none"},
        {"name": "gaussian_noise", "noise_std": 0.1},
        {"name": "gradient_dropout", "rate": 1.0},
        {"name": "dp_sgd", "noise_multiplier": 0.1},
    ]
    table["batch_sizes"], table["seeds"] = [1, 2], [0, 1]
    return table


@pytest.fixture
def few(table):
    """Nine cells that go together, of one model."""
    table["models"], table["batch_sizes"] = table["models"][:1], [1]
    table["attacks"], table["seeds"] = table["attacks"][:1], [0, 1, 2]
    table["defenses"] = table["defenses"][:2]
    table["defenses"][1]["noise_std"] = [0.001, 0.1]
    plan = audit.parse(table)
    assert len(plan.experiments()) == 9
    return plan


_KNOWN = {}


def _alone(plan):
    """The results of each cell alone: computed once, for many tests ask for those of `few`."""
    key = tuple(cell.id for cell in plan.experiments())
    if key not in _KNOWN:
        bench = audit.PlanContext(plan.data)
        _KNOWN[key] = {cell.id: audit.run_experiment(cell, bench) for cell in plan.experiments()}
    return _KNOWN[key]


def _same(found, wanted):
    assert set(found) == set(wanted)
    for id, result in found.items():
        assert encode(result.record) == encode(wanted[id].record)
        assert result.pictures == wanted[id].pictures


def _collected(results):
    results = list(results)
    found = {result.id: result for result in results}
    assert len(found) == len(results)
    return found


def test_records_are_those_of_each_cell_alone(table):
    table["batch_sizes"] = [2]
    plan = audit.parse(table)
    found = _collected(audit.run(plan))
    _same(found, _alone(plan))
    statuses = Counter(result.record.status for result in found.values())
    assert set(statuses) == {"ok", "not_applicable"}
    problems = {str(result.record.problem)[:17] for result in found.values()}
    assert "gradient vanished" in problems


def test_two_workers_give_the_same_records(few):
    _same(_collected(audit.run(few, workers=2)), _alone(few))


@pytest.mark.slow
def test_two_workers_give_the_same_records_of_a_large_plan(table):
    table["utility"] = {"rounds": 2, "repeats": 1}
    plan = audit.parse(table)
    found = _collected(audit.run(plan, workers=2))
    cells = {cell.id for cell in plan.experiments()}
    assert set(found) - cells == {unit.id for unit in plan.trainings()}
    _same({id: result for id, result in found.items() if id in cells}, _alone(plan))


@pytest.mark.parametrize("done", [(0,), (1, 2, 5), (0, 1, 2, 3, 4, 5, 6, 7)], ids=str)
def test_a_resumed_run_gives_the_same_records(few, done):
    ids = [few.experiments()[place].id for place in done]
    wanted = {id: result for id, result in _alone(few).items() if id not in ids}
    _same(_collected(audit.run(few, done=ids)), wanted)


def test_cells_are_started_before_their_results_come(few):
    events = []
    for result in audit.run(few, started=lambda unit: events.append(("started", unit.id))):
        events.append(("done", result.id))
    assert Counter(kind for kind, _ in events) == {"started": 9, "done": 9}
    for cell in few.experiments():
        assert events.index(("started", cell.id)) < events.index(("done", cell.id))


NOT_THIS, CRASH = NotApplicable("not\n this"), RuntimeError("crash")


@pytest.mark.parametrize(
    ("stage", "error", "status"),
    [
        ("attack", NOT_THIS, "not_applicable"),
        ("attack", CRASH, "failed"),
        ("round", NOT_THIS, "not_applicable"),
        ("verdict", CRASH, "failed"),
    ],
    ids=str,
)
def test_one_that_throws_leaves_the_others_alone(few, monkeypatch, error, status, stage):
    wanted, victim = _alone(few), few.experiments()[4]
    if stage == "attack":
        begin, source = matching.begin, experiments.source_of(victim).initial_seed()

        def search(settings, objective, generator, **more):
            # its stream is shared with the other defenses: those of its seed all throw
            if generator.initial_seed() == source:
                raise error
            return begin(settings, objective, generator, **more)

        monkeypatch.setattr(matching, "begin", search)
        victims = {cell.id for cell in few.experiments() if cell.seed == victim.seed}
    else:
        name = "play_round" if stage == "round" else "_judge"
        function, place = getattr(experiments, name), 0 if stage == "round" else 1

        def wrapped(*given):
            if given[place].id == victim.id:
                raise error
            return function(*given)

        monkeypatch.setattr(experiments, name, wrapped)
        victims = {victim.id}
    found = _collected(audit.run(few))
    others = {id: result for id, result in found.items() if id not in victims}
    _same(others, {id: result for id, result in wanted.items() if id not in victims})
    for id in victims:
        assert found[id].record.status == status
        assert found[id].record.reason in ("not this", "RuntimeError: crash")
    assert len(found) == len(wanted)


def test_ctrl_c_is_no_failed_cell(few, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(experiments, "play_round", stop)
    with pytest.raises(KeyboardInterrupt):
        list(audit.run(few))


def test_a_model_that_cannot_be_built_fails_alone(table, user_module):
    broken = user_module(
        "broken",
        """
        def build(input_shape, classes):
            raise RuntimeError("no weights here")
        """,
    )
    table["models"] = [table["models"][0], {"name": broken}]
    table["defenses"], table["batch_sizes"] = table["defenses"][:1], [1]
    plan = audit.parse(table)
    found = _collected(audit.run(plan))
    statuses = {(c.model.name == broken, found[c.id].record.status) for c in plan.experiments()}
    assert statuses == {(True, "failed"), (False, "ok")}


def test_threads_are_put_back(few):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        run_experiments(few.experiments(), audit.PlanContext(few.data))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_what_goes_together(table):
    """Never other models or batch sizes; each unit once; all attacks on a release together."""
    table["utility"], table["seeds"] = {"rounds": 1, "repeats": 2}, [0, 1, 2]
    table["attacks"].append({"name": "inverting_gradients", "steps": 4})
    plan = audit.parse(table)
    units = [*plan.trainings(), *plan.experiments()]
    found = bundles(units, audit.PlanContext(plan.data), 2)
    together = [unit for bundle in found for unit in bundle]
    assert Counter(unit.id for unit in together) == Counter(unit.id for unit in units)
    places = {}
    for number, bundle in enumerate(found):
        if not isinstance(bundle[0], Experiment):
            assert len(bundle) == 1
            continue
        assert len({(unit.model, unit.batch_size) for unit in bundle}) == 1
        seeds = [unit.seed for unit in bundle]
        assert seeds == sorted(seeds)
        for unit in bundle:
            release = unit.model, unit.batch_size, unit.seed, unit.defense
            assert places.setdefault(release, number) == number
    assert len(set(places.values())) < len(places)
    assert [*map(len, found)] == sorted(map(len, found), reverse=True)


@pytest.mark.parametrize("workers", [1, 2, 4, 9, 40])
def test_few_cells_are_spread_over_all_workers(few, workers):
    found = bundles(few.experiments(), audit.PlanContext(few.data), workers)
    releases = [{(unit.seed, unit.defense) for unit in bundle} for bundle in found]
    assert sum(map(len, releases)) == 9
    assert max(map(len, releases)) == max(1, -(-9 // workers))


def test_large_models_go_alone(few, monkeypatch):
    bench = audit.PlanContext(few.data)
    size = bench.size(few.models[0])
    monkeypatch.setattr(engine, "LARGEST", size)
    assert len(bundles(few.experiments(), bench)) == 1
    monkeypatch.setattr(engine, "LARGEST", size - 1)
    assert [len(bundle) for bundle in bundles(few.experiments(), bench)] == [1] * 9


def test_one_cell_alone_needs_no_company(few, monkeypatch):
    monkeypatch.setattr(engine, "_both", None)
    cell, bench = few.experiments()[0], audit.PlanContext(few.data)
    assert run_experiments([cell], bench)[0].record.status == "ok"


def test_an_attack_that_loses_answers_does_not_end_the_audit(few, monkeypatch):
    monkeypatch.setattr(BestOf, "many", lambda *given: [])
    found = _collected(audit.run(few))
    assert len(found) == 9
    for result in found.values():
        assert result.record.status == "failed"
        assert result.record.reason == "many returned 0 answers to 1"
