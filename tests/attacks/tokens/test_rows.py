"""The tokens in a batch, by rows of the word embedding, and the order of one sequence."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from leakbound.attacks.tokens.layers import embeddings, word_table
from leakbound.attacks.tokens.rows import TokenRows
from leakbound.core import Batch, LocalPlan, NotApplicable, Task
from leakbound.defenses import GaussianNoise, LaplaceNoise, NoDefense, TopK
from leakbound.domains import TokenDomain
from leakbound.losses import UNSCORED
from leakbound.protocol import play
from leakbound.randomness import stream
from leakbound.testing import check_attack

from .conftest import WORDS, peer, tokens
from .conftest import decoder_or_encoder as built

NOISE = [stream(0, "a"), stream(0, "b")]


def seen(
    model,
    ids,
    defense=None,
    plan=None,
    padding=None,
    words=WORDS,
    encoder=False,
    side="right",
):
    domain = TokenDomain(words, ids.shape[1], padding=padding, padding_side=side)
    labels = torch.arange(len(ids)) % 2 if encoder else ids
    if padding is not None and not encoder:
        labels = torch.where(ids == padding, UNSCORED, ids)
    loss = "cross_entropy" if encoder else "next_token"
    classes = 2 if encoder else words
    task = Task.of(model.eval(), domain=domain, loss=loss, classes=classes, plan=plan)
    return play(task, [Batch(ids, labels)], defense or NoDefense(), NOISE).observation


def inside(ids, encoder=False):
    return tuple(sorted({*(ids if encoder else ids[:, :-1]).flatten().tolist()}))


@pytest.mark.parametrize("kind", ["decoder", "tied", "rotary", "rotary tied", "encoder"])
@pytest.mark.parametrize(("count", "length"), [(1, 12), (2, 6), (4, 12), (7, 9)])
def test_the_set_is_exact(kind, count, length):
    for seed in range(2):
        ids = tokens(count, length, seed)
        observation = seen(built(kind, length, seed), ids, encoder=kind == "encoder")
        assert TokenRows().tokens(observation) == inside(ids, kind == "encoder")


def test_a_shared_table_without_free_directions_is_refused():
    ids = tokens(10, 12)
    observation = seen(built("tied", 12, width=64), ids)
    with pytest.raises(NotApplicable, match="cannot be separated"):
        TokenRows().tokens(observation)


@pytest.mark.parametrize("kind", ["decoder", "encoder", "tied"])
def test_the_order_of_one_sequence_with_repeats(kind):
    for seed in range(4):
        ids = tokens(1, 12, seed, words=9)  # many repeats
        ids[0, -1] = 50  # of a shared table, only a token that occurs nowhere else shows
        answer = TokenRows()(seen(built(kind, 12, seed), ids, encoder=kind == "encoder"), stream(0))
        assert answer.problem is None
        assert torch.equal(answer.inputs, ids)
        assert answer.objective < 1e-3


def test_a_last_token_that_a_shared_table_hides_is_a_problem():
    ids = tokens(1, 12)
    ids[0, -1] = ids[0, 3]
    answer = TokenRows()(seen(built("tied", 12), ids), stream(0))
    assert torch.equal(answer.inputs[:, :-1], ids[:, :-1])
    assert "last token" in answer.problem
    known = replace(seen(built("tied", 12), ids), labels=ids.clone())
    answer = TokenRows()(known, stream(0))
    assert torch.equal(answer.inputs, ids)
    assert answer.problem is None
    assert answer.labels is None
    assert TokenRows().tokens(known) == inside(ids, encoder=True)


def test_several_sequences_and_rotary_positions_have_no_order():
    answer = TokenRows()(seen(built("decoder", 6), tokens(2, 6)), stream(0))
    assert "which sequence holds which" in answer.problem
    answer = TokenRows()(seen(built("rotary", 6), tokens(1, 6)), stream(0))
    assert "no trained positions" in answer.problem
    assert answer.inputs.dtype == torch.int64


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_padding_is_left_out(kind):
    ids = tokens(1, 10, lowest=1)
    ids[0, 7:] = 0
    observation = seen(built(kind, 10), ids, padding=0, encoder=kind == "encoder")
    answer = TokenRows()(observation, stream(0))
    assert answer.problem is None
    assert torch.equal(answer.inputs, ids)
    assert 0 not in TokenRows().tokens(observation)


@pytest.mark.parametrize("kind", ["decoder", "gpt2", "gpt2 tied"])
@pytest.mark.parametrize("pads", [0, 1, 4])
def test_padding_before_a_sequence_is_no_word(kind, pads):
    ids = tokens(1, 10, lowest=1)
    ids[0, :pads] = 0
    if kind == "decoder":
        model = built(kind, 10)
    else:
        model = peer(pytest.importorskip("transformers"), kind)
    observation = seen(model, ids, padding=0, side="left")
    answer = TokenRows()(observation, stream(0))
    assert answer.problem is None
    assert torch.equal(answer.inputs, ids)
    assert 0 not in TokenRows().tokens(observation)
    assert all("0" not in fact.items for fact in answer.facts)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_local_steps_keep_the_set(optimizer):
    ids = tokens(4, 6)
    plan = LocalPlan(3, 0.01, 2, optimizer)
    ids_seen = ids[:4]  # minibatches of 2 in turn: 1-2, 3-4, 1-2
    observation = seen(built("encoder", 6), ids, plan=plan, encoder=True)
    assert TokenRows().tokens(observation) == inside(ids_seen, encoder=True)
    answer = TokenRows()(seen(built("encoder", 6), ids[:1], plan=plan, encoder=True), stream(0))
    assert "local steps" in answer.problem


def test_adam_with_a_shared_table_is_refused():
    plan = LocalPlan(1, 0.01, optimizer="adam")
    with pytest.raises(NotApplicable, match="shares the word embedding"):
        TokenRows()(seen(built("tied", 6), tokens(1, 6), plan=plan), stream(0))


@pytest.mark.parametrize("decay", [1e-4, 1e-2])
def test_weight_decay_is_removed(decay):
    ids = tokens(4, 6)
    observation = seen(built("encoder", 6), ids, encoder=True)
    rows = observation.update.rows + decay * observation.task.parameters
    moved = replace(observation, update=replace(observation.update, rows=rows))
    assert TokenRows().tokens(moved) == inside(ids, encoder=True)


def test_unknown_noise_is_refused():
    observation = seen(built("encoder", 6), tokens(4, 6), encoder=True)
    rows = observation.update.rows
    rows = rows + torch.randn(rows.shape, generator=stream(0, "noise")) * rows.abs().max()
    with pytest.raises(NotApplicable, match="no gap"):
        TokenRows().tokens(replace(observation, update=replace(observation.update, rows=rows)))


@pytest.mark.parametrize("kind", ["encoder", "decoder", "tied"])
@pytest.mark.parametrize("defense", [GaussianNoise, LaplaceNoise])
def test_known_noise_leaves_only_tokens_of_the_batch(kind, defense):
    if kind == "tied" and defense is LaplaceNoise:
        return
    recalls = []
    for share in (1e-6, 1e-3, 1e-1):
        wrong = found = 0
        for seed in range(10):
            ids = tokens(2, 6, seed)
            model, encoder = built(kind, 6, seed), kind == "encoder"
            plain = seen(model, ids, encoder=encoder)
            size = float(plain.update.rows.norm()) * share
            got = {*TokenRows().tokens(seen(model, ids, defense(size), encoder=encoder))}
            truth = {*ids.flatten().tolist()}
            wrong, found = wrong + len(got - truth), found + len(got & truth) / len(truth)
        assert wrong <= 1  # 10 trials at .001
        recalls.append(found / 10)
    assert recalls[0] > 0.7
    if kind != "tied":  # there, noise also covers directions of labels, whose rows then count
        assert recalls[0] >= recalls[1] >= recalls[2]


def test_levels_of_noise_hold():
    """Under noise alone, any row is touched in one of 1,000 updates."""
    ids = tokens(1, 6)
    observation = seen(built("encoder", 6), ids, GaussianNoise(1.0), encoder=True)
    false = 0
    for seed in range(300):
        rows = torch.randn(observation.update.rows.shape, generator=stream(seed, "level"))
        empty = replace(observation, update=replace(observation.update, rows=rows))
        false += bool(TokenRows().tokens(empty))
    assert false <= 3  # P(more) = 2e-4 at .001


def test_noise_never_certifies_a_wrong_order():
    wrong = 0
    for seed in range(12):
        for share in (1e-7, 1e-5, 1e-4, 1e-3):
            ids, model = tokens(1, 8, seed), built("encoder", 8, seed)
            size = float(seen(model, ids, encoder=True).update.rows.norm()) * share
            observation = seen(model, ids, GaussianNoise(size), encoder=True)
            answer = TokenRows()(observation, stream(0))
            wrong += answer.problem is None and not torch.equal(answer.inputs, ids)
    assert wrong == 0


def test_withheld_entries_are_stated():
    ids = tokens(1, 6)
    answer = TokenRows()(seen(built("encoder", 6), ids, TopK(0.2), encoder=True), stream(0))
    assert "withheld" in answer.problem


def test_clients_are_answered_one_by_one():
    ids, model = tokens(2, 6), built("encoder", 6)
    both = [seen(model, row[None], encoder=True) for row in ids]
    update = type(both[0].update).stack([one.update for one in both])
    joint = replace(both[0], update=update, cohort=(1, 1), labels=None)
    answer = TokenRows()(joint, stream(0))
    assert torch.equal(answer.inputs, ids)
    assert TokenRows().tokens(joint) == inside(ids, encoder=True)


def test_what_it_does_not_apply_to():
    model = built("encoder", 6)
    model.get_submodule("tokens").requires_grad_(False)
    with pytest.raises(NotApplicable, match="frozen"):
        TokenRows()(seen(model, tokens(1, 6), encoder=True), stream(0))
    task = Task.of(nn.Linear(4, 2))
    images = play(task, [Batch(torch.rand(1, 4), torch.tensor([1]))], NoDefense(), NOISE)
    with pytest.raises(NotApplicable, match="not sequences of tokens"):
        TokenRows()(images.observation, stream(0))
    still = seen(built("encoder", 6), tokens(1, 6), encoder=True)
    zero = replace(still, update=replace(still.update, rows=still.update.rows * 0))
    assert "vanished" in TokenRows()(zero, stream(0)).problem


def test_contract():
    model = built("encoder", 6, words=40, width=32)
    task = Task.of(model.eval(), domain=TokenDomain(40, 6), classes=2)
    for count in (1, 2):
        batch = Batch(tokens(count, 6, words=40), torch.arange(count))
        check_attack(TokenRows(), task=task, batch=batch)


@pytest.mark.parametrize("kind", ["gpt2", "gpt2 tied", "llama", "bert"])
def test_models_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    for count, seed in ((1, 0), (4, 1)):
        ids = tokens(count, 10, seed, lowest=1)
        ids[0, -1] = WORDS - 1
        observation = seen(peer(transformers, kind), ids, encoder=kind == "bert")
        assert TokenRows().tokens(observation) == inside(ids, kind == "bert")
        answer = TokenRows()(observation, stream(0))
        ordered = count == 1 and kind != "llama"
        assert (answer.problem is None) == ordered
        assert torch.equal(answer.inputs, ids) == ordered


@pytest.mark.parametrize(("scale", "share"), [(5.0, 1e-4), (20.0, 1e-6), (20.0, 0.0), (1.0, 0.0)])
def test_words_that_the_model_expects_are_not_taken_for_words_that_occur(scale, share):
    """A sure model scores few words, and a state of the output shows in their rows alone.

    Under noise its part of the other rows is hidden: 23 of 24 rounds named a word that was only
    expected.
    """
    stated = 0
    for seed in range(6):
        ids = tokens(1 + seed % 2, 8, seed, words=60)
        model = built("tied", 8, seed, words=60, width=64)
        table = next(p for p in model.parameters() if p.shape == (60, 64))
        table.data *= scale
        plain = seen(model, ids, words=60)
        size = float(plain.update.rows.norm()) * share
        defense = GaussianNoise(size) if share else None
        answer = TokenRows()(seen(model, ids, defense, words=60), stream(0))
        found = {int(word) for fact in answer.facts for word in fact.items}
        assert found <= {*ids.flatten().tolist()}
        stated += bool(found)
    assert stated == (0 if share else 6)


def test_a_state_that_only_a_label_and_a_wrong_word_show_states_nothing():
    """Of masked words: the number of scored places is not known, so states may be missing."""
    transformers = pytest.importorskip("transformers")
    stated = 0
    for seed in range(4):
        model = peer(transformers, "masked tied", seed)
        table = model.bert.embeddings.word_embeddings.weight
        table.data *= 40.0
        text = tokens(1, 10, seed, lowest=2)
        hidden = torch.arange(10) % 4 == 0
        ids, labels = text.where(~hidden, 1), text.where(hidden, UNSCORED)
        domain = TokenDomain(WORDS, 10)
        task = Task.of(model, domain=domain, loss="token_cross_entropy", classes=WORDS)
        observation = play(task, [Batch(ids, labels)], NoDefense(), NOISE).observation
        stated += bool(TokenRows()(observation, stream(0)).facts)
        known = replace(observation, labels=labels)
        found = {int(word) for fact in TokenRows()(known, stream(0)).facts for word in fact.items}
        assert found <= {*text.flatten().tolist(), 1}
    assert not stated


@pytest.mark.parametrize("share", [0.0, 1e-6])
def test_rows_that_any_span_holds_prove_nothing(share):
    """Of 60 rows without any structure, the half that made the span lies in it; two are zero.

    So did the table of a client with weights in bfloat16, whose decay rounds; 30 words were stated.
    """
    model, ids = built("tied", 8, words=60, width=48), tokens(4, 8, words=60)
    values = torch.randn(60, 48, generator=stream(0, "rows"))
    values[30:] *= 3
    values[:2] = 0
    noise = GaussianNoise(noise_std=share * float(values.norm())) if share else None
    observation = seen(model, ids, noise, words=60)
    flat = observation.update.rows.clone()
    observation.task.unflatten(flat[0])[word_table(observation.task).weight].copy_(values)
    update = replace(observation.update, rows=flat)
    answer = TokenRows()(replace(observation, update=update), stream(0))
    assert answer.facts == ()
    assert len(set(answer.inputs.flatten().tolist())) > 20


class Filled(nn.Module):
    """Fills every sequence up to its own length, as models with fixed shapes do."""

    def __init__(self, words, length):
        super().__init__()
        self.length = length
        self.table = nn.Embedding(words, 8)
        self.last = nn.Linear(8, words)

    def forward(self, tokens):
        missing = self.length - tokens.shape[1]
        return self.last(self.table(nn.functional.pad(tokens, (0, missing))))


def test_a_table_of_a_model_that_fills_short_sequences_is_found():
    task = Task.of(Filled(40, 12), domain=TokenDomain(40, 12), loss="next_token", classes=40)
    assert embeddings(task) == ["table"]
