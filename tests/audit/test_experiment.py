import signal

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from leakbound import audit
from leakbound._util import stops
from leakbound.assess.measure import release_of
from leakbound.assess.record import ReleaseInfo, encode
from leakbound.audit import context as contexts
from leakbound.audit import engine
from leakbound.audit import experiment as experiments
from leakbound.core import Unit, Update


def test_a_cell_alone_and_in_the_grid_gives_the_same_record(table):
    """Whatever ran before, and however many threads torch has."""
    table["models"][0]["train_steps"] = 3
    table["attacks"] = [{"name": "inverting_gradients", "steps": 5}]
    plan = audit.parse(table)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        grid = {result.id: result for result in audit.run(plan)}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    for cell in reversed(plan.experiments()):
        alone = audit.run_experiment(cell, audit.PlanContext(plan.data))
        assert encode(alone.record) == encode(grid[cell.id].record)
        assert alone.pictures == grid[cell.id].pictures


def test_run_is_lazy_and_writes_nothing(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    started = []
    results = audit.run(tiny, done=[tiny.experiments()[0].id], started=started.append)
    assert not started
    first = next(results)
    assert len(started) == 1
    assert first.record.experiment == started[0].id
    assert len(list(results)) == 4
    assert list(tmp_path.iterdir()) == []


def test_pictures_are_named_and_may_be_left_out(tiny):
    cell, bench = tiny.experiments()[0], audit.PlanContext(tiny.data)
    result = audit.run_experiment(cell, bench)
    assert set(result.record.pictures.values()) == set(result.pictures)
    blind = audit.run_experiment(cell, bench, pictures=False)
    assert blind.pictures == {}
    assert blind.record == replace(result.record, pictures={})


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("a\n b"), "a b"),
        (OSError(28, "No space left"), "OSError: [Errno 28] No space left"),
        (MemoryError(), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory"),
        (TypeError("<f at 0x7f00aa>\ud800" + "x" * 9999), "TypeError: <f at 0x>"),
    ],
)
def test_what_a_cell_raises_becomes_its_record(tiny, monkeypatch, error, reason):
    bench = audit.PlanContext(tiny.data)
    with monkeypatch.context() as patch:
        patch.setattr(experiments, "_judge", _raise(error))
        patch.setattr(experiments, "train", _raise(error))
        record = audit.run_experiment(tiny.experiments()[0], bench).record
        training = experiments.run_training(tiny.trainings()[0], bench).record
    for failed in (record, training):
        assert failed.status == "failed"
        assert failed.reason.startswith(reason)
        assert len(encode(failed)) < 3000
        encode(failed).decode().encode("utf-8")
    assert (record.verdict, record.metrics) == ("undecided", {})
    assert training.accuracy is None
    died = experiments.died(tiny.experiments()[0], bench).record
    assert replace(died, reason=record.reason) == record


STOPS = [KeyboardInterrupt(), RuntimeError("in TorchScript\nRuntimeError: KeyboardInterrupt: ")]


@pytest.mark.parametrize("error", STOPS, ids=["ctrl-c", "hidden"])
def test_ctrl_c_is_no_failed_cell(tiny, monkeypatch, error):
    monkeypatch.setattr(experiments, "_judge", _raise(error))
    monkeypatch.setattr(experiments, "train", _raise(error))
    bench = audit.PlanContext(tiny.data)
    with pytest.raises(KeyboardInterrupt):
        audit.run_experiment(tiny.experiments()[0], bench)
    with pytest.raises(KeyboardInterrupt):
        experiments.run_training(tiny.trainings()[0], bench)
    with pytest.raises(KeyboardInterrupt):
        engine.run_experiments(tiny.experiments()[:2], bench)
    monkeypatch.undo()
    monkeypatch.setattr(experiments, "play_round", _raise(error))
    with pytest.raises(KeyboardInterrupt):
        engine.run_experiments(tiny.experiments()[:2], bench)


def test_nothing_that_follows_a_stop_is_a_result(tiny, monkeypatch):
    """Code in between may swallow the interrupt, and go on with less."""
    bench = audit.PlanContext(tiny.data)
    monkeypatch.setattr(stops, "_noted", signal.SIGTERM)
    with pytest.raises(stops.Terminated):
        audit.run_experiment(tiny.experiments()[0], bench)
    with pytest.raises(stops.Terminated):
        experiments.run_training(tiny.trainings()[0], bench)


def test_an_attack_that_does_not_apply(table):
    table["models"] = [{"name": "lenet"}]
    table["data"]["size"] = 32
    del table["utility"], table["defenses"]
    for result in audit.run(audit.parse(table)):
        assert result.record.status == "not_applicable"
        assert result.record.verdict is None
        assert result.record.reason


def test_too_large_batches_fail_and_are_never_cut(table):
    table |= {"batch_sizes": [20], "data": {"source": "digits", "limit": 30}}
    del table["utility"]
    plan = audit.parse(table)
    records = [result.record for result in audit.run(plan)]
    assert {record.status for record in records} == {"failed"}
    assert "20 examples, but the data has 18 private ones of 30" in records[0].reason
    with pytest.raises(ValueError, match="18 private ones"):
        contexts.check_plan(plan, audit.PlanContext(plan.data))


def test_pretraining_sees_public_images_only(table, monkeypatch):
    """Not the clients' images, and not those on which the accuracy is measured."""
    table["models"][0]["train_steps"] = 2
    bench = audit.PlanContext(audit.parse(table).data)
    assert bench.public is not None  # read before what is watched
    seen = []
    batch = type(bench.dataset).batch
    monkeypatch.setattr(
        type(bench.dataset), "batch", lambda self, i: seen.extend(i.tolist()) or batch(self, i)
    )
    bench.task(audit.parse(table).models[0], 0)
    assert len(seen) == 128
    assert set(seen) <= set(bench.splits["public"].tolist())


def test_utility_compares_defenses_on_the_same_weights_and_batches(table, monkeypatch):
    table["utility"] = {"rounds": 3, "repeats": 1}
    plan = audit.parse(table)
    seen = []
    from leakbound.audit import utility

    step = utility.step
    monkeypatch.setattr(utility, "step", lambda *a: seen.append(a[:2]) or step(*a))
    for cell in plan.trainings():
        experiments.run_training(cell, audit.PlanContext(plan.data))
    half = len(seen) // 2
    assert half == 3 * 4
    for (task, batch), (other_task, other) in zip(seen[:half], seen[half:], strict=True):
        assert torch.equal(batch.inputs, other.inputs)
        if task is seen[0][0]:
            assert torch.equal(task.parameters, other_task.parameters)


def test_utility_really_learns(table):
    table["models"] = [{"name": "mlp"}]
    del table["defenses"]
    rows = []
    for rounds in (1, 60):
        table["utility"] = {"rounds": rounds, "repeats": 1, "learning_rate": 0.005}
        plan = audit.parse(table)
        rows.append(experiments.run_training(plan.trainings()[0], audit.PlanContext(plan.data)))
    before, after = (result.record for result in rows)
    assert after.training_loss < before.training_loss / 3
    assert after.accuracy > 0.8


def test_weights_that_diverge_stop_the_plan(table, monkeypatch):
    table["models"][0]["train_steps"] = 1
    plan = audit.parse(table)
    monkeypatch.setattr(
        contexts.client, "gradient", lambda task, *_: torch.full_like(task.parameters, torch.nan)
    )
    with pytest.raises(ValueError, match="after 1 train_steps"):
        contexts.check_plan(plan, audit.PlanContext(plan.data))


def _raise(error):
    def fail(*_, **__):
        raise error

    return fail


def test_new_models_of_many_seeds_do_not_fill_the_memory(tiny, monkeypatch):
    """Those used last are kept, up to a number of weights; another is made again, the same."""
    bench, spec = audit.PlanContext(tiny.data), tiny.models[0]
    first = bench.task(spec, 0)
    monkeypatch.setattr(contexts, "MOST_WEIGHTS", 3 * len(first.parameters))
    others = [bench.task(spec, seed) for seed in (1, 2)]
    assert bench.task(spec, 0) is first
    bench.task(spec, 3)
    assert list(bench._new) == [(spec, 2), (spec, 0), (spec, 3)]
    again = bench.task(spec, 1)
    assert again is not others[0]
    assert torch.equal(again.parameters, others[0].parameters)
    monkeypatch.setattr(contexts, "MOST_WEIGHTS", 0)
    bench.task(spec, 4)
    assert list(bench._new) == [(spec, 4)]


def test_user_models_see_the_same_seed_everywhere(table, user_module):
    name = user_module(
        "randomly",
        """
        import math, torch
        def build(input_shape, classes):
            return torch.nn.Sequential(
                torch.nn.Flatten(), torch.nn.Linear(math.prod(input_shape), classes)
            )
        """,
    )
    table["models"] = [{"name": name}]
    plan = audit.parse(table)
    first, second = (audit.PlanContext(plan.data).task(plan.models[0], 0).parameters for _ in "12")
    assert torch.equal(first, second)
    assert not torch.equal(first, audit.PlanContext(plan.data).task(plan.models[0], 1).parameters)
    assert list(contexts.code(plan)) == [name]


def test_one_class_has_no_gradient_and_is_told(tmp_path):
    plan = audit.parse(
        {
            "data": {"source": "npz:" + str(tmp_path / "one.npz")},
            "models": [{"name": "mlp"}],
            "attacks": [{"name": "linear_inversion"}],
        }
    )
    np.savez(
        tmp_path / "one.npz",
        x=np.random.default_rng(0).integers(0, 256, (12, 8, 8)),
        y=np.zeros(12, np.int64),
    )
    with pytest.raises(ValueError, match=r"one class .* cross-entropy has no gradient"):
        audit.audit(plan, tmp_path / "out")


def test_what_a_record_says_of_the_release():
    rows = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    plain = Update(rows, Unit.CLIENT, (2,))
    known = ReleaseInfo(law="Exact", data_dependent=False, withheld=0.0, unit="client")
    assert release_of(plain, {}) == known
    largest = plain.masked(rows > 2, by_value=True)
    assert release_of(largest, {}) == replace(known, data_dependent=True, withheld=0.5)


def test_a_cell_computes_with_one_thread(tiny, monkeypatch):
    counted = []
    play = experiments.play_round
    monkeypatch.setattr(
        experiments,
        "play_round",
        lambda *given: counted.append(torch.get_num_threads()) or play(*given),
    )
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        audit.run_experiment(tiny.experiments()[0], audit.PlanContext(tiny.data))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert counted == [1]


def test_an_error_is_one_line_without_addresses():
    error = TypeError("bad <f at 0x7f01>" + chr(10) + "  twice")
    assert contexts.one_line(error) == "TypeError: bad <f at 0x> twice"
