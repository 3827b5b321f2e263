"""The search for sequences by matching, against the truth it never sees and by brute force."""

import itertools
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import nn

from leakbound import models
from leakbound.attacks import TokenMatching, TokenSpan
from leakbound.attacks.matching.distances import cosine, cosine_layers, cosine_signal
from leakbound.attacks.tokens.matching import candidates_of, weighted
from leakbound.client import gradient
from leakbound.core import Batch, LocalPlan, NotApplicable, Task
from leakbound.defenses import GaussianNoise, NoDefense, Quantization, TopK
from leakbound.domains import TokenDomain
from leakbound.domains.known import KnownValues, known_parts
from leakbound.losses import next_labels
from leakbound.protocol import play
from leakbound.randomness import stream

from .conftest import WORDS, peer

V, N = 60, 6


def drawn(count, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.randint(1, V, (count, N), generator=source)


def task_of(kind="decoder", domain=None, **more):
    given = {"input_shape": (N,), "width": 32, "generator": stream(0, "model")}
    domain = domain or TokenDomain(V, N)
    if kind == "encoder":
        model = models.encoder(classes=2, vocabulary=V, **given)
        return Task.of(model, domain=domain, classes=2, **more)
    model = models.decoder(classes=V, **given)
    return Task.of(model, domain=domain, loss="next_token", classes=V, **more)


def seen_by(task, tokens, defense=None, labels=None):
    if labels is None:
        labels = next_labels(tokens, task.domain.padding)
    sources = [stream(0, "client"), stream(0, "cohort")]
    return play(task, [Batch(tokens, labels)], defense or NoDefense(), sources).observation


def same(found, truth):
    return sorted(found.tolist()) == sorted(truth.tolist())


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_weights_of_one_give_the_update_of_the_tokens(kind):
    """Also with a row of padding that has no gradient, and with unequal lengths."""
    domain = TokenDomain(V, N, padding=0)
    task, tokens = task_of(kind, domain), drawn(3)
    tokens[0, 4:] = 0
    task.model.tokens.padding_idx = 0
    labels = next_labels(tokens, 0) if kind == "decoder" else torch.tensor([0, 1, 1])
    candidates = torch.arange(V)[torch.randperm(V, generator=torch.Generator().manual_seed(1))]
    places = candidates.argsort()[tokens]
    soft = nn.functional.one_hot(places, V).float()
    own = torch.zeros(3, dtype=torch.long) if kind == "decoder" else labels
    row = gradient(weighted(task, candidates), soft, own)
    assert torch.allclose(row, gradient(task, tokens, labels), atol=1e-7)
    assert not torch.allclose(row, gradient(task, tokens.flip(1), labels), atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "defense", "plan"),
    [
        ("decoder", None, None),
        ("decoder", GaussianNoise(noise_std=3e-4), None),
        ("decoder", TopK(rate=0.5), None),
        ("decoder", Quantization(bits=6), None),
        ("decoder", None, LocalPlan(3, 0.1)),
        ("encoder", None, None),
    ],
)
def test_sequences_are_found(kind, defense, plan):
    task, tokens = task_of(kind, **({} if plan is None else {"plan": plan})), drawn(2)
    labels = torch.tensor([0, 1]) if kind == "encoder" else None
    seen = seen_by(task, tokens, defense, labels)
    answer = TokenMatching(steps=150)(seen, stream(0, "attack"))
    assert same(answer.inputs, tokens)
    assert answer.problem is None
    if defense is not None:  # spans fail there
        with suppress(NotApplicable):
            assert not same(TokenSpan()(seen, stream(0)).inputs, tokens)


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_steps_of_adam_are_simulated(kind):
    task, tokens = task_of(kind, plan=LocalPlan(3, 1e-3, None, "adam")), drawn(1)
    labels = torch.tensor([1]) if kind == "encoder" else None
    answer = TokenMatching(steps=150)(seen_by(task, tokens, None, labels), stream(0, "attack"))
    assert torch.equal(answer.inputs, tokens)
    assert answer.problem is None


def test_the_answer_has_the_least_objective_of_all_sequences():
    """Brute force over all orders of the tokens of one sequence."""
    task = task_of()
    tokens = torch.tensor([[5, 3, 5, 8, 1, 3]])
    seen = seen_by(task, tokens, GaussianNoise(noise_std=2e-3))
    answer = TokenMatching(steps=100)(seen, stream(0, "attack"))
    target = seen.update.rows[0]

    def left(row):
        own = gradient(task, torch.tensor([row]), torch.tensor([row]))
        return float(1 - nn.functional.cosine_similarity(own, target, 0))

    each = {row: left(row) for row in set(itertools.permutations(tokens[0].tolist()))}
    assert tuple(answer.inputs[0].tolist()) == min(each, key=each.get)


def test_what_noise_hides_is_a_problem():
    """The head's share of the update is above the noise, that of the tokens is below."""
    task, tokens = task_of("encoder"), drawn(1)
    labels = torch.tensor([1])
    task.parameters.mul_(0.3)
    seen = seen_by(task, tokens, GaussianNoise(noise_std=1e-2), labels)
    answer = TokenMatching(steps=30)(seen, stream(0, "attack"))
    assert not same(answer.inputs, tokens)
    assert answer.problem


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama"])
def test_models_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(1, WORDS, (1, 8), generator=torch.Generator().manual_seed(3))
    task = Task.of(
        peer(transformers, kind),
        domain=TokenDomain(WORDS, 8),
        loss="cross_entropy" if kind == "bert" else "next_token",
        classes=2 if kind == "bert" else WORDS,
    )
    labels = torch.tensor([1]) if kind == "bert" else None
    seen = seen_by(task, ids, Quantization(bits=8), labels)
    answer = TokenMatching(steps=150)(seen, stream(0, "attack"))
    assert same(answer.inputs, ids)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_is_searched_too(side):
    domain = TokenDomain(V, N, padding=0, padding_side=side)
    task, tokens = task_of(domain=domain), drawn(2).clamp_min(1)
    tokens[0, slice(4, None) if side == "right" else slice(N - 4)] = 0
    answer = TokenMatching(steps=150)(seen_by(task, tokens), stream(0, "attack"))
    assert same(answer.inputs, tokens)


def test_candidates_are_the_tokens_that_other_attacks_find():
    task, tokens = task_of(), drawn(2)
    found = set(candidates_of(seen_by(task, tokens)).tolist())
    assert set(tokens[:, :-1].flatten().tolist()) <= found <= set(tokens.flatten().tolist())
    hidden = seen_by(task, tokens, GaussianNoise(noise_std=10.0))
    assert len(candidates_of(hidden)) == 4 * 2 * N  # those with the largest rows
    model = models.decoder(input_shape=(N,), classes=V, width=32, generator=stream(0))
    model.tokens.weight.requires_grad_(False)
    frozen = Task.of(model, domain=task.domain, loss="next_token", classes=V)
    assert set(tokens[:, :-1].flatten().tolist()) <= set(
        candidates_of(seen_by(frozen, tokens)).tolist()
    )


def test_noise_hides_them_and_it_says_so():
    task, tokens = task_of(), drawn(1)
    seen = seen_by(task, tokens, GaussianNoise(noise_std=10.0))
    answer = TokenMatching(steps=20, restarts=2)(seen, stream(0, "attack"))
    assert not same(answer.inputs, tokens)
    assert answer.agreement.shape == (1, N)
    assert float(answer.agreement.min()) >= 0.5  # the answer is one of the two searches'
    assert "too much noise" in answer.problem


def test_a_search_that_failed_says_what_is_left():
    task, tokens = task_of("encoder"), drawn(4)
    seen = seen_by(task, tokens, labels=torch.arange(4) % 2)
    answer = TokenMatching(steps=3, restarts=1, moves=0)(seen, stream(0, "attack"))
    assert "of the update unexplained" in answer.problem


def test_the_model_is_not_changed():
    task, tokens = task_of(), drawn(1)
    before = gradient(task, tokens, tokens)
    TokenMatching(steps=2)(seen_by(task, tokens), stream(0))
    assert torch.equal(gradient(task, tokens, tokens), before)
    assert not any(module._forward_hooks for module in task.model.modules())


def test_labels_that_are_other_tokens():
    task = Task.of(
        models.decoder(input_shape=(N,), classes=V, width=16, generator=stream(0)),
        domain=TokenDomain(V, N),
        loss="token_cross_entropy",
        classes=V,
    )
    tokens = drawn(1)
    with pytest.raises(NotApplicable, match="other tokens"):
        TokenMatching()(seen_by(task, tokens, labels=drawn(1, 1)), stream(0))


def test_a_tensor_counts_by_its_signal():
    """Without noise as the mean over tensors; a tensor of noise alone counts nothing."""
    source = torch.Generator().manual_seed(0)
    guess, seen = torch.randn(2, 1, 20, generator=source)
    spans = [(0, 8), (8, 20)]
    assert torch.equal(
        cosine_signal(guess, seen, None, spans), cosine_layers(guess, seen, None, spans)
    )
    seen[:, :8] *= 100
    seen[:, 8:] *= 0.5 / seen[:, 8:].square().mean().sqrt()
    first = cosine(guess[:, :8], seen[:, :8], None, [])
    found = cosine_signal(guess, seen, torch.ones(1, 20), spans)
    assert float(found) == pytest.approx(float(first))


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_known_tokens_stay_at_their_places(kind):
    """Under noise that hides which tokens occur: the search must not move what is known."""
    task, tokens = task_of(kind), drawn(2)
    labels = torch.tensor([0, 1]) if kind == "encoder" else None
    seen = seen_by(task, tokens, GaussianNoise(3e-3), labels)
    parts = known_parts(task.domain, "places:0,2,5")
    seen = replace(seen, known=KnownValues(parts, parts.values(tokens)))
    assert set(parts.values(tokens).flatten().tolist()) <= set(candidates_of(seen).tolist())
    answer = TokenMatching(steps=60, restarts=1, moves=20)(seen, stream(0, "attack"))
    # In the order of the known values, as the search holds them.
    assert torch.equal(parts.values(answer.inputs), parts.values(tokens))


def test_an_attacker_may_name_the_candidates():
    """With a wrong list, none of its answers is taken for right; other tokens are not searched."""
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9]])
    seen = seen_by(task_of(), tokens)
    few = TokenMatching(among=(1, 3, 4, 5, 9), steps=60, restarts=1)
    answer = few(seen, stream(0))
    assert same(answer.inputs, tokens)
    assert answer.problem is None
    wrong = replace(few, among=(1, 3, 4, 5, 2), steps=10, moves=1)(seen, stream(0))
    assert {*wrong.inputs.flatten().tolist()} <= {1, 2, 3, 4, 5}
    assert "unexplained" in wrong.problem
    padded = seen_by(task_of(domain=TokenDomain(V, N, padding=0)), tokens)
    assert few._candidates(padded).tolist() == [0, 1, 3, 4, 5, 9]
    parts = known_parts(padded.task.domain, "places:0,5")
    known = replace(padded, known=KnownValues(parts, parts.values(tokens)))
    assert TokenMatching(among=(7,))._candidates(known).tolist() == [0, 3, 7, 9]
    with pytest.raises(ValueError, match="among holds 60; the domain's tokens are 0 to 59"):
        replace(few, among=(1, V))(seen, stream(0))
