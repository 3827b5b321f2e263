"""Withholding weights: counts and choices by brute force, several rounds by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from leakbound.client import respond
from leakbound.core import Exact, Guarantee, LocalPlan, Task, Unit, Unknown, Update
from leakbound.defenses import (
    ClipExamples,
    DpSgd,
    GaussianNoise,
    GradientDropout,
    Mean,
    NoDefense,
    OptimalNoise,
    PriPrune,
    SecureAggregation,
    Withhold,
    chain,
)
from leakbound.defenses.withhold import choose, mask_of_largest
from leakbound.protocol import resolve, step
from leakbound.randomness import secure, stream

WEIGHTS = ("1.weight", "3.weight", "5.weight")


def _gradient(task, seed=0):
    """A row of distinct values."""
    order = torch.randperm(len(task.parameters), generator=stream(seed, "row"))
    sign = torch.where(torch.rand(len(order), generator=stream(seed, "sign")) < 0.5, -1.0, 1.0)
    return ((order + 1) * sign).double()


def _sent(defense, task, row, source=None, state=None):
    """What a client sends whose change is `row`."""
    own, state = defense.begin(task, state, source or stream(0))
    update = Update(row[None], Unit.CLIENT, (1,))
    sent, state = defense.transform(update, state, None, source or stream(0))
    return sent, state, own


def _layers(task):
    return {name: slice(a, b) for name, shape, a, b in task.layout if name in WEIGHTS}


@pytest.fixture
def pruned(task):
    some = torch.rand(len(task.parameters), generator=stream(0, "base")) < 0.6
    for name, _, a, b in task.layout:
        if name.endswith("bias"):
            some[a:b] = True
    return task.pruned(some)


@pytest.mark.parametrize("rule", ["largest", "random", "mix"])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.29, 0.5, 0.99])
def test_exactly_that_many_of_every_layer_and_never_a_bias(task, pruned, rule, rate):
    for model in (task, pruned):
        mask = _sent(Withhold(rule, rate), model, _gradient(model))[0].mask[0]
        for name, _, a, b in model.layout:
            there = torch.ones(b - a).bool() if model.kept is None else model.kept[a:b]
            gone = int((~mask[a:b]).sum())
            assert not (~mask[a:b] & ~there).any()  # what is not there is not withheld
            want = 0 if name.endswith("bias") else math.floor(round(rate * 100) * there.sum() / 100)
            assert gone == want


def test_the_scales_of_norms_are_sent(task):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(12, 6), nn.LayerNorm([2, 3]), nn.Linear(6, 3)
            self.groups = nn.GroupNorm(1, 2)

        def forward(self, x):
            return self.b(self.groups(self.norm(self.a(x.flatten(1)).view(-1, 2, 3))).flatten(1))

    model = Task.of(Scaled().double(), classes=3)
    for defense in (Withhold(rate=0.9), PriPrune(start=0.9)):
        mask = _sent(defense, model, _gradient(model))[0].mask[0]
        withheld = {name for name, _, a, b in model.layout if not mask[a:b].all()}
        assert withheld == {"a.weight", "b.weight"}


def test_counts_are_not_lost_to_rounding():
    model = Task.of(nn.Sequential(nn.Flatten(), nn.Linear(100, 1)))
    assert 0.29 * 100 < 29
    for defense in (Withhold(rate=0.29), Withhold("mix", 0.29), Withhold("mix", 0.58, share=0.5)):
        mask = _sent(defense, model, _gradient(model))[0].mask
        assert (~mask).sum() == round(100 * defense.rate)


@pytest.mark.parametrize("rate", [0.1, 0.33, 0.8])
def test_the_largest_are_the_largest(task, pruned, rate):
    for model in (task, pruned):
        row = _gradient(model)
        mask = _sent(Withhold(rate=rate), model, row)[0].mask[0]
        for own in _layers(model).values():
            there = range(own.start, own.stop)
            if model.kept is not None:
                there = [i for i in there if model.kept[i]]
            ranked = sorted(there, key=lambda i: -abs(float(row[i])))
            gone = {i for i in range(own.start, own.stop) if not mask[i]}
            assert gone == set(ranked[: math.floor(rate * len(ranked) + 1e-9)])


def test_of_equals_the_first_go(task):
    row = torch.ones_like(task.parameters)
    for kind in (torch.float64, torch.float32, torch.float16):
        mask = _sent(Withhold(rate=0.5), task, row.to(kind))[0].mask[0]
        for own in _layers(task).values():
            count = (own.stop - own.start) // 2
            assert not mask[own][:count].any()
            assert mask[own][count:].all()


def test_the_largest_of_the_whole_model(pruned):
    row = _gradient(pruned)
    among = [i for own in _layers(pruned).values() for i in range(own.start, own.stop)]
    among = sorted((i for i in among if pruned.kept[i]), key=lambda i: -abs(float(row[i])))
    mask = _sent(Withhold(rate=0.4, scope="global"), pruned, row)[0].mask[0]
    assert set((~mask).nonzero()[:, 0].tolist()) == set(among[: math.floor(0.4 * len(among))])
    counts = [
        int((~mask[own]).sum()) / int(pruned.kept[own].sum()) for own in _layers(pruned).values()
    ]
    assert max(counts) > min(counts) + 0.02


@pytest.mark.parametrize("pick", [stream(0, "many"), secure()], ids=["stream", "secure"])
def test_random_ones_are_equally_likely_and_do_not_look_at_values(task, pick):
    times, rate = 800, 0.3
    own = _layers(task)["1.weight"]
    count = own.stop - own.start
    row = _gradient(task)
    hit = torch.zeros(count)
    for _ in range(times):
        hit += ~_sent(Withhold("random", rate), task, row, pick)[0].mask[0][own]
    share = math.floor(rate * count) / count
    # hits have variance times * share * (1 - share) and sum to a fixed number
    score = ((hit - times * share) ** 2).sum() / (times * share * (1 - share)) * (count - 1) / count
    assert 1e-6 < stats.chi2.sf(float(score), count - 1) < 1 - 1e-6
    rank = stats.spearmanr(hit.numpy(), row[own].abs().numpy())
    assert rank.pvalue > 1e-6
    one, two = (_sent(Withhold("random"), task, r, stream(4))[0].mask for r in (row, row * row + 7))
    assert torch.equal(one, two)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_a_mix_has_its_shares(task, share):
    row, rate = _gradient(task), 0.5
    mask = _sent(Withhold("mix", rate, share=share), task, row, stream(1))[0].mask[0]
    other = _sent(Withhold("mix", rate, share=share), task, row, stream(2))[0].mask[0]
    for own in _layers(task).values():
        size = own.stop - own.start
        top = math.floor(share * rate * size + 1e-9)
        ranked = row[own].abs().argsort(descending=True)
        assert not mask[own][ranked[:top]].any()
        assert not other[own][ranked[:top]].any()
        assert int((~mask[own]).sum()) == math.floor(rate * size + 1e-9)
    assert torch.equal(mask, other) == (share == 1.0)


def _scalar(pseudo):
    """Two weights, no bias, learning rate 1/2: what one client sends in three rounds."""
    model = Task.of(
        nn.Sequential(nn.Flatten(), nn.Linear(2, 1, bias=False)), plan=LocalPlan(1, 0.5)
    )
    defense, state, out = Withhold(rate=0.5, pseudo=pseudo), None, []
    server = [(10.0, 20.0), (11.0, 19.0), (12.0, 18.0)]
    change = [(4.0, 1.0), (1.0, 2.0), (3.0, 2.0)]
    for weights, row in zip(server, change, strict=True):
        task = model.with_parameters(torch.tensor(weights))
        sent, state, own = _sent(defense, task, torch.tensor(row), state=state)
        out.append((own.parameters.tolist(), sent.rows[0].tolist(), sent, state))
    return out


def test_three_rounds_by_hand_of_pseudo_pruning():
    one, two, three = _scalar(pseudo=True)
    # round 1: weight 0 has the larger change; the client's own become (8, 19.5)
    assert one[:2] == ([10.0, 20.0], [0.0, 1.0])
    # round 2: it starts from its own 8 for weight 0 and sends it: 8 - 0.5 = 7.5 = 11 - 0.5 * 7
    assert two[:2] == ([8.0, 19.0], [7.0, 0.0])
    # round 3: weight 1 comes from its own 19 - 1 = 18 and is sent: 17 = 18 - 0.5 * 2
    assert three[:2] == ([12.0, 18.0], [0.0, 2.0])
    assert two[3].weights.tolist() == [7.5, 18.0]
    assert isinstance(one[2].law, Exact)
    assert isinstance(two[2].law, Unknown)
    assert two[2].law.private


def test_three_rounds_by_hand_of_real_pruning():
    one, two, three = _scalar(pseudo=False)
    assert one[:2] == ([10.0, 20.0], [0.0, 1.0])
    assert two[:2] == ([11.0, 19.0], [1.0, 0.0])
    assert three[:2] == ([12.0, 18.0], [0.0, 2.0])
    assert all(isinstance(kept[2].law, Exact) and kept[3].weights is None for kept in (one, two))


def test_in_a_round_the_client_goes_on_from_its_own_weights(task, batch):
    task = replace(task, plan=LocalPlan(2, 0.1))
    defense, source = resolve(Withhold(rate=0.4), task, 6), stream(0)
    first, state = step(task, batch, defense, source)
    kept = state[0]
    own = task.parameters - 0.1 * respond(task, batch, NoDefense(), stream(0))[0].rows[0]
    torch.testing.assert_close(kept.weights, own)
    after = task.with_parameters(task.parameters * 0.9)
    mixed = torch.where(first.mask[0], after.parameters, kept.weights)
    second, again = step(after, batch, defense, source, state)
    moved = respond(after.with_parameters(mixed), batch, NoDefense(), stream(0))[0].rows[0]
    torch.testing.assert_close(again[0].weights, mixed - 0.1 * moved)
    want = (after.parameters - again[0].weights) / 0.1
    torch.testing.assert_close(second.rows[0], want * second.mask[0])


def test_what_is_told_of_the_mask(task):
    row = _gradient(task)
    chosen = {
        rule: _sent(Withhold(rule, pseudo=False), task, row)[0]
        for rule in ("largest", "random", "mix")
    }
    flags = {rule: (s.law.private, s.mask_private, s.drawn) for rule, s in chosen.items()}
    assert flags == {
        "largest": (True, True, False),
        "random": (False, False, True),
        "mix": (True, True, True),
    }
    assert [Withhold(rule).data_dependent_law for rule in chosen] == [True, False, True]
    for sent in chosen.values():
        assert torch.equal(sent.rows != 0, sent.mask)


def test_a_rate_of_zero_is_no_defense(task, batch):
    for defense in (Withhold(rate=0.0), Withhold("random", 0.0), Withhold("mix", 0.0)):
        ready, state = resolve(defense, task, 6), None
        for scale in (1.0, 0.7):
            at = task.with_parameters(task.parameters * scale)
            sent, state = step(at, batch, ready, stream(0), state)
            assert torch.equal(sent.rows, step(at, batch, NoDefense(), stream(0))[0].rows)
            assert sent.mask.all()


@pytest.mark.parametrize("defense", [Withhold(), PriPrune()], ids=repr)
def test_a_state_of_another_model_is_refused(task, convnet, defense):
    state = defense.init(Task.of(convnet))
    with pytest.raises(ValueError, match=r"state holds \d+ weights and the model \d+; begin with"):
        defense.begin(task, state, stream(0))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"rule": "smallest"}, "rule is 'smallest'"),
        ({"rate": 1.5}, "rate is 1.5; give a fraction"),
        ({"rate": 1.0}, "give a rate below 1"),
        ({"share": -0.1}, "share is -0.1; give a fraction"),
        ({"scope": "model"}, "scope is 'model'"),
    ],
)
def test_wrong_values_are_named(bad, says):
    with pytest.raises(ValueError, match=says):
        Withhold(**bad)


def test_which_chains_are_refused():
    for one, two in ((Withhold(), Withhold()), (Withhold(), PriPrune()), (PriPrune(), PriPrune())):
        with pytest.raises(ValueError, match="both decide which weights the client keeps"):
            chain(one, two)
    promised = OptimalNoise(error_floor=0.1)
    assert promised.plain_gradient
    for link in (Withhold(), PriPrune()):
        with pytest.raises(ValueError, match="start from its own weights"):
            chain(promised, link)
        with pytest.raises(ValueError, match="start from its own weights"):
            chain(link, promised)


def test_what_is_promised_in_a_chain():
    private = Guarantee.DIFFERENTIAL_PRIVACY
    assert chain(DpSgd(1.0, 1.0), Withhold()).guarantee is private
    assert Withhold().guarantee is Guarantee.NONE
    late = chain(Withhold(), GaussianNoise(0.1))
    assert late.guarantee is Guarantee.NONE  # what is late has no law
    now = chain(Withhold(pseudo=False), GaussianNoise(0.1))
    assert now.guarantee is Guarantee.KNOWN_NOISE
    with pytest.raises(ValueError, match="bounds nothing"):
        chain(ClipExamples(1.0), Mean(), Withhold(), *DpSgd(1.0, 1.0).links[2:])


def test_with_other_links(task, batch):
    both = resolve(chain(GradientDropout(0.5), Withhold(rate=0.5)), task, 6)
    sent, state = step(task, batch, both, stream(0))
    assert (~sent.mask).float().mean() > 0.55
    kept = state[1]
    assert torch.equal(kept.sent, sent.mask[0])  # what another link took away was not sent, either
    summed = chain(Withhold(rate=0.5), SecureAggregation(2))
    ready = resolve(summed, task, 6)
    rows = [step(task, batch, ready, stream(i))[0] for i in (0, 1)]
    total, _ = ready.sides[1].transform(Update.stack(rows), (None,), None, stream(0))
    torch.testing.assert_close(total.rows[0], sum(r.rows[0] for r in rows))


def test_brute_force_over_many_shapes():
    source = stream(0, "shapes")
    for _ in range(30):
        size = int(torch.randint(2, 40, (1,), generator=source))
        model = Task.of(nn.Sequential(nn.Flatten(), nn.Linear(size, 3)))
        row = torch.randint(-3, 4, model.parameters.shape, generator=source).float()  # many equal
        rate = float(torch.rand(1, generator=source))
        mask = _sent(Withhold(rate=rate), model, row)[0].mask[0].numpy()
        order = np.argsort(-np.abs(row.numpy()[: 3 * size]), kind="stable")
        want = np.ones(len(row), bool)
        want[order[: math.floor(rate * 3 * size + 1e-9)]] = False
        np.testing.assert_array_equal(mask, want)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", ["normal", "product", "zeros", "all alike", "sorted"])
def test_the_first_of_many_values(kind, case):
    rows, columns = 401, 392  # a step through them in even strides sees one column
    across = torch.arange(columns).double() if case == "product" else torch.ones(columns)
    values = torch.randn(rows, columns, generator=stream(0, case), dtype=kind).abs() * across
    values = values.to(kind).flatten()
    if case == "zeros":
        values[torch.rand(len(values), generator=stream(0, "gone")) < 0.6] = 0.0
    values = torch.ones_like(values) if case == "all alike" else values
    values = values.sort().values if case == "sorted" else values
    order = np.argsort(-values.numpy(), kind="stable")
    for count in (1, len(values) // 3, len(values) // 2, len(values) - 1, len(values)):
        want = np.zeros(len(values), bool)
        want[order[:count]] = True
        np.testing.assert_array_equal(mask_of_largest(values, count), want)


@pytest.mark.parametrize("kind", [torch.float16, torch.float32, torch.float64])
def test_a_choice_by_bits_is_a_choice(kind):
    yes, no = (torch.randn(2, 999, generator=stream(0, "both"))).to(kind)
    yes[:3], no[1:4] = torch.tensor([-0.0, float("inf"), float("nan")]), float("-inf")
    mask, out = torch.rand(999, generator=stream(0, "mask")) < 0.3, torch.empty_like(yes)
    choose(mask, yes, no, out)
    assert out.numpy().tobytes() == torch.where(mask, yes, no).numpy().tobytes()
