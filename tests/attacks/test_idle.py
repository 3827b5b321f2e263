"""Weight decay in a plan hides nothing: every attack gets the update without what it does alone."""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import nn

from leakbound.attacks import LinearInversion, SpanDecoding, TokenRows, TokenSpan
from leakbound.attacks.idle import beside_decay, idle
from leakbound.captured import Settings, TrainingInfo, attack_update, load
from leakbound.core import Batch, LocalPlan, NotApplicable, Task
from leakbound.defenses import Clip, GaussianNoise, NoDefense
from leakbound.domains import Column, TableDomain, TokenDomain
from leakbound.models import decoder
from leakbound.protocol import play
from leakbound.randomness import stream

WORDS, LENGTH = 300, 10


class Text(nn.Module):
    def __init__(self, seed, spread):
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(WORDS, 16)
        self.head = nn.Linear(16, 4)
        nn.init.normal_(self.words.weight, std=spread)

    def forward(self, ids):
        return self.head(torch.tanh(self.words(ids)).mean(1))


def trained_text(seed, spread, rate, decay, steps, kind=torch.float32, delta=torch.float32):
    """The client's tokens, and what PyTorch's Adam with its own decay makes of the weights; a
    change in type `delta` if weights are not of it.
    """
    model = Text(seed, spread).to(kind)
    ids = torch.randint(0, WORDS, (4, LENGTH), generator=stream(seed, "ids"))
    before = {name: value.clone().float() for name, value in model.state_dict().items()}
    rule = torch.optim.Adam(model.parameters(), lr=rate, weight_decay=decay)
    for step in range(steps):
        part = ids[2 * (step % 2) :][:2]
        rule.zero_grad()
        nn.functional.cross_entropy(model(part).float(), torch.tensor([0, 1])).backward()
        rule.step()
    after = {name: value.float() for name, value in model.state_dict().items()}
    given = TrainingInfo(
        examples=4,
        learning_rate=rate,
        steps=steps,
        batch_size=2,
        optimizer="adam",
        weight_decay=decay,
    )
    update = load(after, before, kind="weights")
    if delta is not torch.float32:
        change = {name: (after[name] - before[name]).to(delta) for name in after}
        update = load(change, before, kind="delta")
    settings = Settings(
        (LENGTH,), attacks="token_rows", domain=TokenDomain(WORDS, LENGTH), classes=4
    )
    outcome = attack_update(update, Text(seed, spread), settings, given)
    return set(ids[: 2 * min(steps, 2)].flatten().tolist()), outcome


HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("rate", "decay", "kind", "delta"),
    [
        (1e-2, 1e-2, torch.float32, torch.float32),
        (1e-3, 0.3, torch.float32, torch.float32),
        (1e-4, 1e-4, torch.float32, torch.float32),
        (1e-3, 1e-2, HALF, torch.float32),
        (1e-3, 1e-2, torch.float32, HALF),
    ],
)
def test_touched_rows_are_certain_beside_adams_own_decay(rate, decay, kind, delta):
    """All rows move; those that no token touched move as decay alone moves them."""
    found = right = occur = 0
    for seed, (spread, steps) in enumerate([(0.02, 1), (0.02, 20), (1.0, 1), (1.0, 5)]):
        true, outcome = trained_text(seed, spread, rate, decay, steps, kind, delta)
        [record] = outcome.records
        named = sum(fact.count for fact in record.facts if fact.kind == "words")
        tokens = {*TokenRows().tokens(outcome.inferred[0].observation)} if named else set()
        assert len(tokens) == named
        found += named
        right += len(tokens & true)
        occur += len(true)
    assert found == right, "a token that is not in the batch is called certain"
    exact = kind == delta == torch.float32
    assert right > (0.75 if exact else 0.2) * occur


@pytest.mark.parametrize("wrong", [{"learning_rate": 1.01e-3}, {"steps": 4}, {"optimizer": "lion"}])
def test_a_plan_that_is_not_the_clients_states_nothing_false(wrong):
    true, outcome = trained_text(0, 0.02, 1e-3, 1e-2, 5)
    seen = outcome.inferred[0].observation
    other = replace(seen, task=replace(seen.task, plan=replace(seen.task.plan, **wrong)))
    with suppress(NotApplicable):
        if TokenRows()(other, stream(0)).facts:
            assert {*TokenRows().tokens(other)} <= true


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
def test_decay_alone_is_that_of_pytorch(name):
    weights = torch.randn(200, generator=stream(0, "weights"), dtype=torch.float64)
    moved = nn.Parameter(weights.clone())
    theirs = getattr(torch.optim, name)([moved], lr=0.01, weight_decay=0.1)
    for _ in range(7):
        moved.grad = torch.zeros_like(moved)
        theirs.step()
    plan = LocalPlan(7, 0.01, optimizer=name.lower(), weight_decay=0.1)
    torch.testing.assert_close(idle(plan, weights), (weights - moved.detach()) / 0.01)


def played(model, batch, plan, defense=None, **more):
    task = Task.of(model, plan=plan, **more)
    sources = [stream(0, "client"), stream(0, "cohort")]
    return play(task, [batch], defense or NoDefense(), sources).observation


PLAN = LocalPlan(1, 0.1, weight_decay=0.05)


def test_sequences_are_read_beside_decay_of_the_plan():
    ids = torch.randint(0, 60, (2, 6), generator=stream(0, "ids"))
    model = decoder(
        input_shape=(6,), classes=60, width=48, heads=2, generator=stream(0, "model")
    ).eval()
    domain = TokenDomain(60, 6)
    seen = played(model, Batch(ids, ids), PLAN, domain=domain, loss="next_token", classes=60)
    answer = TokenSpan()(seen, stream(0))
    assert answer.problem is None
    assert sorted(answer.inputs.tolist()) == sorted(ids.tolist())


def test_rows_of_a_table_are_read_beside_decay_of_the_plan():
    columns = [Column(f"c{k}", "categorical", levels=("a", "b", "c")) for k in range(4)]
    domain = TableDomain((*columns, Column("age", "integer", 0, 100)))
    rows = domain.hard(torch.rand(3, *domain.shape, generator=stream(0, "rows")))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(*domain.shape, 32), nn.ReLU(), nn.Linear(32, 2))
    seen = played(model, Batch(rows, torch.tensor([0, 1, 1])), PLAN, domain=domain)
    answer = SpanDecoding()(seen, stream(0))
    assert sorted(domain.rows(answer.inputs)) == sorted(domain.rows(rows))


def test_a_defense_that_clips_the_decay_is_not_undone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    batch = Batch(torch.rand(1, 1, 4, 4), torch.tensor([1]))
    with pytest.raises(NotApplicable, match="changes the weight decay"):
        LinearInversion()(played(model, batch, PLAN, Clip(clip_norm=0.1)), stream(0))
    noisy = played(model, batch, PLAN, GaussianNoise(noise_std=1e-6))
    left = beside_decay(noisy, noisy.task).update
    assert left.law == noisy.update.law
    answer = LinearInversion()(noisy, stream(0))
    assert float((answer.inputs - batch.inputs).abs().max()) < 0.01
