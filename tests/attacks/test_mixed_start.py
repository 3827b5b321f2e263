"""A client that starts partly from its own weights: which ones is found out, and who does not look
fails."""

from dataclasses import replace

import pytest
import torch

from leakbound.attacks import GradientMatching, sparse_gradient_inversion
from leakbound.attacks.matching.loop import answer, begin, run
from leakbound.attacks.matching.objective import Objective
from leakbound.attacks.mixed_start import MixedStart, Starts, last_sent
from leakbound.attacks.sparse_inversion import SparseInversion, evidence
from leakbound.core import NotApplicable, Observation, Unit, Update
from leakbound.metrics import psnr
from leakbound.pairing import pair
from leakbound.randomness import stream, uniform

from .test_across_rounds import descended, digits
from .test_across_rounds import task_of as with_activation


def task_of(seed, steps=1, kept=None, dtype=torch.float32):
    return with_activation(seed, "tanh", steps, kept, dtype)


def drawn(task, name, rate):
    """True at about `rate` of the weights that may be withheld."""
    mask = uniform((len(task.parameters),), stream(0, *name)) < rate
    for _, shape, a, b in task.layout:
        if len(shape) < 2:
            mask[a:b] = False
    return mask if task.kept is None else mask & task.kept


def watched(task, batch, seed=0, rate=0.0, chance=0.2, rounds=2):
    """What the server sees of each round, and the weights (P,) the client last started from."""
    server = own = task.parameters
    everything = task.kept if task.kept is not None else torch.ones_like(server).bool()
    seen = []
    for number in range(rounds):
        start = torch.where(drawn(task, ("start", seed, number), chance), own, server)
        own = descended(task, start, batch)
        sends = everything & ~drawn(task, ("mask", seed, number), rate)
        rows = (server - own) / task.plan.learning_rate * sends
        update = Update(rows[None], Unit.CLIENT, (batch.size,), mask=sends[None])
        seen.append(
            Observation(
                update,
                task.with_parameters(server),
                (batch.size,),
                (1, 8, 8),
                labels=batch.labels.clone(),
                sent=(own * sends)[None],
                history=tuple(seen),
            )
        )
        other = descended(task, server, digits(1000 + 10 * seed + number, 8))
        server = torch.where(sends, (own + 3 * other) / 4, other)
    return seen[-1], start


def starts_of(seen, **settings):
    """The estimate of the starts, and an objective without them."""
    rounds = [evidence(each, "recovered") for each in (*seen.history, seen)]
    attack = MixedStart(total_variation=0.0, **settings)
    objective = Objective.of(attack, rounds[-1])
    starts = Starts(attack, objective, rounds)
    return starts, replace(objective, weights=starts.trust)


def decibels(batch, answer):
    return float(psnr(pair(batch, answer), data_range=1.0)[0])


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("pruned", [False, True])
def test_the_true_batch_and_the_true_draw_explain_the_message(steps, pruned):
    """Expected rows against the client's own, which plain SGD computed; withheld ones included."""
    kept = uniform((2410,), stream(0, "kept")) < 0.7 if pruned else None
    task, batch = task_of(0, steps, kept, torch.float64), digits(0, 2)
    seen, start = watched(task, batch, rate=0.2)
    starts, objective = starts_of(seen)
    server, before = seen.task.parameters, seen.history[0].sent[0]
    first, last = (drawn(task, ("mask", 0, number), 0.2) for number in range(2))
    gone = first | (last & (before != server))
    assert torch.equal(starts.hidden, gone)
    starts.own = ((start != server) & ~gone).double()
    assert 100 < int(starts.own.sum()) < 500
    with torch.no_grad():
        starts.variables[0].copy_(((start - starts.server) / starts.scale)[gone])
    placed = starts.place(objective)
    torch.testing.assert_close(placed.task.parameters, start, rtol=0, atol=1e-12)
    used = starts.trust > 0
    assert torch.equal(used, seen.update.mask & ~gone)
    total, match, rows = placed.value(batch.inputs.double(), batch.labels)
    assert total is match
    assert abs(float(match.detach())) < 1e-12
    torch.testing.assert_close(rows[used], placed.seen[used], rtol=0, atol=1e-10)
    starts.own = torch.zeros_like(starts.own)
    wrong = starts.place(objective).value(batch.inputs.double(), batch.labels).match
    assert float(wrong.detach()) > 1e-3


def test_the_draw_is_found_at_the_true_batch():
    task, batch = task_of(0, dtype=torch.float64), digits(0)
    seen, start = watched(task, batch)
    starts, objective = starts_of(seen)
    assert starts.variables == []
    server, before = seen.task.parameters, seen.history[-1].sent[0]
    for _ in range(30):
        value = starts.place(objective).value(batch.inputs.double(), batch.labels)
        match = value.match
        starts.learn(value.rows, better=True)
    apart = (server - before).abs() > 1e-6
    right = (starts.own > 0.5) == (start != server)
    assert int(apart.sum()) > 1500
    assert bool(right[apart].all())
    assert float(match.detach()) < 1e-9


@pytest.mark.parametrize("own", [False, True])
def test_chances_follow_bayes(own):
    """A gradient at one of the two candidates is clear; halfway, the share alone decides."""
    seen, _ = watched(task_of(0, dtype=torch.float64), digits(0))
    starts, _ = starts_of(seen)
    near = starts.literal + starts.gap * (1.0 if own else 0.0)
    for _ in range(50):
        starts.learn(near, better=True)
    assert float(starts.own[starts.used].min() if own else 1 - starts.own[starts.used].max()) > 0.98
    starts.own = 0.3 * starts.used.double()
    starts.learn(starts.literal + starts.gap / 2, better=True)
    torch.testing.assert_close(
        starts.own[starts.used], torch.full_like(starts.own, 0.3)[starts.used]
    )


def test_who_looks_for_the_draw_sees_more():
    """Paired, against the same search without the starts, on the same messages."""
    plain = sparse_gradient_inversion(150, total_variation=1e-4, smoothing=0.0)
    gains, found = [], []
    for seed in range(2):
        batch = digits(seed)
        seen, _ = watched(task_of(seed), batch, seed)
        found.append(decibels(batch, MixedStart(steps=150)(seen, stream(seed))))
        gains.append(found[-1] - decibels(batch, plain(seen, stream(seed))))
    assert sum(gains) / 2 > 20
    assert min(found) > 40
    assert min(gains) > 0


@pytest.mark.slow
def test_searching_hidden_starts_sees_more():
    """Paired: some weights were withheld for rounds, and start far from the server's."""
    gains = []
    for seed in range(5):
        batch = digits(seed)
        seen, _ = watched(task_of(seed), batch, seed, rate=0.3, chance=0.5, rounds=4)
        searched, left = (
            decibels(batch, MixedStart(steps=300, unknown=how)(seen, stream(seed)))
            for how in ("search", "server")
        )
        gains.append(searched - left)
    assert sum(gains) / 5 > 5
    assert min(gains) > 0


def test_the_answer_is_judged_where_it_was_best():
    seen, _ = watched(task_of(0), digits(0), rate=0.3)
    attack = MixedStart(total_variation=0.0, steps=8, learning_rate=0.5, schedule="constant")
    starts, objective = starts_of(seen)
    search = begin(attack, objective, stream(0), companion=starts)
    run(attack, [search])
    best = answer(search)
    value = search.objective.value(best.inputs, best.labels)
    assert float(value.total.detach()) == pytest.approx(best.objective, rel=1e-5)


def test_without_a_history_it_is_sparse_inversion_to_the_bit():
    seen, _ = watched(task_of(0), digits(0), rate=0.3)
    alone = replace(seen, history=())
    bare = replace(seen, sent=None)
    plain = {"steps": 20, "total_variation": 1e-4, "noise_variation": 0.04}
    for each in (alone, bare):
        single, mixed = (
            attack(each, stream(0))
            for attack in (SparseInversion(GradientMatching(**plain)), MixedStart(steps=20))
        )
        assert torch.equal(single.inputs, mixed.inputs)
        assert single.objective == mixed.objective


def test_last_sent_weights():
    task = task_of(0)
    seen, _ = watched(task, digits(0), rate=0.4, rounds=3)
    rounds = [evidence(each, "recovered") for each in (*seen.history, seen)]
    weights, hidden = last_sent(rounds)
    gone = [drawn(task, ("mask", 0, number), 0.4) for number in range(2)]
    assert torch.equal(hidden, gone[1])
    sent = torch.cat([torch.full((b - a,), len(s) > 1) for _, s, a, b in task.layout])
    first, second = (each.sent[0] for each in seen.history)
    expected = torch.where(gone[1], torch.where(gone[0], seen.task.parameters, first), second)
    assert torch.equal(weights, torch.where(sent, expected, seen.task.parameters))


def test_the_same_stream_gives_the_same_bits_and_writes_nothing():
    seen, _ = watched(task_of(0), digits(0), rate=0.3)
    tensors = [t for e in (*seen.history, seen) for t in (e.sent, e.update.rows, e.task.parameters)]
    before = [t.clone() for t in tensors]
    first, second = (MixedStart(steps=10)(seen, stream(3)) for _ in range(2))
    assert torch.equal(first.inputs, second.inputs)
    assert all(map(torch.equal, before, tensors))


def test_other_clients_and_several_rows_are_not_applicable():
    seen, _ = watched(task_of(0), digits(0))
    others, _ = watched(task_of(0), digits(0, 2))
    with pytest.raises(NotApplicable, match="of one client"):
        MixedStart(steps=2)(replace(seen, history=others.history), stream(0))


def test_settings():
    with pytest.raises(ValueError, match="stages is 0"):
        MixedStart(stages=0)
    with pytest.raises(ValueError, match="unknown is 'lost'"):
        MixedStart(unknown="lost")
    with pytest.raises(ValueError, match="optimizer is 'lbfgs'"):
        MixedStart(optimizer="lbfgs")
