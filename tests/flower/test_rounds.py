"""What clients keep between rounds: as the library's own rounds, and only on the client."""

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import nn

from leakbound.core import Batch, ClientContext, Unit, Update
from leakbound.defenses import (
    ClipExamples,
    CorrelatedNoise,
    GaussianNoise,
    LocalOptimalNoise,
    LocalOptimalPruning,
    Mean,
    NoisyCopy,
    OptimalNoise,
    OptimalPruning,
    PriPrune,
    WhitenedDpSgd,
    Withhold,
    chain,
)
from leakbound.flower import DefenseMod, run
from leakbound.flower.messages import load, save
from leakbound.flower.mods import computes_anew
from leakbound.protocol import resolve, step
from leakbound.randomness import stream

KEEPING = {
    "withhold": Withhold("mix", 0.5),
    "withhold_then_noise": chain(Withhold(rate=0.3), GaussianNoise(0.01)),
    "pri_prune": PriPrune(start=0.45),
    "pri_prune_last": PriPrune(compose="last"),
    "noisy_copy": NoisyCopy(0.1),
    "noisy_copy_then_withhold": chain(NoisyCopy(0.1), Withhold(rate=0.3)),
    "local_noise": LocalOptimalNoise(0.05, refresh=2),
    "local_pruning": LocalOptimalPruning(0.5, refresh=2),
    "optimal_noise": OptimalNoise(0.05, refresh=2),
    "correlated_noise": OptimalNoise(0.05, rule="energy", correlation="low_rank", refresh=2),
    "noise_over_rounds": chain(ClipExamples(1.0), Mean(), CorrelatedNoise(0.1, "band:3")),
    "inverse_band": chain(ClipExamples(1.0), Mean(), CorrelatedNoise(0.1, "bisr:3")),
    "layered_noise": OptimalNoise(0.05, rule="energy", correlation="layers", refresh=2),
    "optimal_pruning": OptimalPruning(0.5, refresh=3),
    "whitened": WhitenedDpSgd(refresh=2),
}


def trained(flower, start, batch):
    """One step of SGD as the app takes it, from flat weights."""
    net, at = flower.Net(), 0
    with torch.no_grad():
        for own in net.parameters():  # a copy each: views of one vector add up in another order
            own.copy_(start[at : at + own.numel()].view_as(own))
            at += own.numel()
    optimizer = torch.optim.SGD(net.parameters(), lr=flower.RATE)
    nn.functional.cross_entropy(net(batch.inputs), batch.labels).backward()
    optimizer.step()
    return nn.utils.parameters_to_vector(net.parameters()).detach()


@pytest.mark.parametrize("name", list(KEEPING))
def test_rounds_are_the_librarys(name, flower, setup, batches):
    defense, seen, states = chain(KEEPING[name]), [], {}
    mod = DefenseMod(defense, setup, seed=5)

    def on_exchange(asked, reply):
        if asked.metadata.message_type == "train":
            assert not reply.has_error(), reply.error.reason
            sent, back = asked.content["arrays"], reply.content["arrays"]
            seen.append(
                (asked.metadata.dst_node_id - 2, flower.weights(sent), flower.weights(back))
            )

    app = flower.client_app([mod], batches=batches)
    grid = run(flower.server_app(3), app, 2, on_exchange=on_exchange)
    assert len(seen) == 6
    for number, (who, before, after) in enumerate(seen):
        task = setup.task(setup.state(), {"lr": flower.RATE}).with_parameters(before)
        source = stream(5, "flower", str(who), str(number // 2 + 1), 0)
        state, previous = states.get(who, (None, None))
        batch, ready = Batch(*batches(who, 1)[0]), resolve(defense, task, flower.SIZE, previous)
        if computes_anew(defense):
            update, state = step(task, batch, ready, source, state)
        else:
            own, state = ready.begin(task, state or ready.init(task), source)
            rows = (own.parameters - trained(flower, own.parameters, batch)) / flower.RATE
            update = Update(rows[None], Unit.CLIENT, (batch.size,))
            update, state = ready.transform(update, state, ClientContext(own, batch), source)
        states[who] = state, ready
        assert torch.equal(after, before - flower.RATE * update.rows[0]), (number, who)
    assert all("leakbound.defense.0.tree" in c.state for c in grid.contexts.values())


def test_a_client_that_withholds_starts_from_its_own_weights(flower, setup, batches):
    sent, started = [], []
    mod = DefenseMod(Withhold(rate=0.5), setup, seed=5)

    def inner(message, context, call_next):
        started.append(flower.weights(message.content["arrays"]))
        return call_next(message, context)

    app = flower.client_app([mod, inner], batches=batches)
    run(
        flower.server_app(2),
        app,
        2,
        on_exchange=lambda asked, _: sent.append(flower.weights(asked.content["arrays"])),
    )
    assert torch.equal(started[0], sent[0])
    assert not torch.equal(started[2], sent[4])


def test_state_stays_on_the_client(flower, setup, batches):
    keys = set()

    def on_exchange(_, reply):
        keys.update(reply.content)

    app = flower.client_app([DefenseMod(NoisyCopy(0.1), setup)], batches=batches)
    run(flower.server_app(2), app, 2, on_exchange=on_exchange)
    assert keys == {"arrays", "metrics"}


def test_a_state_of_another_defense_is_refused(flower, setup, batches):
    first = flower.client_app([DefenseMod(NoisyCopy(0.1), setup)], batches=batches)
    grid = run(flower.server_app(1), first, 2)
    grid._app = flower.client_app([DefenseMod(NoisyCopy(0.2), setup)], batches=batches)
    reply = flower.ask(None, flower.message(grid), grid=grid)
    assert "has the state of NoisyCopy(noise_std=0.1)" in reply.error.reason


def test_states_go_through_records_and_back():
    records, defense = RecordDict(), chain(Withhold())
    value = (None, (3, 0.5, "a", True), {"x": torch.arange(3)}, [torch.tensor(2.5).double()])
    save(records, "k", "me", value)
    back = load(records, "k", "me", defense)
    assert back[:2] == value[:2]
    assert torch.equal(back[2]["x"], value[2]["x"])
    assert back[3][0].dtype == torch.float64
    assert float(back[3][0]) == 2.5
    assert load(records, "other", "me", defense) is None


def test_states_make_no_class_that_the_defense_does_not_know():
    records = RecordDict()
    tree = '{"class": "Popen", "of": "subprocess", "fields": {"args": "true"}}'
    records["k.tree"] = ConfigRecord({"tree": tree, "owner": "me"})
    records["k.arrays"] = ArrayRecord()
    with pytest.raises(ValueError, match="does not know"):
        load(records, "k", "me", chain(Withhold()))
    with pytest.raises(ValueError, match="cannot be stored"):
        save(records, "k", "me", object())
