"""Audits of pruned models: masks in rounds and trainings, and what records say of them."""

import tomllib

import msgspec
import pytest
import torch

from leakbound import audit, registry
from leakbound._util import text
from leakbound.assess.record import Assessment
from leakbound.audit.attacked_round import attacked_round
from leakbound.audit.context import SCORED, PlanContext
from leakbound.audit.experiment import play_round
from leakbound.audit.plan import ModelSpec
from leakbound.core import Batch, Task, ThreatModel
from leakbound.defenses import NoDefense, chain
from leakbound.protocol import play
from leakbound.pruning import FedDST, PruneFL, Random, Snip, bytes_sent
from leakbound.randomness import stream
from leakbound.report.rerun import reruns, toml_of
from leakbound.report.tables import Names

SNIP = "snip,rate=0.5"


def _table(*schemes, **more):
    return {
        "data": {"source": "digits"},
        "models": [{"name": "mlp", "hidden": [16], "scheme": [*schemes]}],
        "attacks": [{"name": "inverting_gradients", "steps": 5}],
        "defenses": [{"name": "none"}],
        "risk": {"probability": 0},
        "error_bound": {"kind": "none"},
        **more,
    }


def _records(table):
    return [result.record for result in audit.run(audit.parse(table))]


def test_records_of_a_dense_model_say_nothing_of_pruning():
    utility = {"rounds": 2, "repeats": 1}
    dense = _records(_table("none", utility=utility))
    same = _table(utility=utility)
    del same["models"][0]["scheme"]
    assert [*map(msgspec.json.encode, _records(same))] == [*map(msgspec.json.encode, dense)]
    written = b"".join(map(msgspec.json.encode, dense))
    assert not any(word in written for word in (b"scheme", b"nmi", b"dense", b'"pruned"'))


def test_the_attacked_model_is_pruned_by_public_examples():
    (unit,) = audit.parse(_table(SNIP)).experiments()
    context = PlanContext(unit.data)
    seen = play_round(unit, context).observation
    dense = context.task(ModelSpec("mlp", (("hidden", (16,)),)), 0)
    public = context.batch(context.splits["public"][:SCORED])
    assert torch.equal(seen.task.kept, Snip(0.5).start(dense, public, stream(9)))
    assert torch.equal(seen.task.parameters, dense.parameters * seen.task.kept)
    assert not seen.update.rows[:, ~seen.task.kept].any()


def test_a_record_says_what_is_left_what_is_sent_and_what_is_withheld():
    defenses = [{"name": "none"}, {"name": "withhold", "rate": 0.25}]
    plain, held = _records(_table(SNIP, defenses=defenses))
    weights = 64 * 16 + 16 * 10
    biases = 26
    left = weights // 2
    assert plain.model.parameters["scheme"] == SNIP
    for one in (plain, held):
        assert one.release.training.kept == 0.5
        assert one.release.training.dense == 4 * (weights + biases)
        assert 0 <= one.release.training.accuracy <= 1
        assert {"nmi", "adjusted_mi"} <= set(one.metrics)
    assert plain.release.training.sent == 4 * (left + biases)
    assert plain.release.withheld == 0
    kept_back = round(held.release.withheld * (left + biases))
    assert abs(kept_back - 0.25 * left) < 8  # a layer's share is rounded
    mask = -(-(left + biases) // 8)
    assert held.release.training.sent == 4 * (left + biases - kept_back) + mask
    again = msgspec.json.decode(msgspec.json.encode(held), type=Assessment)
    assert again == held


def test_reports_and_masks_of_clients_count_among_bytes():
    task = Task.of(torch.nn.Linear(4, 2)).pruned(torch.arange(10) > 2)
    batch = Batch(torch.rand(1, 4), torch.tensor([1]))
    source = [stream(0, i) for i in range(2)]
    update = play(task, [batch], NoDefense(), source).update
    plain = 4 * 7
    assert bytes_sent(Random(), task, update, 2) == plain
    assert bytes_sent(PruneFL(every=2), task, update, 1) == plain
    assert bytes_sent(PruneFL(every=2), task, update, 2) == plain + 4 * 10
    assert bytes_sent(FedDST(every=2), task, update, 2) == plain + 1


@pytest.mark.parametrize("scheme", ["prune_fl,every=2", "fed_dst,every=2"])
def test_an_adaptive_scheme_changes_the_mask_only_where_it_adjusts(scheme):
    masks = []
    for number in range(1, 5):
        (unit,) = audit.parse(_table(scheme, rounds=number)).experiments()
        task = play_round(unit, PlanContext(unit.data)).observation.task
        masks.append(task.kept)
        assert not task.parameters[~task.kept].any()
    if scheme.startswith("prune_fl"):
        assert torch.equal(masks[0], masks[1])
    else:  # its clients choose masks of their own in the second round
        assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])
    assert len({int(mask.sum()) for mask in masks}) == 1


def test_the_next_mask_is_of_all_clients_reports():
    """PruneFL's mask after a round, from gradients and Adam's first step, which share no code."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 6))
    scheme = PruneFL(rate=0.5, every=1, candidates=0.5)
    start = torch.ones(102).bool()
    start[:48] = False
    task = Task.of(model, classes=6).pruned(start)
    own, other = (
        Batch(torch.rand(3, 1, 4, 4, generator=stream(i)), torch.arange(3) + i) for i in range(2)
    )
    played = attacked_round(
        task,
        [own],
        chain(NoDefense()),
        [stream(0, i) for i in range(2)],
        number=2,
        others=lambda number: [other],
        other_sources=[stream(0, "other")],
        threat=ThreatModel(),
        scheme=scheme,
    )
    weights = task.parameters.clone().requires_grad_()
    slopes = []
    for batch in (own, other):
        flat = batch.inputs.flatten(1)
        out = flat @ weights[:96].view(6, 16).T + weights[96:]
        loss = torch.nn.functional.cross_entropy(out, batch.labels)
        slopes.append(torch.autograd.grad(loss, weights)[0])
    mean = (slopes[0] + slopes[1]) / 2 * start
    after = (weights - 0.002 * mean.sign()).detach() * start  # Adam's first step
    report = (slopes[0].square() + slopes[1].square()) / 2
    alive = start[:96].nonzero().flatten()
    stay = alive[after[alive].abs().argsort(descending=True)[:24]]
    rest = torch.tensor(sorted({*range(96)} - {*stay.tolist()}))
    back = rest[report[rest].argsort(descending=True)[:24]]
    wanted = {*stay.tolist(), *back.tolist(), *range(96, 102)}
    assert {*played.observation.task.kept.nonzero().flatten().tolist()} == wanted


def test_a_restored_weight_starts_at_zero():
    """Not where the server's optimizer had it before the scheme removed it."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 6))
    scheme = PruneFL(rate=0.5, every=1, candidates=0.9)
    task = Task.of(model, classes=6)
    task = task.with_parameters(0.5 * torch.randn(102, generator=stream(3)))
    task = task.pruned(scheme.start(task, None, stream(0)))
    own, *rest = (
        Batch(torch.rand(3, 1, 4, 4, generator=stream(i)), (torch.arange(3) + i) % 6)
        for i in range(30)
    )
    tasks = [
        attacked_round(
            task,
            [own],
            chain(NoDefense()),
            [stream(0, i) for i in range(2)],
            number=number,
            others=lambda at: rest[at : at + 1],
            other_sources=[stream(0, "other")],
            threat=ThreatModel(),
            scheme=scheme,
        ).observation.task
        for number in range(1, 9)
    ]
    back = 0
    for before, restored, after in zip(tasks, tasks[1:], tasks[2:], strict=False):
        new = restored.kept & ~before.kept
        was = task.parameters[new] != 0
        assert not restored.parameters[new].any()
        back += int((was & after.kept[new]).sum())
        assert (after.parameters[new].abs() <= 0.01).all()  # at most some of Adam's steps
    assert back > 2


def test_what_clients_of_an_adaptive_scheme_add_is_covered_by_no_noise():
    noise = [{"name": "gaussian_noise"}, {"name": "pri_prune"}]
    utility = {"rounds": 1, "repeats": 1}
    found = _records(_table("prune_fl", defenses=noise, rounds=1, utility=utility))
    ended = {(type(r).__name__, r.defense.name): (r.status, r.reason) for r in found}
    for kind in ("Assessment", "Training"):
        status, reason = ended[kind, "gaussian_noise"]
        assert status == "not_applicable"
        assert "does not cover" in reason
        assert ended[kind, "pri_prune"][0] == "ok"


def test_a_training_says_what_is_left_and_sent():
    utility = {"rounds": 4, "clients": 2, "repeats": 1}
    dense, snip, fl = (
        r for r in _records(_table("none", SNIP, "prune_fl,rate=0.5,every=2", utility=utility))
        if hasattr(r, "training")
    )  # fmt: skip
    numbers = 64 * 16 + 16 * 10 + 26
    left = (64 * 16 + 16 * 10) // 2 + 26
    assert dense.pruned is msgspec.UNSET
    assert (snip.pruned.kept, snip.pruned.sent) == (0.5, 4 * left)
    assert (fl.pruned.kept, fl.pruned.sent) == (0.5, 4 * left + 4 * numbers // 2)
    assert snip.pruned.dense == 4 * numbers
    assert snip.pruned.accuracy == snip.accuracy
    assert len({dense.training_loss, snip.training_loss, fl.training_loss}) == 3


def test_a_plan_with_a_scheme_is_read_back_the_same():
    plan = audit.parse(_table("none", SNIP))
    kept = text.plain(plan)
    assert audit.parse(tomllib.loads(toml_of(kept)), name=plan.name).hash == plan.hash
    found = [result.record for result in audit.run(plan)]
    names = Names(found)
    assert [names.model(one) for one in found] == [
        "mlp (hidden=[16])",
        "mlp (hidden=[16], scheme=snip,rate=0.5)",
    ]
    assert {one.experiment for one in found} == set(reruns(kept, found))


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (["snipp"], "scheme 'snipp' is not known; did you mean 'snip'"),
        (["snip,rate=1"], "rate is 1.0"),
        ([], "scheme is an empty list"),
        ([0.3], "scheme is 0.3"),
        (["none", "none"], "twice"),
    ],
)
def test_odd_schemes_are_refused(scheme, words):
    with pytest.raises(ValueError, match=words):
        audit.parse(_table(*scheme))


def test_every_scheme_is_a_name_of_plans():
    known = registry.entries("scheme")
    plan = audit.parse(_table("none", *known))
    assert [type(one.scheme) for one in plan.models[1:]] == [one.build for one in known.values()]
    assert plan.models[0].scheme is None
