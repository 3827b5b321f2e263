"""Which mods may stand around which: before a run, and within one."""

import pytest
import torch
from flwr.app import Array, ArrayRecord
from flwr.client.mod import secaggplus_mod
from flwr.clientapp.mod import (
    LocalDpMod,
    adaptiveclipping_mod,
    fixedclipping_mod,
    message_size_mod,
)

from leakbound.defenses import (
    Clip,
    DpSgd,
    GaussianNoise,
    HiddenDropout,
    LocalAggregation,
    MagnitudePruning,
    NoisyCopy,
    OptimalNoise,
    PriPrune,
    Sign,
    Withhold,
)
from leakbound.flower import DefenseMod, Setup, check_mods, protected

LOCAL = LocalDpMod(1.0, 1.0, 0.5, 1e-5)


def mods(flower, *parts):
    setup = Setup(flower.Net)
    return [p if callable(p) else DefenseMod(p, setup, seed=1) for p in parts]


GOOD = {
    "alone": (GaussianNoise(0.1),),
    "clip_inside": (GaussianNoise(0.1), fixedclipping_mod),
    "no_law": (fixedclipping_mod, MagnitudePruning(0.5)),
    "size": (message_size_mod, GaussianNoise(0.1), message_size_mod),
    "secagg_outside": (secaggplus_mod, GaussianNoise(0.1)),
    "post_processing": (Sign(), DpSgd(1.0, 1.0)),
    "late_weights": (Withhold(), DpSgd(1.0, 1.0)),
    "noise_outside": (GaussianNoise(0.1), Clip(1.0)),
    "clips_alone": (fixedclipping_mod, LOCAL),
}
BAD = {
    "fixed_outside": ((fixedclipping_mod, GaussianNoise(0.1)), "fixedclipping_mod changes"),
    "adaptive_outside": ((adaptiveclipping_mod, DpSgd()), "adaptiveclipping_mod changes"),
    "local_outside": ((LOCAL, GaussianNoise(0.1)), "LocalDpMod changes"),
    "anew_outside": ((DpSgd(), Clip(1.0)), "would undo Clip"),
    "copy_outside": ((NoisyCopy(0.1), GaussianNoise(0.1)), "would undo GaussianNoise"),
    "dropped_outside": ((HiddenDropout(), Sign()), "would undo Sign"),
    "steps_outside": ((LocalAggregation(), Sign()), "would undo Sign"),
    "anew_around_clip": ((DpSgd(), fixedclipping_mod), "would undo fixedclipping_mod"),
    "two_starts": ((Withhold(), PriPrune()), "both decide which weights"),
    "start_and_floor": ((Withhold(), OptimalNoise(error_floor=0.1)), "from its own weights"),
    "masked": ((GaussianNoise(0.1), secaggplus_mod), "would change masked vectors"),
}


@pytest.mark.parametrize("name", list(GOOD))
def test_orders_that_hold(name, flower):
    given = mods(flower, *GOOD[name])
    assert protected(given) == given


@pytest.mark.parametrize("name", list(BAD))
def test_orders_that_break_something(name, flower):
    parts, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        check_mods(mods(flower, *parts))


RUNNING = ["anew_outside", "copy_outside", "dropped_outside", "two_starts"]


@pytest.mark.parametrize("name", RUNNING)
def test_two_defenses_in_a_bad_order_answer_with_an_error(name, flower, batches):
    parts, words = BAD[name]
    reply = flower.ask(flower.client_app(mods(flower, *parts), batches=batches))
    assert words in reply.error.reason


def test_two_defenses_in_a_good_order_run(flower, batches):
    reply = flower.ask(flower.client_app(mods(flower, Sign(), DpSgd()), batches=batches))
    assert not reply.has_error(), reply.error.reason
    change = flower.weights(reply.content["arrays"]) - flower.weights(
        ArrayRecord(flower.Net().state_dict())
    )
    assert torch.allclose(change.abs(), torch.tensor(flower.RATE))


def clipping(message, context, call_next):
    """A mod of someone's own, which clips what a defense inside has made."""
    reply = call_next(message, context)
    record = reply.content["arrays"]
    for key, array in record.items():
        record[key] = Array(array.numpy().clip(-0.2, 0.2))
    return reply


def test_a_change_between_two_defenses_is_seen(flower, batches):
    given = mods(flower, Sign(), clipping, GaussianNoise(0.1))
    reason = flower.ask(flower.client_app(given, batches=batches)).error.reason
    assert "the weights from GaussianNoise(noise_std=0.1) were changed on their way" in reason
    given = mods(flower, GaussianNoise(0.1), clipping)
    assert not flower.ask(flower.client_app(given, batches=batches)).has_error()


def test_flowers_own_mod_inside_is_kept(flower, batches):
    tight = LocalDpMod(clipping_norm=0.01, sensitivity=0.0, epsilon=0.5, delta=1e-5)
    given = mods(flower, MagnitudePruning(0.5), tight)
    reply = flower.ask(flower.client_app(protected(given), batches=batches))
    start = flower.weights(ArrayRecord(flower.Net().state_dict()))
    change = flower.weights(reply.content["arrays"]) - start
    assert 0.005 < float(change.norm()) < 0.0101
    assert float((change == 0).float().mean()) > 0.4
