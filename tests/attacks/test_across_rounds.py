"""One guess for several rounds of a client that keeps the weights it withholds."""

from dataclasses import replace

import pytest
import torch

from leakbound import data, models
from leakbound.attacks import GradientMatching
from leakbound.attacks.across_rounds import AcrossRounds, over_rounds
from leakbound.attacks.matching.loop import begin, solve
from leakbound.attacks.matching.objective import Objective
from leakbound.attacks.sparse_inversion import SparseInversion, evidence
from leakbound.core import Batch, LocalPlan, NotApplicable, Observation, Task, Unit, Update
from leakbound.metrics import psnr
from leakbound.pairing import pair
from leakbound.randomness import stream, uniform

ROUNDS = 4


def digits(seed, size=1):
    known = data.load("digits")
    order = torch.randperm(len(known.inputs), generator=stream(seed, "batch"))[:size]
    return Batch(known.inputs[order], known.labels[order])


def task_of(seed, activation="relu", steps=1, kept=None, dtype=torch.float32):
    generator, shape = stream(seed, "model"), (1, 8, 8)
    model = models.mlp(
        input_shape=shape, classes=10, generator=generator, hidden=(32,), activation=activation
    )
    task = Task.of(model, classes=10, plan=LocalPlan(steps, 0.1)).to("cpu", dtype)
    return task.pruned(kept)


def descended(task, start, batch):
    """Weights after the local steps, by plain SGD on the module."""
    model, plan = task.model.requires_grad_(True), task.plan
    torch.nn.utils.vector_to_parameters(start.clone(), model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=plan.learning_rate)
    for _ in range(plan.steps):
        optimizer.zero_grad()
        output = model(batch.inputs.to(start))
        torch.nn.functional.cross_entropy(output, batch.labels).backward()
        if task.kept is not None:
            for part, keep in zip(model.parameters(), kept_parts(task), strict=True):
                part.grad *= keep
        optimizer.step()
    model.requires_grad_(False)
    return torch.cat([part.detach().flatten() for part in model.parameters()])


def kept_parts(task):
    return [task.kept[a:b].view(shape) for _, shape, a, b in task.layout]


def largest(task, change, rate):
    mask = torch.ones(len(change), dtype=torch.bool)
    for _, shape, a, b in task.layout:
        if len(shape) > 1:
            order = change[a:b].abs().argsort(descending=True)
            mask[a + order[: int(rate * (b - a))]] = False
    return mask if task.kept is None else mask & task.kept


def drawn(task, number, rate):
    mask = uniform((len(task.parameters),), stream(number, "mask")) >= rate
    for _, shape, a, b in task.layout:
        if len(shape) < 2:
            mask[a:b] = True
    return mask if task.kept is None else mask & task.kept


def watched(task, batch, seed=0, rate=0.6, keeps=True, rule="largest"):
    """What a server sees in every round, whose weights move with another client's, too."""
    rate_of, server = task.plan.learning_rate, task.parameters.clone()
    own, sends, seen = server.clone(), torch.ones(len(server), dtype=torch.bool), []
    for number in range(ROUNDS):
        start = torch.where(sends, server, own) if keeps else server
        own = descended(task, start, batch)
        by_value = rule == "largest"
        sends = largest(task, start - own, rate) if by_value else drawn(task, number, rate)
        sent, rows = own * sends, (server - own) / rate_of * sends
        update = Update(rows[None], Unit.CLIENT, (batch.size,), mask=sends[None])
        seen.append(
            Observation(
                update,
                task.with_parameters(server),
                (batch.size,),
                (1, 8, 8),
                labels=batch.labels.clone(),
                sent=sent[None],
                history=tuple(seen),
            )
        )
        other = descended(task, server, digits(1000 + 10 * seed + number, 8))
        server = torch.where(sends, (sent + other) / 2, other)
        if task.kept is not None:
            sends = sends | ~task.kept
    return seen


def objective_of(seen, **settings):
    attack = AcrossRounds(total_variation=0.0, **settings)
    rounds = [evidence(each, "recovered") for each in (*seen.history, seen)]
    return over_rounds(Objective.of(attack, rounds[-1]), rounds, attack.withheld == "kept")


def match(objective, batch):
    images = batch.inputs.to(objective.seen)
    return float(objective.value(images, batch.labels).match)


def decibels(batch, answer):
    return float(psnr(pair(batch, answer), data_range=1.0)[0])


def without_history(seen):
    return replace(seen, history=())


def test_without_a_history_it_is_sparse_inversion():
    seen = watched(task_of(0), digits(0))[2]
    plain = {"steps": 20, "total_variation": 1e-4, "noise_variation": 0.04}
    single, alone = (
        attack(without_history(seen), stream(0))
        for attack in (SparseInversion(GradientMatching(**plain)), AcrossRounds(steps=20))
    )
    assert torch.equal(single.inputs, alone.inputs)
    assert single.objective == alone.objective
    rounds = [evidence(without_history(seen), "recovered")]
    attack = AcrossRounds(steps=20)
    objective = over_rounds(Objective.of(attack, rounds[0]), rounds, keeps=True)
    (general,) = solve(attack, [begin(attack, objective, stream(0))])
    torch.testing.assert_close(general.inputs, alone.inputs, atol=1e-3, rtol=0)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("rule", ["largest", "random"])
def test_the_true_batch_explains_every_round(steps, pruned, keeps, rule):
    """Expected rows against the client's own, which plain SGD computed."""
    kept = uniform((2410,), stream(0, "kept")) < 0.7 if pruned else None
    batch = digits(0, 2)
    task = task_of(0, "tanh", steps, kept, torch.float64)
    seen = watched(task, batch, keeps=keeps, rule=rule)
    last = seen[-1]
    objective = objective_of(last, withheld="kept" if keeps else "forgotten")
    found = objective.seen_of(objective.rows(batch.inputs.double(), batch.labels))
    sent = torch.cat([each.update.mask for each in seen])
    assert (sent[1:] & ~sent[:-1]).sum() > (10 if rule == "largest" else 1000)
    torch.testing.assert_close(found[sent], objective.seen[sent], atol=1e-10, rtol=1e-9)
    assert match(objective, batch) < 1e-12
    wrong = objective_of(last, withheld="forgotten" if keeps else "kept")
    assert match(wrong, batch) > 1e-5


def test_sums_of_gradients_show_up_where_weights_were_withheld():
    """To first order: at a tiny rate, the gradients at the server's weights add up."""
    batch = digits(0)
    task = task_of(0, "tanh", dtype=torch.float64)
    task = replace(task, plan=LocalPlan(1, 1e-5))
    seen = watched(task, batch, rule="random")
    change = [
        (each.task.parameters - descended(task, each.task.parameters, batch)) / 1e-5
        for each in seen
    ]
    masks = torch.cat([each.update.mask for each in seen])
    late = masks[3] & ~masks[2] & masks[1]
    assert late.sum() > 100
    server, sent = seen[2].task.parameters, seen[3].sent[0]
    total = ((server - sent) / 1e-5)[late]
    torch.testing.assert_close(total, (change[2] + change[3])[late], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(objective_of(seen[3]).seen[3][late], total)


def test_clients_who_send_updates_keep_no_weights():
    batch = digits(0)
    task = task_of(0, "tanh", dtype=torch.float64)
    seen = watched(task, batch, keeps=False, rule="random")
    bare = [replace(each, sent=None) for each in seen]
    last = replace(bare[-1], history=tuple(bare[:-1]))
    assert match(objective_of(last), batch) < 1e-12


def test_several_rounds_tell_more_than_the_last():
    """Paired over two images: four rounds against the last one, 60 % withheld."""
    gains = []
    for seed in range(2):
        batch = digits(seed)
        seen = watched(task_of(seed, "tanh"), batch, seed)[-1]
        many, one = (
            decibels(batch, AcrossRounds(steps=100)(each, stream(seed)))
            for each in (seen, without_history(seen))
        )
        gains.append(many - one)
    assert sum(gains) / 2 > 3
    assert min(gains) > 0


def test_a_history_of_others_is_not_applicable():
    seen = watched(task_of(0), digits(0))[1]
    others = watched(task_of(0), digits(0, 2))[0]
    with pytest.raises(NotApplicable, match=r"examples, then \(1,\)"):
        AcrossRounds(steps=2)(replace(seen, history=(others,)), stream(0))


def test_several_rows_of_clients_who_keep_weights_are_not_applicable():
    def doubled(each):
        update = each.update
        rows, mask = update.rows.repeat(2, 1), update.mask.repeat(2, 1)
        update = replace(update, rows=rows, mask=mask, examples=(1, 1))
        return replace(each, update=update, sent=each.sent.repeat(2, 1), history=())

    first, last = map(doubled, watched(task_of(0), digits(0))[:2])
    with pytest.raises(NotApplicable, match="2 rows a round"):
        AcrossRounds(steps=2)(replace(last, history=(first,)), stream(0))


def test_the_same_history_and_stream_give_the_same_bits_and_are_left_alone():
    seen = watched(task_of(0), digits(0))[-1]
    tensors = [t for e in (*seen.history, seen) for t in (e.sent, e.update.rows, e.task.parameters)]
    before = [t.clone() for t in tensors]
    attack = AcrossRounds(steps=10, ordered=0.1)
    first, second = (attack(seen, stream(3)) for _ in range(2))
    assert torch.equal(first.inputs, second.inputs)
    assert all(map(torch.equal, before, tensors))


def test_settings():
    with pytest.raises(ValueError, match="withheld is 'lost'"):
        AcrossRounds(withheld="lost")
    with pytest.raises(ValueError, match="mask is 'seen'"):
        AcrossRounds(mask="seen")
