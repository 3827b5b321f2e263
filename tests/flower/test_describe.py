"""An app's facts from its own objects: rows of the sheet, right and wrong apps, real runs."""

import math
import tomllib

import numpy as np
import pytest

import leakbound.flower  # noqa: F401  first: flwr's dependencies warn where it is imported by itself

# isort: split

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import (
    LocalDpMod,
    adaptiveclipping_mod,
    arrays_size_mod,
    fixedclipping_mod,
)
from flwr.server import strategy as older
from flwr.serverapp import (
    NeighboringRelation,
    PrivacyConfig,
    RdpAccountant,
    SamplingMethod,
    ServerApp,
)
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    FedMedian,
)

from leakbound.bounds import conversions
from leakbound.defenses import (
    Clip,
    ClipExamples,
    CorrelatedNoise,
    DpSgd,
    GaussianNoise,
    LaplaceNoise,
    Mean,
    TopK,
    chain,
)
from leakbound.flower import DefenseMod, Setup, Watched, describe, run
from leakbound.risk.deployment.file import parse, text_of
from leakbound.risk.deployment.laws import laws_of

ALWAYS = {"nan-disables-clip", "zero-update-raises"}
"""Faults of every clip in Flower 1.41, with any settings."""
SERVER = DifferentialPrivacyServerSideFixedClipping
CLIENT = DifferentialPrivacyClientSideFixedClipping


def accountant(clients):
    return RdpAccountant(
        PrivacyConfig(
            target_delta=1e-5,
            population_size=clients,
            neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
            sampling_method=SamplingMethod.NO_AMPLIFICATION,
        )
    )


def fixed(kind=SERVER, z=1.0, clients=10, *, average=None, norm=0.5, **given):
    return kind(average or FedAvg(), z, norm, clients, **given)


def of(found, audience):
    return next(e for e in laws_of(found) if (e.audience, e.unit) == (audience, "client"))


def equal(clients, **given):
    return {
        "population": clients,
        "sizes": [9] * clients,
        "replies": clients,
        "seeded": False,
        **given,
    }


def net():
    from torch import nn

    return nn.Linear(2, 2)


LOCAL = [LocalDpMod(1.0, 1.0, 1.0, 1e-5)]
ROWS = {
    "1": (fixed(average=FedAvg(fraction_train=0.1)), [],
          equal(100, rounds=1, sizes=[9] * 10, replies=10), 1.0, 4.37718),
    "2": (fixed(), [], equal(10, rounds=1, sizes=[5000, *[500] * 9]), 5.26316, 35.5671),
    "3": (fixed(clients=100), [], equal(20, rounds=1), 5.0, 33.1037),
    "4, one round": (FedAvg(), LOCAL, equal(10, rounds=1), 0.206407, 0.750977),
    "4, 100 rounds": (FedAvg(), LOCAL, equal(10, rounds=100), 2.06407, 10.3939),
    "5": (FedAvg(), [LocalDpMod(1.0, 1e-4, 10.0, 1e-5)], equal(10, rounds=1), 20640.7, None),
    "6": (fixed(z=2.4), [], equal(10, rounds=20), 1.86339, 9.16598),
}  # fmt: skip


@pytest.mark.parametrize(("rule", "mods", "given", "mu", "epsilon"), ROWS.values(), ids=list(ROWS))
def test_rows_of_the_sheet(rule, mods, given, mu, epsilon):
    found, _ = describe(rule, mods, **given)
    assert parse(tomllib.loads(text_of(found))) == found, "the file has the facts"
    made = of(found, "clients")
    rate = made.setting.sampling_rate
    assert math.sqrt(given["rounds"]) / made.setting.noise_multiplier == pytest.approx(mu, rel=1e-5)
    assert rate == (0.1 if given["population"] == 100 else 1.0)
    if epsilon is not None and rate == 1:
        assert made.epsilon(1e-5) == pytest.approx(epsilon, rel=1e-4)
    server = of(found, "server")
    assert server.exact == (not mods), "a server that adds the noise itself has seen all"
    assert server.mu is None or server.mu == pytest.approx(mu, rel=1e-5)


def test_an_accountant_enforces_replies_and_weights():
    found, _ = describe(fixed(accountant=accountant(10)), rounds=4, seeded=False)
    who = found.participation
    assert (who.population, who.replies, found.weights) == (10, 10, "uniform")
    assert of(found, "clients").mu == pytest.approx(2.0)
    assert (found.claim.delta, found.claim.neighbors) == (1e-5, "add-remove")


def test_the_adaptive_row():
    rule = DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 1.0, 100)
    found, _ = describe(rule, rounds=20, **equal(100))
    assert found.noise.multiplier == pytest.approx(1.0), "of both releases, not the raised one"
    assert (found.clip.kind, found.clip.norm, found.clip.adaptive.bit_noise) == ("adaptive", 0.1, 5)
    worst = of(found, "clients").mu
    assert 4.93799 <= worst < 1.1 * 4.93799, "all clipped is the worst case but for the bit's noise"


RIGHT = {
    "no privacy": (FedAvg(), [], {}),
    "server, fixed": (fixed(), [], equal(10, rounds=3)),
    "server, fixed, sampled": (fixed(average=FedAvg(fraction_train=0.1)), [],
                               equal(100, sizes=[4] * 10, replies=10)),
    "server, accountant": (fixed(accountant=accountant(10)), [], {"rounds": 3}),
    "client, fixed": (fixed(CLIENT), [fixedclipping_mod], equal(10)),
    "client, accountant": (fixed(CLIENT, accountant=accountant(10)),
                           [arrays_size_mod, fixedclipping_mod], {}),
    "local": (FedAvg(), LOCAL, {"rounds": 1}),
    "local, clipped again": (fixed(CLIENT, z=0.0), [fixedclipping_mod, *LOCAL], {}),
    "leakbound, whole": (
        FedAvg(), [DefenseMod(chain(Clip(1.0), GaussianNoise(1.0)), Setup(net))], {}),
    "leakbound, two": (FedAvg(), [DefenseMod(GaussianNoise(1.0), Setup(net)),
                                  DefenseMod(Clip(1.0), Setup(net))], {}),
    "leakbound, examples": (FedAvg(), [DefenseMod(DpSgd(1.0, 2.0), Setup(net))], {}),
    "Flower's clip, leakbound's noise": (
        fixed(CLIENT, z=0.0),
        [DefenseMod(GaussianNoise(1.0), Setup(net, 0.1)), fixedclipping_mod], {}),
    "watched": (Watched(fixed()), [], equal(10)),
    "older": (older.DifferentialPrivacyServerSideFixedClipping(older.FedAvg(), 1.0, 0.5, 10), [],
              equal(10)),
    "secure aggregation": (older.FedAvg(), [secaggplus_mod, fixedclipping_mod], {}),
}  # fmt: skip


@pytest.mark.parametrize(("rule", "mods", "given"), RIGHT.values(), ids=list(RIGHT))
def test_right_apps_are_not_accused(rule, mods, given):
    found, mistakes = describe(rule, mods, **given)
    names = {one.name for one in mistakes} - ALWAYS - {"aggregation-alone"}
    assert names == set(), found


WRONG = {
    "no-client-clip": (fixed(CLIENT), [], "clip.kind"),
    "noise-before-clip": (
        FedAvg(),
        [DefenseMod(Clip(1.0), Setup(net)), DefenseMod(GaussianNoise(1.0), Setup(net))],
        "clip.kind",
    ),
    "masked-before-clip": (FedAvg(), [fixedclipping_mod, secaggplus_mod], "secure_aggregation"),
    "no-average": (fixed(average=FedMedian()), [], "weights"),
    "seeded-noise": (
        FedAvg(),
        [DefenseMod(GaussianNoise(1.0), Setup(net), seed=1)],
        "noise.seeded",
    ),
    "unknown-mod": (fixed(CLIENT), [lambda *given: None, fixedclipping_mod], "clip.norm"),
    "uncounted-rounds": (FedAvg(), LOCAL, "claim.epsilon"),
}


@pytest.mark.parametrize(("name", "app"), WRONG.items(), ids=list(WRONG))
def test_wrong_apps_are_found(name, app):
    rule, mods, key = app
    found, mistakes = describe(rule, mods, rounds=50, population=10, seeded=False)
    assert name in {one.name for one in mistakes if one.key == key}
    if name in ("no-client-clip", "noise-before-clip", "no-average", "seeded-noise"):
        assert of(found, "clients").setting is None, "no law"


def test_a_server_cannot_clip_masked_updates():
    rule = older.DifferentialPrivacyServerSideFixedClipping(older.FedAvg(), 1.0, 0.5, 10)
    found, mistakes = describe(rule, [secaggplus_mod])
    assert "clip-of-average" in {one.name for one in mistakes}
    assert found.secure_aggregation.on


def test_units_of_two_kinds_of_mods():
    noise = GaussianNoise(0.2)
    numbered = [DefenseMod(noise, Setup(net, 0.25)), fixedclipping_mod]
    assert describe(fixed(CLIENT), numbered)[0].noise.std == pytest.approx(0.05)
    keyed = [DefenseMod(noise, Setup(net, "lr")), fixedclipping_mod]
    assert describe(fixed(CLIENT), keyed)[0].noise.std is None, "the rate is not known"
    alone = [DefenseMod(chain(Clip(2.0), noise), Setup(net, "lr"))]
    found = describe(FedAvg(), alone)[0]
    assert (found.clip.norm, found.noise.std) == (2.0, 0.2)


def test_noise_of_another_law_is_not_stated():
    found, _ = describe(FedAvg(), [DefenseMod(chain(Clip(1.0), LaplaceNoise(1.0)), Setup(net))])
    assert (found.noise.at, found.noise.std, found.noise.multiplier) == ("client", None, None)
    kept, mistakes = describe(FedAvg(), [DefenseMod(TopK(0.5), Setup(net))])
    assert kept.noise.at == "none"
    assert mistakes == ()


def test_the_examples_unit():
    found, _ = describe(FedAvg(), [DefenseMod(DpSgd(2.0, 1.5), Setup(net, batch_size=8))])
    assert (found.clip.kind, found.clip.norm) == ("example", 2.0)
    assert (found.noise.at, found.noise.multiplier) == ("optimizer", 1.5)
    assert (found.local.steps, found.local.batch, found.local.normalizer) == (1, 8, "realized")


def test_what_an_own_strategy_does_is_not_stated():
    class Own(FedAvg):
        def aggregate_train(self, number, replies):
            return None, None

    for rule in (object(), Own()):
        found, mistakes = describe(rule)
        assert (found.clip.kind, found.noise.at, found.weights) == (None, None, None)
        assert mistakes == ()
    found, _ = describe(Own(), [DefenseMod(Clip(1.0), Setup(net))])
    assert (found.clip.norm, found.noise.at) == (1.0, None)


def test_counts_are_checked():
    with pytest.raises(ValueError, match="population is 0"):
        describe(FedAvg(), population=0)


SIZE, CLIENTS = 20_000, 4


def real_run(rule, mods, rounds=2):
    """The server's arrays after each round of a run in which every client adds a unit vector."""
    client, server, kept = ClientApp(), ServerApp(), []
    step = np.full(SIZE, 1 / math.sqrt(SIZE))

    @client.train(mods=list(mods))
    def train(message, context):
        own = message.content["arrays"]["w"].numpy() + step
        content = {"arrays": ArrayRecord({"w": Array(own)}), "m": MetricRecord({"num-examples": 3})}
        return Message(RecordDict(content), reply_to=message)

    @client.evaluate()
    def evaluate(message, context):
        return Message(RecordDict({"m": MetricRecord({"num-examples": 3})}), reply_to=message)

    @server.main()
    def main(grid, context):
        rule.start(
            grid=grid,
            initial_arrays=ArrayRecord({"w": Array(np.zeros(SIZE))}),
            num_rounds=rounds,
            train_config=ConfigRecord({}),
            evaluate_fn=lambda number, arrays: kept.append(arrays["w"].numpy().copy()),
        )

    np.random.seed(7)  # noqa: NPY002  Flower draws from it
    run(server, client, CLIENTS)
    return np.diff(kept, axis=0), step


REAL = {
    "server, fixed": (fixed(clients=CLIENTS), []),
    "client, fixed": (fixed(CLIENT, clients=CLIENTS), [fixedclipping_mod]),
    "server, adaptive": (
        DifferentialPrivacyServerSideAdaptiveClipping(
            FedAvg(), 0.1, CLIENTS, 0.5, clip_norm_lr=1.0
        ),
        [],
    ),
    "client, adaptive": (
        DifferentialPrivacyClientSideAdaptiveClipping(
            FedAvg(), 0.1, CLIENTS, 0.5, clip_norm_lr=1.0
        ),
        [adaptiveclipping_mod],
    ),
    "local": (FedAvg(), [LocalDpMod(0.5, 0.5, 5.0, 1e-5)]),
}


@pytest.mark.parametrize(("rule", "mods"), REAL.values(), ids=list(REAL))
def test_the_facts_are_those_of_a_real_run(rule, mods):
    found, _ = describe(rule, mods, rounds=2, **equal(CLIENTS))
    moves, step = real_run(rule, mods)
    own = found.noise.std or found.noise.classical_std
    if found.noise.at == "server":  # on the mean
        own = found.noise.multiplier * found.clip.norm / found.participation.cohort
    else:
        own /= math.sqrt(CLIENTS)
    level = float((moves[0] - found.clip.norm * step).std())
    error = 4 / math.sqrt(2 * SIZE)
    adaptive = found.clip.adaptive
    if adaptive is None:
        assert level == pytest.approx(own, rel=error)
    else:
        ratio = math.exp(adaptive.rate * (1 - adaptive.quantile))
        assert own / ratio / 1.7 < level < 0.95 * own, "that of the next norm, which is smaller"
    made = of(found, "clients")
    assert made.mu is not None
    seen = found.clip.norm / CLIENTS / level * math.sqrt(2)  # what a client moves the mean by
    if found.noise.at == "client":
        assert made.mu == pytest.approx(found.clip.norm / own / math.sqrt(CLIENTS) * math.sqrt(2))
    else:
        assert made.mu >= seen * (1 - error), "no run shows more than the law says"
        assert adaptive is not None or made.mu == pytest.approx(seen, rel=error)
    assert made.epsilon(1e-5) == pytest.approx(
        conversions.epsilon(1 / made.mu, delta=1e-5), rel=1e-3
    )
    assert of(found, "server").exact == (found.noise.at == "server")


def test_noise_that_a_client_correlates_is_not_read_as_independent():
    defense = chain(ClipExamples(1.0), Mean(), CorrelatedNoise(2.0, mechanism="tree", rounds=4))
    found, _ = describe(FedAvg(), [DefenseMod(defense, Setup(net))], rounds=4, seeded=False)
    for law in laws_of(found):
        assert law.bound(-9.0)[0] == 1
