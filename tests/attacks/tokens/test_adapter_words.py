"""Words from adapters under Adam: the law of chance, its level, and words that are echoes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from leakbound import models
from leakbound.attacks import AdapterWords
from leakbound.attacks.tokens import adapter_words
from leakbound.attacks.tokens.adapter_words import (
    _clear,
    _echoes,
    _gains,
    _normalized,
    _Pursuit,
    _squares,
)
from leakbound.attacks.tokens.layers import chosen, inputs_of, readers
from leakbound.core import LocalPlan, NotApplicable
from leakbound.randomness import normal, permutation, stream

from .test_adapters import seen, tiny

WORDS, WIDTH, RANK, LENGTH = 2000, 192, 8, 12
ADAM = LocalPlan(6, 1e-3, optimizer="adamw")


def adapted(seed, **more):
    """A decoder with LoRA on queries and values."""
    return models.decoder(
        input_shape=(LENGTH,),
        classes=WORDS,
        width=WIDTH,
        layers=2,
        heads=4,
        adapters=RANK,
        generator=stream(seed, "adapted"),
        **more,
    )


def sent(seed, ids, plan=ADAM, **more):
    return seen(adapted(seed, **more), ids, labels=ids, plan=plan, words=WORDS)


def drawn(seed, count=2):
    ids = permutation(WORDS, stream(seed, "ids"))[: count * LENGTH]
    return ids.view(count, LENGTH)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("seed", [3, 6, 9, 15])
def test_a_token_without_a_vector_of_its_own_is_not_stated(seed):
    """BERT's row of padding is zero: its input is what all tokens share, and more of it."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=16,
        num_labels=4,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        lora = peft.LoraConfig(r=RANK, target_modules=["query", "value"])
        base = transformers.BertForSequenceClassification(config)
        model = peft.get_peft_model(base, lora).eval()
    ids = 1 + drawn(seed, 4) % (WORDS - 1)
    plan = LocalPlan(10, 2e-4, optimizer="adamw", weight_decay=0.01)
    found = AdapterWords().found(seen(model, ids, plan=plan, words=WORDS))
    assert set(found.clear) <= set(ids.flatten().tolist())


def shares(found, ids):
    held = set(ids.flatten().tolist())
    return len(set(found) - held), len(set(found) & held) / len(held)


@pytest.mark.parametrize(
    "plan",
    [
        ADAM,
        replace(ADAM, weight_decay=0.1),
        replace(ADAM, optimizer="sgd", learning_rate=0.01),
        LocalPlan(6, 1e-3, 1, "adam"),
    ],
)
def test_words_are_found_after_several_steps(plan):
    """None is wrong, and most are found; adapters begin at B = 0."""
    for seed in range(4):
        ids = drawn(seed)
        observation = sent(seed, ids, plan)
        found = AdapterWords().found(observation)
        wrong, part = shares(found.clear, ids)
        assert wrong == 0
        assert part > 0.5
        answer = AdapterWords()(observation, stream(0))
        (fact,) = answer.facts
        assert (fact.kind, fact.count, fact.level) == ("words", len(found.clear), 0.01)
        assert "words are found, not for certain" in answer.problem


def test_more_rounds_find_more_words():
    for seed in range(3):
        ids = drawn(seed, 6)
        rounds = [sent(seed, part) for part in ids.split(2)]
        alone = AdapterWords().found(rounds[-1])
        together = AdapterWords().found(replace(rounds[-1], history=tuple(rounds[:-1])))
        assert shares(together.clear, ids)[0] == 0
        assert len(together.clear) > len(alone.clear)


def test_positions_that_are_learned_are_taken_off():
    ids = drawn(1)
    found = AdapterWords().found(sent(1, ids, positions="learned"))
    wrong, part = shares(found.clear, ids)
    assert wrong == 0
    assert part > 0.3


@pytest.mark.parametrize("sampled", [2**15, 2**12])
def test_squares_follow_the_law_of_chance_beside_outliers(monkeypatch, sampled):
    """Correlated columns, 1.5 % of them far away; a covariance of all would hide these."""
    monkeypatch.setattr(adapter_words, "SAMPLED", sampled)
    draw = np.random.default_rng(0)
    mix = draw.normal(size=(9, 9))
    clean = mix @ draw.normal(size=(9, 40_000)) + 5
    far = mix @ (12 * draw.normal(size=(9, 600)))
    squares = _squares(torch.from_numpy(np.hstack([clean, far])).float()).numpy()
    law = stats.chi2(9)
    assert stats.kstest(squares[:40_000], law.cdf).statistic < 0.03
    assert (squares[40_000:] > law.isf(1e-3)).mean() > 0.95
    # A wrong law is told from it.
    assert stats.kstest(squares[:40_000], stats.chi2(8).cdf).statistic > 0.05


def test_rows_without_any_word_seldom_name_one():
    """One of a hundred lists may be wrong; more than 10 of 300 have a probability of .001."""
    atoms = _normalized(normal((4000, 1024), stream(0, "atoms")))

    def lists(count, level):
        """How many lists of rows of noise name a word."""
        rows = (_normalized(normal((8, 1024), stream(k, "rows")).double()) for k in range(count))
        return sum(bool(_Pursuit.of(one, atoms, level).tokens()[0]) for one in rows)

    assert stats.binom.sf(10, 300, 0.01) < 2e-3
    assert lists(300, 0.01) <= 10
    assert 12 <= lists(60, 0.5) <= 36  # 1 - exp(-.5) of them: the level says what it is


def test_an_echo_of_frequent_words_is_not_sure():
    """A token between two frequent ones, which occur, stands out though it does not occur."""
    source = stream(3, "echo")
    atoms = _normalized(normal((3000, 96), source))
    atoms[2999] = _normalized((atoms[:2].sum(0) + 0.1 * atoms[2999])[None])[0]
    rows = normal((8, 1), source) * (atoms[0] + atoms[1]) + 0.15 * normal((8, 96), source)
    pursuit = _Pursuit.of(_normalized(rows.double()), atoms, 0.01)
    chosen, _ = pursuit.tokens()
    assert 2999 not in chosen
    often = torch.zeros(3000, dtype=torch.float64)
    often[:50] = 1 / 50
    assert float(_echoes(atoms, often, [2999])[0]) > 3
    rare = list(range(100, 2999, 97))
    assert float(_echoes(atoms, often, rare).median()) < 1.5


def signed(seed):
    """Word table, rows after signs, and frequencies; a coordinate of frequent words is large.

    The last word lies along this coordinate and does not occur. A real table has such words: the
    mark at the start of sequences in all-MiniLM-L6-v2 has two large coordinates, and no others.
    """
    atoms = normal((3000, 192), stream(seed, "atoms"))
    atoms[:30, 0] *= 5
    atoms[-1] *= 0.3
    atoms[-1, 0] = 12
    shares = torch.ones(3000, dtype=torch.float64)
    shares[:30] = 100
    weights = normal((24, 30), stream(seed, "weights"))
    return atoms, (weights @ atoms[:30]).double(), shares / shares.sum()


def test_gains_are_those_of_the_optimizer():
    atoms, sums, shares = signed(0)
    size = (atoms.square().T @ (shares.float() + 1 / 3000) / 2).sqrt()
    after_adam = _gains(_normalized(sums.sign()), atoms, shares) * size
    assert float(after_adam.std() / after_adam.mean()) < 0.02
    after_sgd = _gains(_normalized(sums), atoms, shares)
    assert float(after_sgd.std() / after_sgd.mean()) < 0.05


def test_a_word_along_a_large_coordinate_does_not_stand_out_after_adam():
    """Signs show less of a large coordinate than the words' sum has, which is no other word."""

    def stands_out(seed, gains):
        atoms, sums, shares = signed(seed)
        rows = _normalized(sums.sign())
        scaled = atoms * _gains(rows, atoms, shares) if gains else atoms
        found = _Pursuit.of(rows, _normalized(scaled.float()), 0.01).tokens()[0]
        assert len(set(found) & {*range(30)}) > 20
        return 2999 in found

    assert not any(stands_out(seed, gains=True) for seed in range(10))
    assert any(stands_out(seed, gains=False) for seed in range(10))


def test_a_word_of_few_coordinates_is_never_clear():
    """Its numbers are those of single entries, which have no normal law."""
    atoms = normal((3000, 192), stream(0, "atoms"))
    atoms[-1] = 0.1 * atoms[-1]
    atoms[-1, 7:10] = 8.0
    atoms = _normalized(atoms)
    held = [5, 17, 2999]
    rows = normal((12, 3), stream(0, "weights")) @ atoms[held]
    pursuit = _Pursuit.of(_normalized(rows.double()), atoms, 0.01)
    chosen, squares = pursuit.tokens()
    assert {*held} <= {*chosen}
    even = torch.full((3000,), 1 / 3000, dtype=torch.float64)
    clear = _clear(pursuit, chosen, squares, even)
    assert not clear[chosen.index(2999)]
    assert clear[chosen.index(5)]


def test_what_does_not_apply_is_named(monkeypatch):
    ids = drawn(0)
    first = LocalPlan(1, 1e-3, optimizer="adam")
    with pytest.raises(NotApplicable, match="no adapter A changed: B was 0"):
        AdapterWords().found(seen(tiny(0, start=0.0), ids % 60, plan=first))
    few = seen(tiny(0, width=96, rank=4, start=0.1), ids % 60, plan=ADAM)
    with pytest.raises(NotApplicable, match="60 tokens show no law of chance"):
        AdapterWords().found(few)
    monkeypatch.setattr(adapter_words, "MOST_ATOMS", 1000)
    with pytest.raises(NotApplicable, match="do not fit in memory"):
        AdapterWords().found(sent(0, ids))


def merged(seed, ids, learned):
    """An update of queries and values: B (A + words), with A random, and the words in their size.

    Every direction changes if there is no size.
    """
    model = models.decoder(
        input_shape=(LENGTH,),
        classes=WORDS,
        width=WIDTH,
        layers=2,
        heads=4,
        generator=stream(seed, "whole"),
    )
    observation = seen(model, ids, labels=ids, words=WORDS)
    task = observation.task
    group, _ = chosen(readers(task))
    source = stream(seed, "merged")
    inputs = inputs_of(task, group.names[0], ids).flatten(0, 1)
    values = torch.zeros_like(task.parameters)
    for name, _ in group.weights:
        part = task.unflatten(values)[name]
        down = _normalized(normal((4, WIDTH), source))
        if learned:
            sums = normal((4, len(inputs)), source) @ inputs
            down = down + learned * _normalized(sums)
        up = normal((len(part), 4), source)
        part += up @ down if learned else normal(part.shape, source)
    update = replace(observation.update, rows=values[None])
    return replace(observation, update=update)


def test_a_merged_adapter_shows_words_once_training_has_moved_it():
    ids = drawn(5)
    early, late = (AdapterWords().found(merged(5, ids, size)) for size in (0.02, 3.0))
    assert not early.clear
    wrong, part = shares(late.clear, ids)
    assert wrong == 0
    assert part > 0.3
    with pytest.raises(NotApplicable, match="as no merged adapter changes it"):
        AdapterWords().found(merged(5, ids, 0.0))


def test_an_attack_runs_the_output_layer_twice_and_on_few_places():
    """The output layer of a large vocabulary takes longer than all before it (150,000 words)."""
    observation = sent(0, drawn(0))
    model = observation.task.model
    *_, head = (module for module in model.modules() if isinstance(module, torch.nn.Linear))
    assert head.out_features == WORDS
    places = []
    head.register_forward_hook(lambda own, args, out: places.append(out[..., 0].numel()))
    AdapterWords()(observation, stream(0, "attack"))
    assert sorted(places) == [8, LENGTH]
    AdapterWords()(observation, stream(0, "attack"))
    assert sorted(places) == [8, LENGTH, LENGTH], "which tables get the tokens is known by now"
