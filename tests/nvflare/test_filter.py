"""The filter on NVFlare's own objects: what leaves is defended, and nothing else leaves."""

import json
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from torch import nn

from leakbound.defenses import Clip, GaussianNoise, SecureAggregation, chain
from leakbound.nvflare import LeakboundFilter, ServerWatch, tap
from leakbound.nvflare.filter import MISSED, WHY
from leakbound.randomness import stream
from leakbound.risk.deployment.nvflare import read
from nvflare import FedJob, FilterType

TASK_RESULT = FilterType.TASK_RESULT
NOISY = ["clip,clip_norm=0.5", "gaussian_noise,noise_std=0.01"]
SECRET = 0.123456


class Net(nn.Module):
    """A layer with a batch norm, so that buffers exist."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(400, 3), nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 2)
        self.eval()
        with torch.no_grad():
            for i, weights in enumerate(self.parameters()):
                weights.copy_(torch.randn(weights.shape, generator=stream(i, "net")))

    def forward(self, x):
        return self.last(self.norm(self.first(x.flatten(1))))


MODEL = "leakbound_test_net:Net"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    module = ModuleType("leakbound_test_net")
    module.Net = Net
    monkeypatch.setitem(sys.modules, module.__name__, module)


def state():
    return {name: value.numpy().copy() for name, value in Net().state_dict().items()}


def task(round=0, **data):
    shareable = DXO(DataKind.WEIGHTS, {**state(), **data}).to_shareable()
    shareable.set_header("current_round", round)
    return shareable


def context(number=1):
    made = FLContext()
    made.set_prop(FLContextKey.TASK_ID, str(number), private=True, sticky=False)
    return made


def received(made, sent=None, number=1):
    """The filter and its context after the event before training."""
    made.set_prop(FilterContextKey.CHAIN_TYPE, FilterChainType.TASK_RESULT_CHAIN)
    ctx = context(number)
    ctx.set_prop(FLContextKey.TASK_DATA, sent or task(), private=True, sticky=False)
    made.handle_event(EventType.BEFORE_TASK_EXECUTION, ctx)
    ctx.set_prop(FLContextKey.TASK_DATA, None, private=True, sticky=False)  # as ClientRunner does
    return ctx


def trained(kind=DataKind.WEIGHTS, by=SECRET, kinds=np.float32):
    data = {}
    for name, value in state().items():
        if value.dtype.kind == "f":
            moved = np.full(value.shape, by, kinds)
            data[name] = moved if kind == DataKind.WEIGHT_DIFF else (value + moved).astype(kinds)
        else:
            data[name] = value * 0 + 7
    return DXO(kind, data, {MetaKey.NUM_STEPS_CURRENT_ROUND: 1}).to_shareable()


def answered(made, result, sent=None):
    return made.process(result, received(made, sent))


def change(reply):
    """The change of the trained weights that a reply gives the server, as one vector."""
    dxo = from_shareable(reply)
    before = state()
    is_change = dxo.data_kind == DataKind.WEIGHT_DIFF
    names = [name for name, _ in Net().named_parameters()]
    parts = [np.asarray(dxo.data[n]) - (0 if is_change else before[n]) for n in names]
    return np.concatenate([part.ravel() for part in parts])


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_what_leaves_is_clipped_and_has_the_noise_of_its_law(kind):
    made = LeakboundFilter(NOISY, MODEL, seed=3)
    clipped = change(answered(LeakboundFilter("clip,clip_norm=0.5", MODEL), trained(kind)))
    assert clipped == pytest.approx(0.5 / np.sqrt(len(clipped)), rel=1e-3), (
        "each entry moved by the same"
    )
    noise = change(answered(made, trained(kind))) - clipped
    assert noise.std() == pytest.approx(0.01, rel=4 / np.sqrt(2 * len(noise)))
    assert abs(noise.mean()) < 4 * 0.01 / np.sqrt(len(noise))


def test_the_learning_rate_is_the_unit_of_settings():
    made = LeakboundFilter("clip,clip_norm=0.5", MODEL, learning_rate=0.1)
    assert np.linalg.norm(change(answered(made, trained()))) == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_buffers_are_the_servers(kind):
    data = from_shareable(answered(LeakboundFilter(NOISY, MODEL), trained(kind))).data
    own = state()["norm.running_mean"]
    assert np.array_equal(data["norm.running_mean"], own if kind == DataKind.WEIGHTS else own * 0)
    assert data["norm.num_batches_tracked"] == 0


def test_torch_tensors_keep_kind_and_type():
    result = trained()
    data = from_shareable(result).data
    changed = {name: torch.from_numpy(np.asarray(value)) for name, value in data.items()}
    reply = answered(LeakboundFilter(NOISY, MODEL), DXO(DataKind.WEIGHTS, changed).to_shareable())
    found = from_shareable(reply).data
    assert {name: value.dtype for name, value in found.items()} == {
        name: value.dtype for name, value in changed.items()
    }


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_an_executor_that_trains_in_place_changes_nothing(kind):
    sent = DXO(DataKind.WEIGHTS, {n: kind(v) for n, v in state().items()}).to_shareable()
    made = LeakboundFilter("clip,clip_norm=0.5", MODEL)
    ctx = received(made, sent)
    for name, value in from_shareable(sent).data.items():
        if "num_batches" not in name:
            value += SECRET
    reply = made.process(sent, ctx)
    assert np.linalg.norm(change(reply)) == pytest.approx(0.5, rel=1e-3)
    assert not np.any(np.asarray(from_shareable(reply).data["norm.running_mean"]))


def test_noise_is_fresh_without_a_seed():
    one, two = (change(answered(LeakboundFilter(NOISY, MODEL), trained())) for _ in range(2))
    assert not np.array_equal(one, two)
    same = [change(answered(LeakboundFilter(NOISY, MODEL, seed=1), trained())) for _ in range(2)]
    assert np.array_equal(*same)


def test_state_lives_from_round_to_round():
    """A client that withholds weights goes on with its own, in the next round."""
    made = LeakboundFilter("withhold,rate=0.9", MODEL)
    made.process(trained(), received(made))
    sent = task(1)
    received(made, sent, 2)
    given = from_shareable(sent).data
    names = [name for name, _ in Net().named_parameters()]
    own = sum(int((np.abs(given[n] - state()[n]) > SECRET / 2).sum()) for n in names)
    total = sum(given[n].size for n in names)
    assert 0.8 * total < own < total


def emptied(reply, kind=ReturnCode.TASK_RESULT_FILTER_ERROR):
    """The text of an empty result; fails if anything of the client is in it."""
    assert reply.get_return_code() == kind
    assert set(reply) == {"__headers__"}
    words = str(reply.get_header(WHY))
    assert str(SECRET)[:6] not in json.dumps(str(reply))
    return words


def _not_finite():
    result = trained()
    from_shareable(result).data["last.bias"][0] = np.nan
    return result


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda: Shareable({"weights": [SECRET]}), "no exchange object"),
        (
            lambda: DXO(DataKind.COLLECTION, {"a": DXO("WEIGHTS", {"a": SECRET})}).to_shareable(),
            "COLLECTION",
        ),
        (lambda: DXO(DataKind.FL_MODEL, {"first.weight": SECRET}).to_shareable(), "FL_MODEL"),
        (lambda: DXO(DataKind.WEIGHTS, {"other": np.full(3, SECRET)}).to_shareable(), "'other'"),
        (lambda: DXO(DataKind.WEIGHTS, {"last.bias": np.full(5, SECRET)}).to_shareable(), "shape"),
        (
            lambda: DXO(DataKind.WEIGHTS, {"last.bias": np.full(2, SECRET)}).to_shareable(),
            "does not fit",
        ),
        (lambda: DXO(DataKind.WEIGHTS, {"last.bias": "text"}).to_shareable(), "no array"),
        (
            lambda: DXO(
                DataKind.WEIGHTS, state(), {MetaKey.PROCESSED_ALGORITHM: "CKKS"}
            ).to_shareable(),
            "CKKS",
        ),
        (_not_finite, "could not be defended"),
    ],
)
def test_what_cannot_be_defended_does_not_leave(result, words):
    assert words in emptied(answered(LeakboundFilter(NOISY, MODEL), result()))


def test_an_error_code_leaves_alone():
    result = trained()
    result.set_return_code(ReturnCode.EXECUTION_EXCEPTION)
    emptied(answered(LeakboundFilter(NOISY, MODEL), result), ReturnCode.EXECUTION_EXCEPTION)


def test_metrics_pass():
    result = DXO(DataKind.METRICS, {"accuracy": 0.5}).to_shareable()
    assert answered(LeakboundFilter(NOISY, MODEL), result) is result


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (lambda: Shareable(), "no exchange object"),
        (lambda: DXO(DataKind.WEIGHT_DIFF, state()).to_shareable(), "send the global WEIGHTS"),
        (lambda: DXO(DataKind.WEIGHTS, {"last.bias": np.ones(2)}).to_shareable(), "missing"),
        (lambda: task(**{"last.bias": np.array([np.inf, 0.0], np.float32)}), "NaN or infinite"),
    ],
)
def test_without_the_servers_weights_nothing_leaves(sent, words):
    assert words in emptied(answered(LeakboundFilter(NOISY, MODEL), trained(), sent()))


def test_weights_of_another_task_do_not_count():
    made = LeakboundFilter(NOISY, MODEL)
    ctx = received(made)
    ctx.set_prop(FLContextKey.TASK_ID, "2", private=True, sticky=False)
    assert "unknown" in emptied(made.process(trained(), ctx))
    assert "privacy.json" in emptied(made.process(trained(), context()))


def test_a_result_that_passed_no_filter_is_emptied():
    made = LeakboundFilter(NOISY, MODEL)
    ctx, reply = received(made), trained()
    ctx.set_prop(FLContextKey.TASK_RESULT, reply, private=True, sticky=False)
    made.handle_event(EventType.AFTER_TASK_RESULT_FILTER, ctx)
    assert emptied(reply) == MISSED
    ctx, reply = received(made), made.process(trained(), ctx)
    ctx.set_prop("leakbound.answered", "1", private=True, sticky=False)
    ctx.set_prop(FLContextKey.TASK_RESULT, reply, private=True, sticky=False)
    made.handle_event(EventType.AFTER_TASK_RESULT_FILTER, ctx)
    assert reply.get_return_code() == ReturnCode.OK


def test_in_a_sites_policy_a_second_filter_hands_the_weights_on():
    first, second = LeakboundFilter(NOISY, MODEL), LeakboundFilter(NOISY, MODEL)
    first.set_prop(FilterContextKey.CHAIN_TYPE, FilterChainType.TASK_DATA_CHAIN)
    ctx, sent = context(), task()
    assert first.process(sent, ctx) is sent
    assert second.process(trained(), ctx).get_return_code() == ReturnCode.OK
    other = LeakboundFilter("clip,clip_norm=9.0", MODEL)
    first.process(sent, ctx)
    assert "same settings" in emptied(other.process(trained(), ctx))


def test_noise_that_rounding_removes_is_refused():
    made = LeakboundFilter(["clip,clip_norm=0.5", "gaussian_noise,noise_std=1e-9"], MODEL)
    assert "rounding" in emptied(answered(made, trained()))


POLICY = {"on_leak": "refuse", "probability": None}


def with_meter(policy, tmp_path, shown=True, defense="none"):
    made = LeakboundFilter(
        defense, MODEL, learning_rate=1.0, policy=policy, path=str(tmp_path / "log.jsonl")
    )
    ctx = received(made)
    net = Net()
    inputs, labels = torch.rand(1, 400, generator=stream(0, "x")), torch.tensor([1])
    if shown:
        tap(inputs, labels)
    nn.functional.cross_entropy(net(inputs), labels).backward()
    with torch.no_grad():
        for weights in net.parameters():
            weights -= weights.grad
    data = {name: value.numpy() for name, value in net.state_dict().items()}
    return made.process(DXO(DataKind.WEIGHTS, data).to_shareable(), ctx)


def test_the_meter_refuses_an_update_that_reveals_the_example(tmp_path):
    assert "policy" in emptied(with_meter(POLICY, tmp_path))
    line = json.loads((tmp_path / "log.jsonl").read_text())
    assert (line["action"], line["verdict"], line["round"]) == ("refuse", "exposed", 1)


def test_a_quiet_refusal_sends_the_servers_weights(tmp_path):
    reply = with_meter({**POLICY, "on_refuse": "send nothing useful"}, tmp_path)
    assert reply.get_return_code() == ReturnCode.OK
    assert not change(reply).any()


def test_a_defended_update_leaves_by_the_same_policy(tmp_path):
    reply = with_meter(POLICY, tmp_path, defense=["clip,clip_norm=0.01", NOISY[1]])
    assert reply.get_return_code() == ReturnCode.OK


def test_a_meter_without_batches_refuses(tmp_path):
    assert "meter" in emptied(with_meter(POLICY, tmp_path, shown=False))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"defense": "clipp,clip_norm=1.0"}, "clip"),
        ({"model": "Net"}, "module:function"),
        ({"defense": SecureAggregation(2)}, "updates of all clients"),
        ({"defense": "clip_examples,clip_norm=1.0"}, "one row per example"),
        ({"policy": {}}, "learning_rate is None"),
        ({"policy": {"on_leak": "stop"}, "learning_rate": 1.0}, "on_leak"),
    ],
)
def test_wrong_settings(given, words):
    with pytest.raises(ValueError, match=words):
        LeakboundFilter(**{"defense": NOISY, "model": MODEL, **given})


def test_objects_become_the_plain_values_of_a_job():
    made = LeakboundFilter(chain(Clip(0.5), GaussianNoise(0.01)), Net)
    assert made.defense == ["clip,clip_norm=0.5", "gaussian_noise,noise_std=0.01"]
    assert made.model == f"{Net.__module__}:Net"
    assert repr(LeakboundFilter(made.defense, made.model)) == repr(made)


def test_the_job_interface_writes_it(tmp_path):
    from nvflare.app_common.executors.client_api_executor import ClientAPIExecutor
    from nvflare.job_config.api import FedJob
    from nvflare.job_config.defs import FilterType

    job = FedJob("small")
    executor = ClientAPIExecutor("in_process", task_script_path="train.py")
    job.to(executor, "site-1", tasks=["train"])
    made = LeakboundFilter(NOISY, MODEL, learning_rate=0.5, policy={"on_leak": "refuse"})
    job.to(made, "site-1", tasks=["train"], filter_type=FilterType.TASK_RESULT)
    job.export_job(str(tmp_path))
    (path,) = tmp_path.rglob("config_fed_client.json")
    (chain_,) = json.loads(path.read_text())["task_result_filters"]
    (row,) = chain_["filters"]
    assert row["path"].endswith("LeakboundFilter")
    assert row["args"]["defense"] == NOISY
    assert LeakboundFilter(**row["args"]).policy == {"on_leak": "refuse"}


def test_make_reply_is_what_this_file_takes_it_for():
    assert set(make_reply(ReturnCode.OK)) == {"__headers__"}


def test_a_job_holds_no_copy_of_leakbound(tmp_path):
    """NVFlare's job writer copies 72 of 349 files into each site's `custom` folder otherwise."""
    made = FedJob(name="digits")
    made.to(LeakboundFilter(NOISY, MODEL), "site-1", tasks=["train"], filter_type=TASK_RESULT)
    made.to_server(ServerWatch(str(tmp_path / "captured")), id="watch")
    made.export_job(str(tmp_path))
    files = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if "custom" in path]
    own = tmp_path / "digits" / "app_site-1" / "config" / "config_fed_client.json"
    facts, _ = read(own)
    assert (facts.clip.norm, facts.noise.std) == (0.5, 0.01)
    server = json.loads(
        (own.parents[2] / "app_server" / "config/config_fed_server.json").read_text()
    )
    assert [one["id"] for one in server["components"]] == ["watch"]


def test_a_job_keeps_other_packages_out_too(tmp_path):
    made = FedJob(name="digits")
    made.set_app_packages(["mine"])
    made.to(LeakboundFilter(NOISY, MODEL), "site-1", tasks=["train"], filter_type=TASK_RESULT)
    assert made.job.app_packages == ["leakbound", "mine"]


def test_a_job_needs_the_names_of_tasks():
    with pytest.raises(ValueError, match="no pattern"):
        FedJob(name="digits").to(LeakboundFilter(NOISY, MODEL), "a", filter_type=TASK_RESULT)
