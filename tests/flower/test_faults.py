"""Faults of the installed Flower: each shown on its own classes, found by `describe`, and not else.

Numbers are those of docs/upstream; a random level has four standard errors.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import leakbound.flower  # noqa: F401  first: flwr's dependencies warn where it is imported by itself

# isort: split

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)
from flwr.supercore import differential_privacy as shared

from leakbound.bounds import conversions
from leakbound.flower import describe, faults

LONG = 40_000
ERROR = 4 / math.sqrt(2 * LONG)
"""Four standard errors of a standard deviation, relative."""
SERVER = (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyClientSideAdaptiveClipping,
)


def arrays(*values):
    return ArrayRecord({str(at): Array(np.array(value)) for at, value in enumerate(values)})


def reply(*values, examples=1, **metrics):
    own = {
        "arrays": arrays(*values),
        "metrics": MetricRecord({"num-examples": examples, **metrics}),
    }
    return SimpleNamespace(content=RecordDict(own), has_error=lambda: False)


def averaged(rule, start, replies):
    rule.current_arrays = arrays(*start)
    mean, _ = rule.aggregate_train(1, replies)
    return mean.to_numpy_ndarrays()


def sent(mod, start, *update, **config):
    """What leaves a client's mod for an update."""
    content = {"arrays": arrays(*start), "config": ConfigRecord({"clipping_norm": 1.0, **config})}
    asked = SimpleNamespace(content=RecordDict(content))
    out = mod(asked, None, lambda message, context: reply(*update))
    return out.content["arrays"].to_numpy_ndarrays()


def clipped(rule, mods, start, *update):
    """What leaves an app's clip, of norm 1 and (but for LocalDpMod) without noise."""
    if mods:
        return sent(mods[0], start, *update)
    return averaged(type(rule)(FedAvg(), 0.0, 1, 1), start, [reply(*update)])


def names(*given, **facts):
    return {one.name for one in describe(*given, **facts)[1]}


@pytest.fixture
def mended(monkeypatch):
    """Flower with a clip that takes NaN as infinite, zero as short, and whole numbers as floats."""
    from flwr.clientapp.mod import centraldp_mods, localdp_mod
    from flwr.serverapp.strategy import dp_adaptive_clipping, dp_fixed_clipping

    def factor(values, norm):
        length = shared.get_norm(values)
        if not np.isfinite(length):
            return 0.0
        return min(1.0, norm / length) if length else 1.0

    def clip(param1, param2, clipping_norm):
        update = [np.subtract(x, y) for x, y in zip(param1, param2, strict=True)]
        scale = factor(update, clipping_norm)
        for at, part in enumerate(update):
            param1[at] = param2[at] + scale * np.nan_to_num(part)
        return scale < 1

    def in_place(values, norm):
        scale = factor(values, norm)
        for at, value in enumerate(values):
            values[at] = scale * np.nan_to_num(value.astype(float))
        return scale < 1

    for module in (centraldp_mods, localdp_mod, dp_fixed_clipping):
        monkeypatch.setattr(module, "compute_clip_model_update", clip)
    monkeypatch.setattr(centraldp_mods, "compute_adaptive_clip_model_update", clip)
    monkeypatch.setattr(dp_adaptive_clipping, "adaptive_clip_inputs_inplace", in_place)


def apps():
    """Every clip of Flower's: its name, and the app in which it runs."""
    kinds = {
        "LocalDpMod": (FedAvg(), [LocalDpMod(1.0, 1.0, 1.0, 1e-5)]),
        "fixedclipping_mod": (
            DifferentialPrivacyClientSideFixedClipping(FedAvg(), 1.0, 1.0, 20),
            [fixedclipping_mod],
        ),
        "adaptiveclipping_mod": (
            DifferentialPrivacyClientSideAdaptiveClipping(FedAvg(), 1.0, 20),
            [adaptiveclipping_mod],
        ),
        "server, fixed": (DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 1.0, 20), []),
        "server, adaptive": (DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 1.0, 20), []),
    }
    return pytest.mark.parametrize(("rule", "mods"), kinds.values(), ids=kinds)


@pytest.mark.parametrize("kind", SERVER)
@pytest.mark.parametrize(("start", "end"), [(0.1, 0.00498), (2.0, 40.17)])
def test_the_adaptive_norm_runs_away_from_its_quantile(kind, start, end):
    rule = kind(FedAvg(), 0.0, 2, initial_clipping_norm=start)
    for _ in range(30):
        clipped = int(start < 1)
        replies = [reply(np.array([0.6, 0.8]), norm_bit=clipped) for _ in range(2)]
        averaged(rule, [np.zeros(2)], replies)
    assert rule.clipping_norm == pytest.approx(end, rel=1e-3), "norms are 1"


@pytest.mark.parametrize("kind", SERVER)
def test_the_noise_has_the_level_of_the_next_norm(kind):
    rule = kind(FedAvg(), 1.0, 100, initial_clipping_norm=1.0)
    update = np.full(LONG, 1 / math.sqrt(LONG))
    whole = 2 * update if kind is SERVER[0] else update  # the mods clip in the other
    mean = averaged(rule, [np.zeros(LONG)], [reply(whole, norm_bit=1) for _ in range(100)])
    level = float((mean[0] - update).std()) * 100
    assert rule.noise_multiplier == pytest.approx(1.00504, abs=1e-5)
    assert level == pytest.approx(rule.clipping_norm * rule.noise_multiplier, rel=ERROR)
    assert level < 0.95 * rule.noise_multiplier, "1.105 times too small, but for the bit's noise"


def test_adaptive_faults_are_found(monkeypatch):
    rule = DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 1.0, 100)
    assert {"adaptive-wrong-sign", "noise-of-next-norm"} <= names(rule)
    assert describe(rule)[0].clip.adaptive.faults is True
    base = DifferentialPrivacyServerSideAdaptiveClipping.__mro__[1]

    def right(self, share):
        step = self.clip_norm_lr * (share - self.target_clipped_quantile)
        self.next_norm = self.clipping_norm * math.exp(step)

    whole = base._add_noise_to_aggregated_arrays

    def noisy(self, mean):
        out = whole(self, mean)
        self.clipping_norm = self.next_norm
        return out

    monkeypatch.setattr(base, "_geometric_update", right)
    assert names(rule) & {"adaptive-wrong-sign", "noise-of-next-norm"} == set(), "neither moves"
    monkeypatch.setattr(base, "_add_noise_to_aggregated_arrays", noisy)
    found, mistakes = describe(rule)
    assert not {"adaptive-wrong-sign", "noise-of-next-norm", "adaptive-clip"} & {
        one.name for one in mistakes
    }
    assert found.clip.adaptive.faults is False


@apps()
def test_one_nan_switches_clipping_off(rule, mods):
    start, update = [np.zeros(3)], np.array([math.nan, 3.0, 4.0])
    if mods and isinstance(mods[0], LocalDpMod):
        mods = [LocalDpMod(1.0, 0.0, 1.0, 1e-5)]  # no noise
    out = clipped(rule, mods, start, update)[0]
    assert out[1:].tolist() == [3.0, 4.0]
    assert "nan-disables-clip" in names(rule, mods)


@apps()
def test_an_update_of_zero_raises(rule, mods):
    with pytest.raises(ZeroDivisionError):
        clipped(rule, mods, [np.ones(3)], np.ones(3))
    assert "zero-update-raises" in names(rule, mods)


@apps()
def test_whole_numbers_make_the_clip_raise(rule, mods):
    start, update = [np.zeros(2), np.zeros(1, int)], [np.array([3.0, 4.0]), np.array([7])]
    with pytest.raises(TypeError, match="multiply"):  # of NumPy's output types
        clipped(rule, mods, start, *update)
    assert "integer-buffers" not in names(rule, mods), "this model's arrays are not known"
    assert "integer-buffers" not in names(rule, mods, arrays=arrays(np.zeros(2)))
    assert "integer-buffers" in names(rule, mods, arrays=arrays(*start))


@apps()
def test_scalars_pass_every_clip(rule, mods):
    start, update = [np.zeros(2), np.array(0.0)], [np.array([3.0, 4.0]), np.array(7.0)]
    out = clipped(rule, mods, start, *update)
    assert float(out[1]) == 7, "neither clipped to 1, nor with LocalDpMod's noise of 4.8"
    assert "scalars-pass" not in names(rule, mods, arrays=arrays(np.zeros(2)))
    assert "scalars-pass" in names(rule, mods, arrays=arrays(*start))
    norm = torch.nn.BatchNorm1d(2).state_dict()
    assert "scalars-pass" in names(rule, mods, arrays=norm), "its counter of batches"


def test_noise_on_whole_numbers_is_cut():
    out = sent(LocalDpMod(1e6, 0.1, 1.0, 1e-5), [np.zeros(1000, int)], np.full(1000, 20))[0]
    assert out.dtype.kind == "i"
    assert (out == 20).mean() > 0.9, "noise of 0.48 is 0 in 96 % of the entries"


@apps()
def test_a_mended_flower_is_not_accused(rule, mods, mended):
    found = names(rule, mods, arrays=arrays(np.zeros(2), np.array(0), np.zeros(1, int)))
    faulty = {"nan-disables-clip", "zero-update-raises", "integer-buffers", "scalars-pass"}
    assert not found & faulty


def test_weights_by_examples():
    sizes = (5000, *[500] * 9)
    rule = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.0, 1.0, 10)
    part = [np.array([1.0, 0.0]), *[np.array([0.0, 1e-9])] * 9]
    replies = [reply(one, examples=size) for one, size in zip(part, sizes, strict=True)]
    shift = float(averaged(rule, [np.zeros(2)], replies)[0][0])
    assert shift * 10 == pytest.approx(5.26316, abs=1e-5), "mu at z = 1: the noise is zC / 10"
    whole = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 1.0, 10)
    assert "example-weights" in names(whole)
    assert "unequal-weights" in names(whole, sizes=sizes, population=10)
    equal = names(whole, sizes=[7] * 10, population=10, replies=10)
    assert not equal & {"example-weights", "unequal-weights", "count-mismatch"}


def test_fewer_replies_only_warn():
    rule = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.0, 1.0, 100)
    replies = [reply(np.array([1.0])), *[reply(np.array([1e-9])) for _ in range(19)]]
    shift = float(averaged(rule, [np.zeros(1)], replies)[0][0])
    assert shift * 100 == pytest.approx(5), "mu at z = 1: the noise is zC / 100"
    assert faults.only_warns("DifferentialPrivacyServerSideFixedClipping")
    whole = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 1.0, 100)
    assert "count-mismatch" in names(whole)
    found, mistakes = describe(whole, population=20, sizes=[1] * 20, replies=20)
    assert found.noise.multiplier == pytest.approx(0.2)
    assert "scaled-noise" in {one.name for one in mistakes}


@pytest.mark.parametrize(
    ("epsilon", "true"), [(1, None), (5, 1.35e-6), (10, 2.27e-5), (20, 1.53e-3), (50, 0.586)]
)
def test_the_classical_formula(epsilon, true):
    mod = LocalDpMod(1e6, 1.0, epsilon, 1e-5)
    level = float((sent(mod, [np.zeros(LONG)], np.ones(LONG))[0] - 1).std())
    stated = math.sqrt(2 * math.log(1.25e5)) / epsilon
    assert level == pytest.approx(stated, rel=ERROR)
    found = float(conversions.delta(stated, epsilon=epsilon))
    if true is not None:
        assert found == pytest.approx(true, rel=5e-3)
    said = "classical-formula" in names(FedAvg(), [LocalDpMod(1.0, 1.0, epsilon, 1e-5)])
    assert said == (found > 1e-5)


def test_the_sensitivity_is_not_tied_to_the_clip():
    mod = LocalDpMod(1.0, 1e-4, 10.0, 1e-5)
    update = np.full(LONG, 1 / math.sqrt(LONG))
    level = float((sent(mod, [np.zeros(LONG)], update)[0] - update).std())
    assert level == pytest.approx(4.8448e-5, rel=ERROR)
    assert "sensitivity-below-clip" in names(FedAvg(), [mod])
    assert "sensitivity-below-clip" not in names(FedAvg(), [LocalDpMod(1.0, 1.0, 1.0, 1e-5)])


def test_a_probe_leaves_the_random_state_and_the_log_alone(capfd):
    np.random.seed(3)  # noqa: NPY002  Flower draws from it
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    names(DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 1.0, 100))
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002
    assert "aggregate" not in "".join(capfd.readouterr())
