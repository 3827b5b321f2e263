"""Words that a trained model expects are not stated as words that occur."""

import pytest
import torch
from torch import nn

from leakbound import models
from leakbound.attacks import TokenRows
from leakbound.core import Batch, Task
from leakbound.defenses import GaussianNoise, NoDefense
from leakbound.domains import TokenDomain
from leakbound.protocol import play
from leakbound.randomness import permutation, stream, uniform

WORDS, PLACES, WIDTH = 60, 8, 64
STEPS, BATCH, SURE = 200, 32, 0.97


def text(count, follower, source):
    """(count, n) sequences in which a word is nearly always followed by its own follower."""
    ids = (uniform((count, 1), source) * WORDS).long()
    for _ in range(PLACES - 1):
        other = (uniform((count, 1), source) * WORDS).long()
        usual = uniform((count, 1), source) < SURE
        ids = torch.cat([ids, torch.where(usual, follower[ids[:, -1:]], other)], 1)
    return ids


@pytest.fixture(scope="module")
def trained():
    """A tied decoder that has learned this language, and the followers."""
    shape = {"input_shape": (PLACES,), "classes": WORDS, "width": WIDTH, "heads": 2}
    model = models.decoder(tied=True, generator=stream(0, "model"), **shape)
    source = stream(0, "language")
    follower = permutation(WORDS, source)
    rule = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        ids = text(BATCH, follower, source)
        rule.zero_grad()
        scores = model(ids)[:, :-1].flatten(0, 1)
        nn.functional.cross_entropy(scores, ids[:, 1:].flatten()).backward()
        rule.step()
    return model.eval(), follower


@pytest.mark.parametrize("share", [0.0, 1e-6, 1e-4])
@pytest.mark.parametrize("usual", [True, False])
def test_a_client_whose_words_surprise_the_model(trained, usual, share):
    """With the old rule, 45 of 144 rounds of such models under noise stated a word falsely."""
    model, follower = trained
    domain = TokenDomain(WORDS, PLACES)
    stated = 0
    for seed in range(8):
        source = stream(seed, "client")
        ids = text(1, follower, source)
        if not usual:
            ids = (uniform((1, PLACES), source) * WORDS).long()
        task = Task.of(model, domain=domain, loss="next_token", classes=WORDS)
        sources = [source, stream(seed, "cohort")]
        plain = play(task, [Batch(ids, ids)], NoDefense(), sources).observation
        noise = GaussianNoise(float(plain.update.rows.norm()) * share) if share else NoDefense()
        seen = play(task, [Batch(ids, ids)], noise, sources).observation
        facts = TokenRows()(seen, stream(seed)).facts
        found = {int(word) for fact in facts for word in fact.items}
        assert found <= {*ids.flatten().tolist()}
        stated += bool(found)
    assert stated == 8 or share
