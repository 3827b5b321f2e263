"""An audit says which round it attacks, and attacks one in which the defense has an effect."""

import json
from dataclasses import dataclass, replace

import pytest
import torch
from msgspec.structs import replace as replace_part

import leakbound as lb
from leakbound import audit, report
from leakbound._util import text
from leakbound.assess.record import Chance
from leakbound.assess.verdict import by_chance
from leakbound.attacks.mixed_start import MixedStart
from leakbound.audit.attacked_round import attacked_round
from leakbound.audit.context import PlanContext
from leakbound.audit.experiment import play_round
from leakbound.core import Batch, Refused, Server, Task, ThreatModel
from leakbound.defenses import GaussianNoise, NoDefense, PriPrune, chain
from leakbound.defenses.base import Defense
from leakbound.protocol import play
from leakbound.randomness import stream
from leakbound.report.rerun import reruns, toml_of
from leakbound.report.tables import Names

ACTS = 15
"""Logits start at logit(0.2) = -1.39 and rise by at most 0.1 a round: 13.9 rounds to 0, and a
mask counts from the round whose step passes 0."""


def _table(**more):
    return {
        "data": {"source": "digits"},
        "models": [{"name": "mlp"}],
        "attacks": [{"name": "inverting_gradients", "steps": 20}],
        "defenses": [{"name": "none"}, {"name": "pri_prune"}],
        **more,
    }


def _records(table):
    plan = audit.parse(table)
    found = [result.record for result in audit.run(plan)]
    return {record.defense.name: record for record in found}


@pytest.fixture(scope="module")
def default():
    return _records(_table())


def test_a_defense_that_starts_late_is_attacked_where_it_has_an_effect(default):
    late = default["pri_prune"].release
    assert late.round == ACTS
    assert late.effective
    assert late.withheld > 0
    assert default["none"].release.round == 1
    assert default["pri_prune"].scores != default["none"].scores


def test_no_bound_is_stated_for_a_client_that_sent_updates_before():
    noise = [{"name": "gaussian_noise", "noise_std": 0.1}]
    quick = {"defenses": noise, "risk": {"probability": 0}}
    first, later = (_records(_table(**quick, **more)) for more in ({}, {"rounds": 3}))
    assert first["gaussian_noise"].bounds
    found = later["gaussian_noise"]
    assert not found.bounds
    assert "sent others before" in found.bounds_note
    assert found.release.round == 3


def test_the_plan_names_a_round():
    found = _records(_table(rounds=2))
    assert {record.release.round for record in found.values()} == {2}
    assert not found["pri_prune"].release.effective
    assert found["pri_prune"].release.withheld == 0


@pytest.mark.parametrize("rounds", [0, -1, 1.5, True, [1, 1], [], "first", "lats", 1001, [1, 1001]])
def test_odd_rounds_are_refused(rounds):
    with pytest.raises(ValueError, match="rounds"):
        audit.parse(_table(rounds=rounds))


def test_words_name_rounds_of_the_training():
    words = ["last", "first", "middle", 7]
    plan = audit.parse(_table(rounds=words, utility={"rounds": 21}))
    assert plan.rounds == (21, 1, 11, 7)
    assert [unit.round for unit in plan.experiments()][:4] == [21, 1, 11, 7]
    with pytest.raises(ValueError, match="holds 1 twice"):
        audit.parse(_table(rounds=["first", "middle"], utility={"rounds": 1}))


def test_several_rounds_are_of_one_training():
    """Each round's record is that of a plan which names it alone; a state goes through them all."""
    defenses = [{"name": "pri_prune"}, {"name": "top_k"}]
    both = [r.record for r in audit.run(audit.parse(_table(defenses=defenses, rounds=[2, 16])))]
    for number, own in ((2, both[::2]), (16, both[1::2])):
        alone = [r.record for r in audit.run(audit.parse(_table(defenses=defenses, rounds=number)))]
        assert [one.release.round for one in own] == [number, number]
        assert alone == own
    early, late = both[:2]
    assert early.release.withheld == 0
    assert late.release.withheld > 0


def test_rounds_of_one_batch_are_no_independent_tries():
    """Fisher's rule adds up p-values of other batches, and never those of rounds of one."""
    chance = Chance(p_value=0.1, decoys=9, level=0.05)
    plan = audit.parse(_table(defenses=[{"name": "none"}], rounds=[1, 2, 3]))
    found = [replace_part(r.record, chance=chance) for r in audit.run(plan)]
    assert len({one.attack.hash for one in found}) == 3
    assert by_chance(found) == pytest.approx(0.1)
    names = Names(found)
    assert [names.attack(one) for one in found] == [
        f"inverting_gradients, round {number}" for number in (1, 2, 3)
    ]
    assert {names.attack(one, of_round=False) for one in found} == {"inverting_gradients"}


def test_a_plan_with_a_round_is_read_back_the_same():
    import tomllib

    plan = audit.parse(_table(rounds=[2, 3]))
    kept = text.plain(plan)
    assert audit.parse(tomllib.loads(toml_of(kept)), name=plan.name).hash == plan.hash
    found = [result.record for result in audit.run(plan)]
    again = reruns(kept, found)
    for record in found:
        one = again[record.experiment]
        (unit,) = audit.parse(tomllib.loads(one.plan)).experiments()
        assert unit.id == record.experiment


def test_the_attacker_remembers_the_rounds_before_and_not_their_truth():
    (unit,) = audit.parse(_table(defenses=[{"name": "pri_prune"}])).experiments()
    played = play_round(unit, PlanContext(unit.data))
    assert played.number == ACTS
    assert len(played.observation.history) == ACTS - 1
    weights = [seen.task.parameters for seen in played.observation.history]
    assert not torch.equal(weights[0], weights[-1])
    assert all(not seen.history for seen in played.observation.history)


def test_the_attacker_sees_the_weights_that_a_client_sent_which_keeps_some():
    (unit,) = audit.parse(_table(defenses=[{"name": "pri_prune"}])).experiments()
    seen = play_round(unit, PlanContext(unit.data)).observation
    for one in (*seen.history, seen):
        sent, update, mask = one.sent, one.update.rows, one.update.mask
        assert not sent[~mask].any()
        weights = one.task.parameters - one.task.plan.learning_rate * update
        assert torch.equal(sent[mask], weights[mask])
    assert not seen.update.mask.all()
    attack = MixedStart(steps=3)
    known, blind = (attack(one, stream(0)).inputs for one in (seen, replace(seen, history=())))
    assert not torch.equal(known, blind)


def test_other_clients_send_a_change():
    task, batch = _small()
    for defense in (NoDefense(), chain(GaussianNoise(0.1))):
        assert play(task, [batch], defense, _sources()).observation.sent is None


def test_pages_say_which_round_was_attacked(tmp_path):
    audit.audit(audit.parse(_table()), tmp_path)
    text = report.write(tmp_path).read_text()
    said = f"was attacked in round {ACTS} of a training, the first in which it has an effect"
    assert said in " ".join(text.split())
    assert f"`rounds = {ACTS}` in the plan attacks this round of all" in " ".join(text.split())
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert {json.loads(line)["release"]["round"] for line in lines} == {1, ACTS}


def test_simulate_takes_the_same_round_and_names_it():
    _, batch = _small()
    found = lb.simulate(_model(), batch, defense="pri_prune", attack="inverting_gradients,steps=5")
    number = found.round.number
    assert found.assessment.release.round == number >= ACTS
    assert found.assessment.release.withheld > 0
    before = lb.simulate(
        _model(),
        batch,
        defense="pri_prune",
        attack="inverting_gradients,steps=5",
        round=number - 1,
    )
    assert before.assessment.release.withheld == 0
    assert not before.assessment.release.effective


def _model():
    layers = torch.nn.Flatten(), torch.nn.Linear(16, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    model = torch.nn.Sequential(*layers)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data, std=0.3, generator=stream(0, "weights"))
    return model


def _small():
    source = stream(0, "batch")
    batch = Batch(torch.rand(2, 1, 4, 4, generator=source), torch.tensor([0, 2]))
    return Task.of(_model()), batch


def _sources():
    return [stream(0, "defense", i) for i in range(2)]


def test_the_first_round_is_that_of_the_protocol():
    task, batch = _small()
    noisy = chain(GaussianNoise(0.1))
    one = attacked_round(task, [batch], noisy, _sources(), threat=ThreatModel())
    two = play(task, [batch], noisy, _sources())
    assert torch.equal(one.update.rows, two.update.rows)
    assert one.number == 1


def test_the_rounds_by_hand():
    task, batch = _small()
    found = attacked_round(task, [batch], NoDefense(), _sources(), number=3, threat=ThreatModel())
    weights = task.parameters.clone().requires_grad_()
    adam = torch.optim.Adam([weights], lr=0.002)
    for _ in range(2):
        leaves = task.unflatten(weights)
        output = torch.func.functional_call(_model(), leaves, (batch.inputs,))
        adam.zero_grad()
        torch.nn.functional.cross_entropy(output, batch.labels).backward()
        adam.step()
    torch.testing.assert_close(found.observation.task.parameters, weights.detach())


class Doubling(lb.attacks.Attack):
    """A server that sends twice the weights."""

    def plant_each(self, task, clients):
        return [task.with_parameters(2 * task.parameters)] * clients

    def __call__(self, observation, generator):
        raise NotImplementedError


def test_a_malicious_server_plants_its_model_in_the_attacked_round_alone():
    task, batch = _small()
    attack = Doubling()
    threat = ThreatModel(server=Server.MALICIOUS)
    late = chain(PriPrune(start=0.45))
    found = attacked_round(*(task, [batch], late, _sources()), threat=threat, attack=attack)
    assert found.number > 1
    honest = attacked_round(*(task, [batch], late, _sources()), threat=ThreatModel())
    assert found.number == honest.number
    now = honest.observation.task.parameters
    assert torch.equal(found.observation.task.parameters, 2 * now)
    assert found.observation.threat.server is Server.MALICIOUS
    assert {seen.threat.server for seen in found.observation.history} == {Server.HONEST}
    pairs = zip(found.observation.history, honest.observation.history, strict=True)
    for one, two in pairs:
        assert torch.equal(one.task.parameters, two.task.parameters)


@dataclass(frozen=True, repr=False)
class Never(Defense):
    """A defense that never has an effect."""

    def acts(self, state):
        return False


def test_a_defense_without_any_effect_is_not_attacked():
    task, batch = _small()
    with pytest.raises(Refused, match="no effect in the first 100 rounds"):
        attacked_round(task, [batch], chain(Never()), _sources(), threat=ThreatModel())
