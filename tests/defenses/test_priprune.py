"""PriPrune against autograd of the paper's loss, its laws by chi-square, its resting points."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.func import functional_call

from leakbound.client import gradient
from leakbound.core import Guarantee, LocalPlan, Task, Unit, Unknown, Update
from leakbound.defenses import (
    DpSgd,
    GaussianNoise,
    NoDefense,
    PriPrune,
    SecureAggregation,
    Withhold,
    chain,
)
from leakbound.defenses.priprune import TYPICAL, Belief, layer_shares
from leakbound.protocol import play, resolve, step
from leakbound.randomness import normal, secure, stream, uniform

close = torch.testing.assert_close


def _draw(task, *name):
    return normal(task.parameters.shape, stream(0, *name), like=task.parameters)


def _kept(defense, task, logits=None, own=1.0):
    """A client that holds weights unlike the server's and beliefs of the given logits."""
    kept = defense.init(task)
    if logits is not None:
        kept = replace(kept, own=replace(kept.own, logits=logits))
    sent = torch.ones_like(kept.exists)
    return replace(kept, weights=task.parameters + own * _draw(task, "own"), sent=sent)


def _rest(defense, task, row):
    """The probabilities after the steps on a row that stays the same."""
    update = Update(row[None], Unit.CLIENT, (1,))
    sent, state = defense.transform(update, defense.init(task), None, stream(0))
    return state.own.alpha, sent, state


@pytest.fixture
def pruned(task):
    some = torch.rand(len(task.parameters), generator=stream(0, "base")) < 0.6
    for name, _, a, b in task.layout:
        if name.endswith("bias"):
            some[a:b] = True
    return task.pruned(some)


@pytest.mark.parametrize("pick", [stream(0, "many"), secure()], ids=["stream", "secure"])
def test_a_weight_is_withheld_from_the_model_with_its_probability(task, pick):
    times, alphas = 1500, torch.tensor([0.02, 0.2, 0.5, 0.8, 0.98]).double()
    alpha = alphas[torch.arange(len(task.parameters)) % 5]
    defense = PriPrune()
    kept = _kept(defense, task, alpha.logit())
    own = torch.zeros(len(alpha)).double()
    for _ in range(times):
        start, _ = defense.begin(task, kept, pick)
        taken = start.parameters == kept.weights
        assert (taken | (start.parameters == task.parameters)).all()
        own += taken
    there = kept.exists
    assert (own[~there] == 0).all()  # biases come from the server
    score = (own - times * alpha).square() / (times * alpha * (1 - alpha))
    for level in alphas:
        some = there & (alpha == level)
        assert 1e-6 < stats.chi2.sf(float(score[some].sum()), int(some.sum())) < 1 - 1e-6


def test_the_draws_of_weights_are_independent(task):
    defense, times = PriPrune(), 800
    kept = _kept(defense, task, torch.zeros_like(task.parameters))
    source = stream(1)
    taken = torch.stack(
        [defense.begin(task, kept, source)[0].parameters == kept.weights for _ in range(times)]
    )
    bits = 2.0 * taken[:, kept.exists].double() - 1
    cross = (bits.T @ bits / times**0.5).triu(1)
    pairs = bits.shape[1] * (bits.shape[1] - 1) // 2
    assert cross.square().sum() == pytest.approx(pairs, rel=0.05)


def test_composing_by_the_last_mask(task):
    defense = PriPrune(compose="last")
    kept = _kept(defense, task, torch.zeros_like(task.parameters))
    kept = replace(kept, sent=_draw(task, "mask") > 0)
    start, _ = defense.begin(task, kept, stream(0))
    want = torch.where(kept.sent | ~kept.exists, task.parameters, kept.weights)
    assert torch.equal(start.parameters, want)


@pytest.mark.parametrize("start", [0.05, 0.45, 0.55, 0.95])
def test_it_sends_what_is_likely_to_be_shared(task, pruned, start):
    for model in (task, pruned):
        defense = PriPrune(start=start, mask_rate=1e-9)
        _, sent, state = _rest(defense, model, _draw(model, "row"))
        assert torch.equal(sent.mask[0], ~state.exists if start > 0.5 else sent.mask[0] | True)
        assert state.exists.sum() < len(model.parameters)
        assert (sent.law.private, sent.mask_private, sent.drawn) == (True, True, False)


def test_at_one_half_it_shares(task):
    defense = PriPrune(start=0.5, privacy=0.0, accuracy=0.0, sharing=0.0)
    assert _rest(defense, task, _draw(task, "row"))[1].mask.all()


def _shares(task, row, there):
    """w_j by loops."""
    total, out = int(there.sum()), np.zeros(len(row))
    for _, shape, a, b in task.layout:
        if len(shape) < 2:
            continue
        some = [i for i in range(a, b) if there[i]]
        norm = sum(abs(float(row[i])) for i in some)
        for i in some:
            out[i] = len(some) / total * (abs(float(row[i])) / norm if norm else 1 / len(some))
    return out


def importance(change, kept):
    """(P,) the shares that the defense computes block by block, zero where no weight exists."""
    shares = torch.zeros_like(change)
    for layer in layer_shares(change, kept):
        part = slice(*layer.span)
        layer.shares(change, kept, part, shares[part])
    return torch.where(kept.exists, shares, 0.0)


def slope_of(defense, belief, change, kept):
    """(P,) the slope that the defense computes block by block."""
    total = torch.zeros_like(change)
    with torch.no_grad():
        for part, slope in defense._slopes(belief, change, kept, layer_shares(change, kept)):
            total[part] = slope
    return total


def test_the_importance_of_weights(task, pruned):
    for model in (task, pruned):
        kept, row = PriPrune().init(model), _draw(model, "row")
        name, _, a, b = model.layout[2]
        for some in (row, torch.cat([row[:a], torch.zeros_like(row[a:b]), row[b:]])):
            found = importance(some, kept)
            np.testing.assert_allclose(found, _shares(model, some, kept.exists), rtol=1e-12)
            assert (found[~kept.exists] == 0).all()
            assert float(found.sum()) == pytest.approx(1)
            for _, _, start, stop in model.layout[::2]:
                here = kept.exists[start:stop].sum() / kept.exists.sum()
                assert float(found[start:stop].sum()) == pytest.approx(float(here))
        assert name.endswith("weight")


def _literal(defense, task, batch, kept, logits, noise):
    """The three-term loss with the paper's two-category, hard Gumbel-softmax, and its slope."""
    a = logits.clone().requires_grad_()
    alpha = torch.sigmoid(a)
    gumbel = -torch.log(-torch.log(torch.rand(len(a), generator=stream(7), dtype=a.dtype)))
    drawn = torch.stack([gumbel, gumbel + noise])  # the difference is logistic
    pi = torch.stack([alpha, 1 - alpha])
    heat = torch.exp((pi.log() + drawn) / defense.temperature)
    soft = heat / heat.sum(0)
    hard = nn.functional.one_hot(soft.argmax(0), 2).T.to(soft)
    mask = ((hard - soft).detach() + soft)[1]
    mask = torch.where(kept.exists, mask, torch.ones_like(mask))
    weights = mask * task.parameters + (1 - mask) * kept.weights
    if task.kept is not None:
        weights = weights * task.kept
    named = task.unflatten(weights)
    loss = nn.functional.cross_entropy(
        functional_call(task.model, named, (batch.inputs,)), batch.labels
    )
    row = gradient(task, batch.inputs, batch.labels, weights.detach())
    share = torch.as_tensor(_shares(task, row, kept.exists))
    price = defense.sharing or defense.privacy / (0.114 * int(kept.exists.sum()))
    term = alpha.log() if defense.form == "log" else alpha
    whole = defense.accuracy * loss - defense.privacy * (share * term).sum()
    whole = whole + price * alpha[kept.exists].sum()
    (slope,) = torch.autograd.grad(whole, a)
    return slope, row, weights.detach()


@pytest.mark.parametrize("form", ["log", "linear"])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("weights", [(5.0, 15.0, 0.0), (1000.0, 1.0, 0.01)])
def test_the_slope_is_that_of_the_papers_loss(task, pruned, batch, form, temperature, weights):
    for model in (task, pruned):
        defense = PriPrune(*weights, form=form, temperature=temperature)
        logits = 1.5 * _draw(model, "logits")
        kept = _kept(defense, model, logits)
        own = model.with_parameters(kept.weights)
        kept = replace(kept, weights=own.parameters)
        start, begun = defense.begin(model, kept, stream(3))
        want, row, composed = _literal(defense, model, batch, kept, logits, begun.own.noise)
        close(start.parameters, composed)
        assert (start.parameters != model.parameters).any()
        found = slope_of(defense, begun.own, row, begun)
        close(found[kept.exists], want[kept.exists], rtol=1e-9, atol=1e-12)
        plain = slope_of(replace(defense, accuracy=0.0), begun.own, row, begun)
        assert not torch.allclose(found[kept.exists], plain[kept.exists], rtol=1e-3)


@pytest.mark.parametrize("form", ["log", "linear"])
def test_the_slope_of_privacy_and_sharing_by_finite_differences(task, form):
    defense = PriPrune(privacy=3.0, sharing=0.02, form=form)
    kept, row, logits = defense.init(task), _draw(task, "row"), 2 * _draw(task, "logits")
    share = _shares(task, row, kept.exists)

    def loss(a):
        alpha = 1 / (1 + np.exp(-a))
        return -3 * share * (np.log(alpha) if form == "log" else alpha) + 0.02 * alpha

    a, small = logits.numpy(), 1e-5
    want = (loss(a + small) - loss(a - small)) / (2 * small)
    found = slope_of(defense, replace(kept.own, logits=logits), row, kept).numpy()
    np.testing.assert_allclose(found[kept.exists], want[kept.exists], rtol=1e-6, atol=1e-10)


def test_three_rounds_are_adams_steps_on_the_papers_loss(pruned, batch):
    rate, beta1, beta2 = 0.1, 0.9, 0.999
    task = replace(pruned, plan=LocalPlan(1, 0.5))
    defense = resolve(PriPrune(5.0, 15.0, mask_rate=rate, start=0.48), task, 6)
    there = defense.links[0].init(task).exists
    logits = np.full(len(there), np.log(0.48 / 0.52))
    first, second = np.zeros_like(logits), np.zeros_like(logits)
    state, source = None, stream(5)
    for turn in (1, 2, 3):
        at = task.with_parameters(task.parameters * 0.9**turn)
        before = None if state is None else state[0]
        begun = defense.links[0].begin(at, before, torch.Generator().set_state(source.get_state()))[
            1
        ]
        sent, state = step(at, batch, defense, source, state)
        kept = begun if before else replace(begun, weights=at.parameters)  # all from the server
        slope, row, start = _literal(
            defense.links[0], at, batch, kept, torch.as_tensor(logits), begun.own.noise
        )
        slope = slope.numpy() * there.numpy()
        first, second = (
            beta1 * first + (1 - beta1) * slope,
            beta2 * second + (1 - beta2) * slope**2,
        )
        move = first / (1 - beta1**turn) / (np.sqrt(second / (1 - beta2**turn)) + 1e-300)
        logits = logits - rate * move
        np.testing.assert_allclose(state[0].own.logits[there], logits[there], rtol=1e-5)
        close(state[0].weights, start - 0.5 * row)
        mask = (torch.as_tensor(logits) <= 0) | ~there
        want = (at.parameters - state[0].weights) / 0.5
        close(sent.rows[0], want * mask * task.kept)
        assert torch.equal(sent.mask[0], mask & task.kept)
    assert 0 < (~mask).sum() < there.sum()


def test_the_resting_point_and_its_share(task):
    n = int(PriPrune().init(task).exists.sum())
    for name, row in {
        "laplace": _draw(task, "row").square() * _draw(task, "sign").sign(),
        "sparse": _draw(task, "row") * (torch.arange(len(task.parameters)) % 5 == 0),
    }.items():
        alpha, sent, state = _rest(PriPrune(mask_steps=1600, mask_rate=0.05), task, row)
        want = TYPICAL * n * importance(row, state)
        inside = state.exists & (want < 0.98) & (want > 1e-4)
        assert inside.sum() > 15
        close(alpha[inside], want[inside], rtol=0.01, atol=2e-3)
        assert (alpha[state.exists & (want >= 1.02)] > 0.9).all()
        assert (~sent.mask).sum() <= 2 * TYPICAL * n, name
    given = PriPrune(privacy=2.0, sharing=2 * 2.0 / (0.3 * n), mask_steps=1600, mask_rate=0.05)
    alpha, sent, state = _rest(given, task, row.clamp(-0.3, 0.3))
    want = 0.15 * n * importance(row.clamp(-0.3, 0.3), state)
    inside = state.exists & (want < 0.98) & (want > 1e-4)
    close(alpha[inside], want[inside], rtol=0.01, atol=2e-3)


@pytest.mark.parametrize(("part", "gone"), [(5, True), (4, False)])
def test_markovs_cap_is_nearly_reached(part, gone):
    """One weight in five holds all of |g|: alpha = 0.114 * 5 > 1/2; one in four: below."""
    layers = nn.Flatten(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 40)
    task = Task.of(nn.Sequential(*layers).double())
    row = torch.zeros_like(task.parameters)
    for _, shape, a, b in task.layout:
        if len(shape) > 1:
            row[a:b:part] = 1.0
    _, sent, state = _rest(PriPrune(mask_steps=800, mask_rate=0.05), task, row)
    share = float((~sent.mask[0]).sum() / state.exists.sum())
    assert (0.15 < share <= 2 * TYPICAL) == gone
    assert (share == 0) != gone


def test_the_linear_form_goes_to_nothing_or_all(task):
    row = _draw(task, "row")
    n = int(PriPrune().init(task).exists.sum())
    defense = PriPrune(form="linear", sharing=15 / n, mask_steps=1500, mask_rate=0.2)
    alpha, sent, state = _rest(defense, task, row)
    above = importance(row, state) * n > 1
    assert (alpha[state.exists & above] > 0.999).all()
    assert (alpha[state.exists & ~above] < 0.001).all()
    assert torch.equal(sent.mask[0], ~(state.exists & above))
    state = _rest(replace(defense, mask_rate=5.0), task, row)[2]
    edge = float(state.own.logits.abs().max())
    assert edge == pytest.approx(np.log((1 - 1e-6) / 1e-6), rel=1e-3)
    assert state.own.logits.isfinite().all()


def test_the_first_round_starts_where_all_start(task, batch):
    defense = resolve(PriPrune(), task, 6)
    start, _ = defense.begin(task, None, stream(0))
    assert torch.equal(start.parameters, task.parameters)
    sent, _ = step(task, batch, defense, stream(0))
    plain, _ = step(task, batch, NoDefense(), stream(0))
    assert torch.equal(sent.rows, plain.rows * sent.mask)


def test_same_draws_same_bits(task, batch):
    ends = []
    for seed in (0, 0, 1):
        defense, state, source = resolve(PriPrune(start=0.5), task, 6), None, stream(seed)
        for turn in range(3):
            at = task.with_parameters(task.parameters * 0.9**turn)
            sent, state = step(at, batch, defense, source, state)
        ends.append(torch.cat([sent.rows[0], state[0].own.logits, state[0].weights]))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_all_that_it_keeps_after_noise_follows_from_the_noisy_rows(task, batch):
    private = chain(*DpSgd(0.5, 2.0).links, PriPrune(start=0.5))
    assert private.guarantee is Guarantee.DIFFERENTIAL_PRIVACY
    ready, alone = resolve(private, task, 6), PriPrune(start=0.5)
    state = own = None
    for turn in range(3):
        at = task.with_parameters(task.parameters * 0.9**turn)
        source, twin = stream(turn), stream(turn)
        begun, held = alone.begin(at, own, twin)  # its own draws come first
        noisy, _ = step(begun, batch, resolve(DpSgd(0.5, 2.0), task, 6), twin)
        want, own = alone.transform(noisy, held, None, twin)
        sent, state = step(at, batch, ready, source, state)
        assert torch.equal(sent.rows, want.rows)
        assert torch.equal(state[-1].weights, begun.parameters - noisy.rows[0])
        assert torch.equal(state[-1].own.logits, own.own.logits)
        assert isinstance(sent.law, Unknown)


def test_what_is_promised_in_a_chain(task, batch):
    assert chain(PriPrune(), GaussianNoise(0.1)).guarantee is Guarantee.NONE
    assert PriPrune().guarantee is Guarantee.NONE
    summed = chain(PriPrune(start=0.6), SecureAggregation(2))
    seen = play(task, [batch, batch], summed, [stream(i) for i in range(3)]).observation
    assert seen.update.rows.shape == (1, len(task.parameters))
    with pytest.raises(ValueError, match="leave one out"):
        chain(PriPrune(), Withhold())


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"accuracy": -1.0}, "accuracy is -1.0; give"),
        ({"privacy": float("nan")}, "privacy is nan; give"),
        ({"sharing": -2.0}, "sharing is -2.0; give"),
        ({"form": "square"}, "form is 'square'"),
        ({"mask_rate": 0.0}, "mask_rate is 0.0; give"),
        ({"mask_steps": 0}, "mask_steps is 0; give"),
        ({"start": 1.0}, "start is 1.0; give a probability"),
        ({"temperature": 0.0}, "temperature is 0.0; give"),
        ({"compose": "never"}, "compose is 'never'"),
    ],
)
def test_wrong_values_are_named(bad, says):
    with pytest.raises(ValueError, match=says):
        PriPrune(**bad)


def test_beliefs_are_probabilities():
    belief = Belief(torch.tensor([0.0, 2.0]), torch.zeros(2), torch.zeros(2))
    np.testing.assert_allclose(belief.alpha, [0.5, 1 / (1 + np.exp(-2))], rtol=1e-6)


@pytest.mark.parametrize("compose", ["sampled", "last"])
def test_blocks_have_the_bits_of_the_whole(compose):
    task = Task.of(nn.Sequential(nn.Flatten(), nn.Linear(501, 301)))  # two blocks and an odd rest
    defense = PriPrune(compose=compose, start=0.4)
    row = _draw(task, "row")
    first = defense.begin(task, None, stream(0))[1]
    _, state = defense.transform(Update(row[None], Unit.CLIENT, (1,)), first, None, stream(0))
    own, kept = defense.begin(task, state, stream(1))
    noise = uniform(row.shape, stream(1), like=row).clamp_min(torch.finfo(row.dtype).tiny).logit()
    assert torch.equal(kept.own.noise, noise)
    mine = ~state.sent if compose == "last" else noise <= state.own.logits
    start = torch.where(mine & state.exists, state.weights, task.parameters)
    assert torch.equal(own.parameters, start)
    sent, after = defense.transform(Update(row[None], Unit.CLIENT, (1,)), kept, None, stream(1))
    assert torch.equal(after.weights, torch.add(start, row, alpha=-kept.rate))
    change = (task.parameters - start).div(kept.rate).add(row)
    assert torch.equal(sent.rows[0], change * after.sent)
    assert torch.equal(after.sent, ~((after.own.logits > 0) & kept.exists))
