"""The leak meter as the outermost mod of a real Flower app on real digits."""

import dataclasses
import json
import logging
import stat

import pytest
import torch
from flwr.app import ArrayRecord
from flwr.client.mod import secaggplus_mod
from flwr.clientapp.mod import fixedclipping_mod
from torch import nn

from leakbound.attacks import MeanImage
from leakbound.client_side.metered import BROKEN, REFUSED
from leakbound.core import Batch
from leakbound.defenses import ClipExamples, GaussianMechanism, GaussianNoise, Mean, chain
from leakbound.domains import Column, TableDomain
from leakbound.flower import DefenseMod, InProcessGrid, Setup, check_mods, run, tap
from leakbound.flower.compat import delivered
from leakbound.flower.meter import LeakMeter
from leakbound.meter import Policy
from leakbound.randomness import normal, stream

PRIVATE = chain(ClipExamples(1.0), Mean(), GaussianMechanism(5.0))
STRICT = Policy(on_leak="refuse")
ACCEPTED = Policy(psnr=30.0, on_leak="refuse", on_undecided="refuse", probability=0.2)


@pytest.fixture
def one(digits):
    """One image a client and step: what undefended training gives away."""

    def of(who, round):
        at = 10 * int(who)
        return [(digits.inputs[at : at + 1], digits.labels[at : at + 1])]

    return of


def planted(flower):
    """The server's weights with an imprint in the first layer: graded parallel rows."""
    state = flower.Net().state_dict()
    direction = normal((64,), stream(0, "imprint"))
    state["first.weight"] = direction.repeat(12, 1) * (1 + torch.arange(12.0))[:, None]
    state["first.bias"] = -torch.linspace(0.1, 2.0, 12) * (1 + torch.arange(12.0))
    return ArrayRecord(state)


def everything(reply):
    """All that is on the wire of a reply, as plain values."""
    if reply.has_error():
        return {"error": (reply.error.code, reply.error.reason)}
    arrays = {
        key: {name: array.data for name, array in record.items()}
        for key, record in reply.content.array_records.items()
    }
    metrics = {key: dict(record) for key, record in reply.content.metric_records.items()}
    configs = {key: dict(record) for key, record in reply.content.config_records.items()}
    return {"arrays": arrays, "metrics": metrics, "configs": configs}


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "leakbound.meter"]


def test_a_warning_stays_on_the_client(flower, setup, one, caplog):
    """With and without the meter, the reply is the same to the byte."""
    with caplog.at_level(logging.WARNING, "leakbound.meter"):
        plain = flower.ask(flower.client_app(batches=one))
        metered = flower.ask(flower.client_app([LeakMeter(setup)], batches=one))
    assert everything(metered) == everything(plain)
    (words,) = warnings(caplog)
    assert "warn (exposed)" in words
    assert "reconstructs one image to" in words


def test_a_refusal_says_nothing_else(flower, setup, one, digits):
    app = flower.client_app([LeakMeter(setup, STRICT)], batches=one)
    reply = flower.ask(app)
    assert reply.error.reason == REFUSED
    grid = InProcessGrid(app, 2)
    other = flower.ask(app, flower.message(grid, node=3), grid=grid)  # another client's data
    assert everything(other) == everything(reply)


def test_differential_privacy_inside_passes(flower, setup, one, caplog):
    mods = [LeakMeter(setup, ACCEPTED), DefenseMod(PRIVATE, setup)]
    with caplog.at_level(logging.INFO, "leakbound.meter"):
        reply = flower.ask(flower.client_app(mods, batches=one))
    assert not reply.has_error()
    assert "send (protected from strangers)" in warnings(caplog)[0]
    assert "experiment only" not in warnings(caplog)[0]


@pytest.mark.parametrize("outside", [False, True], ids=["alone", "outside"])
def test_noise_of_a_seed_is_no_protection(outside, flower, setup, one, caplog, tmp_path):
    """Who has the seed takes the noise away: the same update gets no bound, and that is said."""
    path = tmp_path / "readings.jsonl"
    mods = [DefenseMod(PRIVATE, setup, seed=1)]
    mods = [DefenseMod(GaussianNoise(1e-3), setup), *mods] if outside else mods
    metered = [LeakMeter(setup, Policy(probability=0.05), path=path), *mods]
    with caplog.at_level(logging.INFO, "leakbound.meter"):
        reply = flower.ask(flower.client_app(metered, batches=one))
    if not outside:
        assert everything(reply) == everything(flower.ask(flower.client_app(mods, batches=one)))
    (words,) = warnings(caplog)
    assert "send (undecided)" in words
    assert "experiment only: the noise is seeded" in words
    line = json.loads(path.read_text())
    assert all(one["bounds"] == [] for one in line["assessments"])
    assert any("experiment only: the noise is seeded" in note for note in line["notes"])
    strict = [LeakMeter(setup, ACCEPTED), *mods]
    assert flower.ask(flower.client_app(strict, batches=one)).error.reason == REFUSED


def test_the_law_of_a_mods_noise_is_known(flower, setup, one, tmp_path):
    """The floor needs the covariance that the mod inside declared."""
    policy = Policy(psnr=17.0, error_bound=True)
    noise = DefenseMod(GaussianNoise(1.0), setup)
    known, unknown = (LeakMeter(setup, policy, path=tmp_path / name) for name in ("one", "two"))
    flower.ask(flower.client_app([known, noise], batches=one))
    twice = [unknown, DefenseMod(GaussianNoise(1e-3), setup), noise]
    flower.ask(flower.client_app(twice, batches=one))
    assert '"estimate"' in known.meter.path.read_text()
    assert '"estimate"' not in unknown.meter.path.read_text()  # several mods: no law, no bound
    assert "several mods made the update" in unknown.meter.path.read_text()


def test_a_planted_model_is_refused_before_training(flower, setup, one, caplog):
    trained = []

    def batches(who, round):
        trained.append(who)
        return one(who, round)

    app = flower.client_app([LeakMeter(setup)], batches=batches)
    with caplog.at_level(logging.WARNING, "leakbound.meter"):
        reply = flower.ask(app, arrays=planted(flower))
    assert reply.error.reason == REFUSED
    assert trained == []
    assert "looks malicious (imprint)" in warnings(caplog)[0]
    assert not flower.ask(app).has_error()  # the agreed model is trained
    assert trained == [0]


def test_a_planted_model_may_be_warned_of_and_is_read(flower, setup, one, caplog):
    policy = Policy(on_planted="warn", on_leak="ignore")
    app = flower.client_app([LeakMeter(setup, policy)], batches=one)
    with caplog.at_level(logging.WARNING, "leakbound.meter"):
        reply = flower.ask(app, arrays=planted(flower))
    assert not reply.has_error()
    assert "warn (exposed)" in warnings(caplog)[0]


@pytest.mark.parametrize("model", ["agreed", "planted"])
def test_nothing_useful_is_sent_where_the_policy_says_so(model, flower, setup, one):
    policy = Policy(on_leak="refuse", on_refuse="send nothing useful")
    arrays = planted(flower) if model == "planted" else ArrayRecord(flower.Net().state_dict())
    app = flower.client_app([LeakMeter(setup, policy)], batches=one)
    reply = flower.ask(app, arrays=arrays)
    plain = flower.ask(flower.client_app(batches=one), arrays=arrays)
    found, given = everything(reply), everything(plain)
    assert found["arrays"]["arrays"] == {name: a.data for name, a in arrays.items()}
    assert found["arrays"] != given["arrays"]
    assert found["metrics"] == given["metrics"]


def test_numbers_leave_only_by_a_release(flower, setup, one):
    app = flower.client_app([LeakMeter(setup, release=True)], batches=one)
    metrics = everything(flower.ask(app))["metrics"]["metrics"]
    assert metrics["released-exposed"] == 1.0
    assert metrics["released-refused"] == 0.0
    assert metrics["released-best"] > 60
    strict = flower.client_app([LeakMeter(setup, STRICT, release=True)], batches=one)
    reason = flower.ask(strict).error.reason
    assert reason.startswith(f"{REFUSED}; released knowingly: ")
    told = json.loads(reason.partition("knowingly: ")[2])
    assert told["released-refused"] == 1.0
    before = flower.ask(strict, arrays=planted(flower)).error.reason
    assert json.loads(before.partition("knowingly: ")[2])["released-exposed"] == 0.0


@pytest.mark.linux
def test_every_so_many_rounds_it_measures_and_every_round_it_inspects(
    flower, setup, one, caplog, tmp_path
):
    path = tmp_path / "readings.jsonl"
    app = flower.client_app([LeakMeter(setup, every=3, path=path, release=True)], batches=one)
    grid = InProcessGrid(app, 1)
    released = []
    for number in range(1, 6):
        reply = flower.ask(app, flower.message(grid, round=number), grid=grid)
        metrics = everything(reply)["metrics"]["metrics"]
        released.append("released-exposed" in metrics)
    assert released == [True, False, False, True, False]
    asked = flower.message(grid, round=6, arrays=planted(flower))
    assert flower.ask(app, asked, grid=grid).error.reason.startswith(REFUSED)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    verdicts = [line.get("verdict") for line in lines]
    assert verdicts == ["exposed", None, None, "exposed", None, None]
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["action"] == "refuse"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_cannot_be_judged_is_not_sent(flower, setup, one, batches, caplog):
    unheard = flower.client_app([LeakMeter(setup)], batches=one, shown=False)
    with caplog.at_level(logging.ERROR, "leakbound.meter"):
        assert flower.ask(unheard).error.reason == BROKEN
    assert "tap(inputs, labels)" in warnings(caplog)[0]

    def late(message, context, call_next):
        """Changes the weights after the defense had made them."""
        reply = call_next(message, context)
        state = reply.content["arrays"].to_torch_state_dict()
        state["last.bias"] += 1
        reply.content["arrays"] = ArrayRecord(state)
        return reply

    mods = [LeakMeter(setup), late, DefenseMod(PRIVATE, setup, seed=1)]
    assert flower.ask(flower.client_app(mods, batches=one)).error.reason == BROKEN
    wrong = ArrayRecord({"first.weight": torch.zeros(2)})
    assert flower.ask(flower.client_app([LeakMeter(setup)], batches=one), arrays=wrong).has_error()


def test_a_train_functions_own_defense_is_taken_at_its_word(flower, setup, one):
    told = LeakMeter(setup, ACCEPTED, defense=PRIVATE)
    untold = LeakMeter(setup, ACCEPTED)

    def noise(message, context, call_next):
        """Stands for a train function with DP-SGD inside: no leakbound mod made this noise."""
        reply = call_next(message, context)
        state = reply.content["arrays"].to_torch_state_dict()
        for i, value in enumerate(state.values()):
            value += normal(value.shape, stream(i, "noise"))
        reply.content["arrays"] = ArrayRecord(state)
        return reply

    assert not flower.ask(flower.client_app([told, noise], batches=one)).has_error()
    assert flower.ask(flower.client_app([untold, noise], batches=one)).error.reason == REFUSED


def test_several_local_steps_are_read_as_such(flower, digits, setup, batches, tmp_path):
    """Three steps on three batches: the reading is of all twelve images, each once."""
    longer = dataclasses.replace(setup, steps=3, batch_size=flower.SIZE)
    path = tmp_path / "readings.jsonl"
    app = flower.client_app([LeakMeter(longer, path=path)], batches=batches, steps=3)
    assert not flower.ask(app).has_error()
    (line,) = [json.loads(text) for text in path.read_text().splitlines()]
    assert {len(one["baseline"]) for one in line["assessments"]} == {0, 12}


def test_a_run_goes_on_without_the_clients_that_refuse(flower, setup, one, batches, caplog):
    """Client 0 trains on one image and refuses, client 1 on forty and sends."""

    def mixed(who, round):
        if int(who) == 0:
            return one(who, round)
        inputs, labels = zip(*batches(who, round), strict=True)
        return [(torch.cat(inputs), torch.cat(labels))]

    seen, result = [], []
    app = flower.client_app([LeakMeter(setup, STRICT)], batches=mixed)
    run(
        flower.server_app(2, into=result),
        app,
        2,
        on_exchange=lambda sent, reply: seen.append((sent.metadata.message_type, reply)),
    )
    replies = [reply for kind, reply in seen if kind == "train"]
    assert len(replies) == 4
    for reply in replies:
        assert reply.has_error() == (reply.metadata.src_node_id == 2)
    assert {reply.error.reason for reply in replies if reply.has_error()} == {REFUSED}


def test_a_wrong_place_in_the_list_is_refused(setup):
    meter, noise = LeakMeter(setup), DefenseMod(GaussianNoise(0.1), setup)
    check_mods([meter, noise, fixedclipping_mod])
    check_mods([secaggplus_mod, meter, noise])
    with pytest.raises(ValueError, match="after the LeakMeter evaluates them"):
        check_mods([noise, meter])
    with pytest.raises(ValueError, match="fixedclipping_mod changes the weights after"):
        check_mods([fixedclipping_mod, meter])
    with pytest.raises(ValueError, match="secaggplus_mod first"):
        check_mods([meter, secaggplus_mod, noise])


def test_errors_of_the_train_function_pass_through(flower, setup):
    def broken(who, round):
        raise RuntimeError("no data today")

    reply = flower.ask(flower.client_app([LeakMeter(setup)], batches=broken))
    assert "no data today" in reply.error.reason
    assert REFUSED not in reply.error.reason


def test_a_reply_is_the_same_after_the_wire(flower, setup, one):
    reply = flower.ask(flower.client_app([LeakMeter(setup)], batches=one))
    assert everything(delivered(reply, "again")) == everything(reply)


def normalized(one):
    """Images as many train loops feed them: in [-1, 1]."""

    def of(who, round):
        return [(2 * inputs - 1, labels) for inputs, labels in one(who, round)]

    return of


def test_images_outside_of_the_range_are_not_judged(flower, setup, one, caplog):
    """In the wrong range an exposed image would look safe; in the right one it is refused."""
    app = flower.client_app([LeakMeter(setup, STRICT)], batches=normalized(one))
    with caplog.at_level(logging.ERROR, "leakbound.meter"):
        assert flower.ask(app).error.reason == BROKEN
    assert "flower.Setup(input_range=...)" in warnings(caplog)[0]
    public = Batch(2 * setup.public.inputs - 1, setup.public.labels)
    right = dataclasses.replace(setup, input_range=(-1.0, 1.0), public=public)
    app = flower.client_app([LeakMeter(right, STRICT)], batches=normalized(one))
    assert flower.ask(app).error.reason == REFUSED


def test_images_that_were_not_trained_on_are_doubted(flower, setup, one, caplog):
    """The loop taps raw images and trains on normalized ones: the attacks are judged wrongly."""

    def wrong(message, context, call_next):
        """Stands in the train function's place, and taps what it does not train on."""
        for inputs, labels in one(0, 1):
            tap(inputs, labels)
        return call_next(message, context)

    app = flower.client_app([LeakMeter(setup), wrong], batches=normalized(one), shown=False)
    with caplog.at_level(logging.WARNING, "leakbound.meter"):
        assert not flower.ask(app).has_error()
    assert "has another direction than the update" in warnings(caplog)[0]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "leakbound.meter"):
        flower.ask(flower.client_app([LeakMeter(setup)], batches=one))
    assert "has another direction" not in warnings(caplog)[0]


@pytest.mark.parametrize("scale", [1e-30, 1e-9, 1.0, 1e9, 1e16])
@pytest.mark.parametrize("public", [True, False], ids=["public", "no-public"])
def test_the_size_of_planted_weights_does_not_matter(public, scale, flower, setup, one):
    """Tiny or huge planted weights, and what leaves their units scaled the other way."""
    state = planted(flower).to_torch_state_dict()
    for name in ("first.weight", "first.bias"):
        state[name] = state[name] * scale
    state["last.weight"] = state["last.weight"] / scale
    own = setup if public else dataclasses.replace(setup, public=None)
    trained = []

    def batches(who, round):
        trained.append(who)
        return one(who, round)

    app = flower.client_app([LeakMeter(own)], batches=batches)
    assert flower.ask(app, arrays=ArrayRecord(state)).error.reason == REFUSED
    assert trained == []


def test_without_public_images_gains_are_seen_by_the_shape_that_was_tapped(
    flower, setup, one, caplog
):
    """After training, in every round, and whatever the images are."""
    own = dataclasses.replace(setup, public=None)
    state = flower.Net().state_dict()
    state["last.weight"] = state["last.weight"] * 1e6
    app = flower.client_app([LeakMeter(own, every=2)], batches=one)
    grid = InProcessGrid(app, 2)
    with caplog.at_level(logging.WARNING, "leakbound.meter"):
        for round, node in ((1, 2), (2, 2), (1, 3)):
            asked = flower.message(grid, round=round, node=node, arrays=ArrayRecord(state))
            assert flower.ask(app, asked, grid=grid).error.reason == REFUSED
    said = [words.partition(": ")[2] for words in warnings(caplog)]
    assert "looks malicious (huge gain)" in said[0]
    assert len(set(said)) == 1  # the same for other images
    assert not flower.ask(app).has_error()  # the agreed model's gains are small


def own_weights(flower):
    """What the server sent."""
    return flower.weights(ArrayRecord(flower.Net().state_dict()))


class Crash(MeanImage):
    """An attack that fails on some images, as hostile weights may make any fail."""

    def __call__(self, observation, generator):
        """Fail."""
        raise RuntimeError("overflow")


@pytest.mark.parametrize("rule", ["ignore", "refuse"])
def test_a_measurement_that_fails_is_no_oracle_under_differential_privacy(
    rule, flower, setup, one, caplog
):
    policy = Policy(attacks=(Crash(),), on_undecided=rule)
    private = [LeakMeter(setup, policy), DefenseMod(PRIVATE, setup, seed=1)]
    with caplog.at_level(logging.ERROR, "leakbound.meter"):
        reply = flower.ask(flower.client_app(private, batches=one))
    if rule == "refuse":
        assert reply.error.reason == REFUSED
    else:
        bare = flower.ask(flower.client_app(private[1:], batches=one))
        assert everything(reply) == everything(bare)
    assert "not measured: RuntimeError: overflow" in warnings(caplog)[0]
    told = LeakMeter(setup, policy, defense=PRIVATE)
    assert flower.ask(flower.client_app([told], batches=one)).has_error() == (rule == "refuse")
    quiet = dataclasses.replace(policy, on_refuse="send nothing useful")
    kept = flower.ask(flower.client_app([LeakMeter(setup, quiet)], batches=one))
    assert torch.equal(flower.weights(kept.content["arrays"]), own_weights(flower))
    for mods in ([LeakMeter(setup, policy)], [private[0], DefenseMod(GaussianNoise(1.0), setup)]):
        assert flower.ask(flower.client_app(mods, batches=one)).error.reason == BROKEN


@pytest.mark.parametrize("image", ["dark", "light"])
def test_weights_under_which_some_images_overflow_tell_nothing_by_errors(image, flower, caplog):
    """Nine layers of weights 3e5: a light image overflows, a dark one switches no unit on."""

    def deep():
        pairs = [m for _ in range(9) for m in (nn.Linear(4, 4), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *pairs, nn.Linear(4, 2))

    state = {name: torch.zeros_like(value) for name, value in deep().state_dict().items()}
    for name in state:
        if name.endswith("weight"):
            state[name][0, 0] = 3e5
    state["1.bias"][0] = -1.5e5
    inputs = torch.full((1, 1, 2, 2), float(image == "light"))

    def batches(who, round):
        return [(inputs, torch.tensor([0]))]

    own = Setup(deep, classes=2)
    allowed = Policy(on_planted="ignore")

    def asked(*mods):
        app = flower.client_app(mods, batches=batches, model=deep)
        return flower.ask(app, arrays=ArrayRecord(state))

    assert not asked(LeakMeter(own, allowed), DefenseMod(PRIVATE, own)).has_error()
    assert asked(LeakMeter(own, allowed)).has_error() == (image == "light")
    reply = asked(LeakMeter(own, dataclasses.replace(allowed, on_refuse="send nothing useful")))
    sent = flower.weights(reply.content["arrays"])
    assert torch.equal(sent, flower.weights(ArrayRecord(state))) == (image == "light")


def test_images_out_of_range_are_no_oracle_under_differential_privacy(flower, setup, one, caplog):
    """Noise of the train function, taken at its word; the log says what to mend."""
    told = LeakMeter(setup, Policy(), defense=PRIVATE)
    with caplog.at_level(logging.ERROR, "leakbound.meter"):
        reply = flower.ask(flower.client_app([told], batches=normalized(one)))
    assert not reply.has_error()
    assert "flower.Setup(input_range=...)" in warnings(caplog)[0]


def test_a_setup_hands_on_what_one_input_is():
    columns = (Column("age", "integer", 0, 100), Column("sex", "categorical", levels=("f", "m")))
    domain = TableDomain(columns)
    setup = Setup(lambda: nn.Linear(3, 2), learning_rate=0.1, domain=domain)
    task = setup.task(setup.state(), {})
    assert task.domain == domain
    assert task.input_range == (0.0, 1.0)
