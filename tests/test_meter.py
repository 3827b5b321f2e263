"""The meter without Flower: what leaves is attacked and bounded, and the policy decides."""

import dataclasses
import functools
import json
import math

import pytest
import torch

from leakbound import data, models
from leakbound._util.files import encode
from leakbound.assess.record import (
    CERTIFIED,
    EXPOSED,
    FACTS,
    GUESSABLE,
    ON_AVERAGE,
    PROTECTED,
    UNDECIDED,
    UNDER_MODEL,
)
from leakbound.attacks import (
    Attack,
    GradientMatching,
    LinearTrap,
    MeanImage,
    RobbingTheFed,
    TrapWeights,
)
from leakbound.core import (
    Batch,
    Exact,
    Gaussian,
    LocalPlan,
    Reconstruction,
    ThreatModel,
    Unit,
    Update,
)
from leakbound.defenses import (
    ClipExamples,
    DpSgd,
    GaussianMechanism,
    GaussianNoise,
    Mean,
    NoDefense,
    chain,
)
from leakbound.inspection import NOT_SAFE, LayerFinding, inspect
from leakbound.meter import Decision, Policy, measure
from leakbound.protocol import resolve, send
from leakbound.randomness import normal, permutation, stream, uniform

ACCEPTED = Policy(psnr=25.0, probability=0.05)
PRIVATE = chain(ClipExamples(1.0), Mean(), GaussianMechanism(5.0))


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


@functools.cache
def public_digits():
    """One batch for all tests: what bounds count of it is kept with it."""
    own = data.load("digits")
    return Batch(own.inputs[1000:1200], own.labels[1000:1200])


def task_of(build="mlp", seed=0, **settings):
    net = getattr(models, build)(
        input_shape=(1, 8, 8), classes=10, generator=stream(seed, "model"), **settings
    )
    from leakbound.core import Task

    return Task.of(net, classes=10, public=public_digits())


def batch_of(own, size=1, at=0):
    return Batch(own.inputs[at : at + size], own.labels[at : at + size])


def read(task, batch, defense=None, policy=None, seed=0):
    ready = resolve(NoDefense() if defense is None else defense, task, batch.size)
    update = send(task, batch, ready, stream(seed, "noise"))
    return measure(
        task, update, batch=batch, defense=ready, policy=policy, source=stream(seed, "meter")
    )


def outcome(reading, name):
    return next(one for one in reading.assessments if one.attack.name == name)


def bound(reading, basis):
    """The bound on the probability that rests on that."""
    (found,) = (one for one in reading.bounds if one.basis == basis and not one.on_error)
    return found


def test_one_undefended_image_is_exposed(digits):
    reading = read(task_of(), batch_of(digits))
    assert reading.verdict == EXPOSED
    assert reading.best > 60
    assert reading.labels == 1.0
    assert reading.decision.action == "warn"
    assert "LinearInversion reconstructs one image to" in reading.decision.reasons[0]
    assert NOT_SAFE in reading.notes  # an ordinary model, and the words say what that is worth


def test_the_answer_is_judged_and_not_the_batch(digits):
    """Another client's update does not expose this batch: the attack never sees the truth."""
    task, mine, theirs = task_of(), batch_of(digits), batch_of(digits, at=7)
    update = send(task, theirs, NoDefense(), stream(0, "noise"))
    reading = measure(task, update, batch=mine, source=stream(0))
    assert reading.best is None  # nothing to compare with: the batch is not the one behind it
    assert reading.verdict == CERTIFIED  # of the update, whosever it is
    assert any("one is wrong" in reason for reason in reading.decision.reasons)


def test_differential_privacy_protects(digits):
    """Noise of multiplier 5 on one image, for an attacker who knows its class."""
    defense = chain(ClipExamples(1.0), Mean(), GaussianMechanism(5.0))
    reading = read(task_of(), batch_of(digits), defense, ACCEPTED)
    assert reading.verdict == UNDER_MODEL  # 200 public digits, labels known, show no more
    assert reading.decision.action == "send"
    limit = bound(reading, "fitted model")
    assert limit.excludes_threshold
    assert 0 < limit.value < 0.05 < bound(reading, "sample").value
    wide = Policy(psnr=30.0, probability=0.2)
    assert read(task_of(), batch_of(digits), defense, wide).verdict == PROTECTED
    strict = read(task_of(), batch_of(digits), defense)
    assert bound(strict, "fitted model").value > 0.05
    assert strict.verdict == ON_AVERAGE  # as an audit says of it


def test_the_probability_is_that_of_the_bounds(digits):
    import numpy as np

    from leakbound.bounds import identification, record_priors

    defense = chain(ClipExamples(1.0), Mean(), GaussianMechanism(2.0))
    reading = read(task_of(), batch_of(digits), defense, Policy(psnr=23.0))
    limit = bound(reading, "fitted model")
    flat = digits.inputs[1000:1200].flatten(1).double().numpy()
    labels = digits.labels[1000:1200].numpy()
    fitted = record_priors.Mixture.from_samples(flat, labels=labels, components=32)
    rung = record_priors.EmpiricallyBoundedPrior(fitted, [flat[labels == y] for y in range(10)])
    blind = float(rung.log_kappa(np.array([10**-2.3]))[0])
    assert math.log(1e-9) < blind < math.log(0.5)
    assert limit.value == pytest.approx(
        float(identification.gaussian(2.0, log_kappa=blind)), rel=1e-8
    )


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_a_floor_is_an_estimate_and_decides_nothing(digits, activation):
    policy, noise = Policy(psnr=17.0, error_bound=True), chain(GaussianNoise(1.0))
    accepting = dataclasses.replace(policy, probability=0.5)  # a guess matches many at 17 dB
    task = task_of(activation=activation)
    reading = read(task, batch_of(digits), noise, policy)
    (limit,) = reading.bounds
    assert limit.psnr < 17.0
    assert limit.covers == "estimate"
    assert not limit.on_average
    assert ("ReLU" in limit.assumptions[0]) == (activation == "relu")
    assert reading.verdict == GUESSABLE
    assert read(task, batch_of(digits), noise, accepting).verdict == UNDECIDED
    assert read(task, batch_of(digits), noise, Policy(psnr=17.0)).bounds == ()


def test_the_cheap_floor_is_below_the_error_of_an_attack(digits):
    """Over 20 images drawn from the prior, the blind mean image errs by more than the floor."""
    task = task_of(activation="tanh")
    policy = Policy(error_bound=True, draws=8)
    (limit,) = read(task, batch_of(digits), chain(GaussianNoise(0.01)), policy).bounds
    flat = digits.inputs[1000:1200]
    variance = float(flat.flatten(1).double().var(0).mean())
    assert 0 < limit.value < variance
    (louder,) = read(task, batch_of(digits), chain(GaussianNoise(0.1)), policy).bounds
    assert limit.value < louder.value < variance


def test_a_release_that_is_not_the_declared_one_gets_no_floor(digits):
    """Two local steps are no single step: the floor of a stand-in is refused."""
    task, batch = task_of(activation="tanh"), batch_of(digits)
    update = send(task, batch, NoDefense(), stream(0))
    noise = 0.01 * normal(update.rows.shape, stream(1))
    wrong = Update(3 * update.rows + noise, Unit.CLIENT, (1,), Gaussian(1e-4))
    policy = Policy(error_bound=True)
    reading = measure(task, wrong, batch=batch, policy=policy, source=stream(0))
    assert reading.bounds == ()
    assert any("stand-in" in note for note in reading.notes)


def test_statistics_that_leave_beside_take_every_bound_away(digits):
    defense = chain(ClipExamples(1.0), Mean(), GaussianMechanism(5.0))
    task = task_of("resnet18", width=8, norm="batch")
    batch = batch_of(digits)
    update = send(task, batch, defense, stream(0))
    given = {"batch": batch, "defense": defense, "source": stream(0)}
    assert measure(task, update, **given).bounds
    reading = measure(task, update, **given, buffers=True)
    assert reading.bounds == ()
    assert any("statistics" in note for note in reading.notes)


def inside_an_mlp(task, attack, *, shuffle=True):
    """The planted layer written into the agreed model's own first layer, in any order and scale."""
    front = attack.plant(task)
    parts = front.unflatten(front.parameters)
    flat = task.parameters.clone()
    own = task.unflatten(flat)
    units = len(own["1.weight"])
    order = torch.randperm(units, generator=stream(0, "order"))
    factor = 4 ** (2 * uniform((units,), stream(0, "factor")) - 1) * front.model.gain * units
    if not shuffle:
        order, factor = torch.arange(units), torch.full((units,), front.model.gain * units)
    own["1.weight"].copy_(parts["layer.weight"][order] * factor[:, None])
    own["1.bias"].copy_(parts["layer.bias"][order] * factor)
    own["3.weight"].copy_(own["3.weight"][:, :1].expand_as(own["3.weight"]))
    return task.with_parameters(flat)


@pytest.mark.parametrize(
    "attack",
    [RobbingTheFed(bins=128), TrapWeights(rows=128, expected=4)],
    ids=["imprint", "trap"],
)
def test_a_planted_layer_inside_the_agreed_model_is_read(attack, digits):
    """Four images that an ordinary model would mix; the meter reads what the server would."""
    batch = batch_of(digits, 4, at=20)
    plain = task_of(hidden=(128,))
    planted = inside_an_mlp(plain, attack)
    reading = read(planted, batch)
    found = [v for v in outcome(reading, "PlantedLayer").scores if v >= 20]
    assert len(found) >= 3
    assert reading.verdict == EXPOSED
    assert reading.decision.action == "refuse"
    assert any("looks malicious" in words for words in reading.decision.reasons)
    ordinary = outcome(read(plain, batch), "PlantedLayer")
    assert "no marks" in ordinary.reason


def test_the_planted_attacks_own_models_are_read(digits):
    batch = batch_of(digits, 3, at=20)
    for attack in (RobbingTheFed(bins=256), TrapWeights(rows=256)):
        reading = read(attack.plant(task_of()), batch)
        assert max(outcome(reading, "PlantedLayer").scores) > 25
    one = read(LinearTrap().plant(task_of()), batch_of(digits))
    assert outcome(one, "PlantedLayer").scores[0] > 60


def test_noise_of_a_known_law_reaches_the_planted_reader(digits):
    """Without its law the same noisy update gives less away."""
    batch = batch_of(digits, 2, at=20)
    planted = inside_an_mlp(task_of(hidden=(128,)), RobbingTheFed(bins=128))
    quiet = read(planted, batch, chain(GaussianNoise(1e-5)))
    loud = read(planted, batch, chain(GaussianNoise(10.0)))
    assert min(outcome(quiet, "PlantedLayer").scores) > 20
    assert max(outcome(loud, "PlantedLayer").scores) < 20


def test_findings_are_taken_as_given(digits):
    finding = LayerFinding("1", "imprint", 99.0, 4.0, "seen before")
    task, batch = task_of(), batch_of(digits)
    update = send(task, batch, NoDefense(), stream(0))
    reading = measure(task, update, batch=batch, findings=[finding], source=stream(0))
    assert reading.findings == (finding,)
    assert reading.decision.refused


def test_without_a_batch_only_marks_and_bounds_count(digits):
    task, batch = task_of(), batch_of(digits)
    defense = chain(ClipExamples(1.0), Mean(), GaussianMechanism(5.0))
    update = send(task, batch, defense, stream(0))
    with pytest.raises(ValueError, match="give the shape"):
        measure(task, update, source=stream(0))
    given = {"input_shape": (1, 8, 8), "source": stream(0)}
    reading = measure(task, update, defense=defense, policy=ACCEPTED, **given)
    assert reading.verdict == UNDER_MODEL
    assert reading.best is None
    reading = measure(task, send(task, batch, NoDefense(), stream(0)), **given)
    assert reading.verdict == CERTIFIED  # by the update itself
    assert "this is the input as the model gets it" in reading.decision.reasons[0]
    several = send(task, batch_of(digits, 8), NoDefense(), stream(0))
    reading = measure(task, several, **given)
    assert reading.verdict == FACTS
    assert "values are 0 in every example" in reading.decision.reasons[0]
    silent = measure(task, several, policy=Policy(on_facts="ignore"), **given)
    assert silent.decision.action == "send"


def test_stronger_attacks_may_be_added(digits):
    task = task_of("simple_convnet")
    policy = Policy(attacks=(MeanImage(), GradientMatching(steps=2)))
    reading = read(task, batch_of(digits), policy=policy)
    assert [one.attack.name for one in reading.assessments][-2:] == [
        "MeanImage",
        "GradientMatching",
    ]
    assert (
        outcome(reading, "MeanImage").scores <= outcome(reading, "MeanImage").baseline
    )  # of several guesses
    assert outcome(reading, "LinearInversion").status == "not_applicable"


def test_what_is_released_and_what_is_kept(digits):
    reading = read(task_of(), batch_of(digits))
    assert set(reading.release()) == {"released-exposed", "released-refused", "released-best"}
    assert reading.release()["released-exposed"] == 1.0
    assert reading.release()["released-best"] == round(reading.best)
    told = json.loads(encode({"schema": 1, **reading.record()}))
    assert told["verdict"] == EXPOSED
    assert told["assessments"][1]["attack"]["name"] == "LinearInversion"
    assert not any(isinstance(v, torch.Tensor) for v in dataclasses.asdict(reading).values())


@pytest.mark.parametrize("action", ["ignore", "warn", "refuse"])
def test_the_policy_decides(action):
    finding = LayerFinding("1", "imprint", 9.0, 4.0, "words")
    expected = {"ignore": "send", "warn": "warn", "refuse": "refuse"}[action]
    policy = Policy(on_leak=action, on_planted="ignore", on_undecided="ignore")
    assert policy.decide(EXPOSED, [finding], "why").action == expected
    assert policy.decide(PROTECTED, [finding], "why") == Decision("send")
    policy = Policy(on_planted=action, on_leak="warn")
    assert policy.before([finding]).action == expected
    assert policy.before([]) == Decision("send")
    allowed = Policy(on_planted=action, accepted=("imprint",))
    assert allowed.before([finding]) == Decision("send")
    assert allowed.before([dataclasses.replace(finding, kind="huge gain")]).action == expected
    strictest = {"ignore": "warn", "warn": "warn", "refuse": "refuse"}[action]
    assert policy.decide(EXPOSED, [finding], "why").action == strictest
    undecided = Policy(on_undecided=action).decide(UNDECIDED, [], "why")
    assert undecided.action == expected


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"on_leak": "stop"}, "on_leak"),
        ({"psnr": 0.0}, "psnr"),
        ({"probability": 1.0}, "probability"),
        ({"draws": 1}, "draws"),
        ({"attacks": [MeanImage()]}, "attacks"),
        ({"on_refuse": "silence"}, "on_refuse"),
        ({"accepted": ("imprints",)}, "did you mean 'imprint'"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_wrong_policy_is_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        Policy(**wrong)


def test_the_models_of_dp_training_pass_the_inspection(digits):
    task = task_of()
    assert inspect(task) == ()
    reading = read(
        task,
        batch_of(digits, 8),
        DpSgd(noise_multiplier=40.0, clip_norm=1.0),
        Policy(psnr=25.0, probability=0.2),
    )
    assert reading.verdict == UNDER_MODEL
    assert isinstance(send(task, batch_of(digits), NoDefense(), stream(0)).law, Exact)


SHOWN = []


class Spy(MeanImage):
    """Keeps what an attack of the meter is shown."""

    def __call__(self, observation, generator):
        """Note the observation, and answer blindly."""
        SHOWN.append(observation)
        return super().__call__(observation, generator)


def test_attacks_are_shown_what_a_server_sees(digits):
    task, batch = task_of(), batch_of(digits, 3)
    defense = chain(GaussianNoise(0.1))
    SHOWN.clear()
    read(task, batch, defense, Policy(attacks=(Spy(),)))
    read(task, batch, defense, Policy(attacks=(Spy(),), threat=ThreatModel(defense_known=False)))
    hidden, told = SHOWN
    assert hidden.labels is None
    assert hidden.cohort == (3,)
    assert isinstance(hidden.update.law, Gaussian)
    assert torch.equal(told.labels, batch.labels)
    assert told.defense is None
    assert not isinstance(told.update.law, Gaussian)


def test_a_batch_in_another_range_is_refused(digits):
    task, batch = task_of(), batch_of(digits)
    update = send(task, batch, NoDefense(), stream(0))
    wrong = Batch(2 * batch.inputs - 1, batch.labels)
    with pytest.raises(ValueError, match=r"give the task their range: Task.of\(input_range"):
        measure(task, update, batch=wrong, source=stream(0))


def test_a_batch_that_was_not_trained_on_is_doubted(digits):
    """The gradient of the images that were shown is the update, up to its size, or is not."""
    task, batch = task_of(), batch_of(digits, 4)
    update = send(task, batch, NoDefense(), stream(0))
    given = {"source": stream(0), "policy": Policy(on_leak="ignore")}
    larger = dataclasses.replace(update, rows=3 * update.rows)
    for own in (update, larger):
        assert measure(task, own, batch=batch, **given).decision == Decision("send")
    other = measure(task, update, batch=batch_of(digits, 4, at=100), **given)
    assert other.decision.action == "warn"
    assert "has another direction than the update" in other.decision.reasons[0]
    noised = send(task, batch, chain(GaussianNoise(10.0)), stream(0))
    for defense in (chain(GaussianNoise(10.0)), None):  # noise explains it
        assert (
            measure(task, noised, batch=batch, defense=defense, **given).decision.action == "send"
        )


def test_noise_of_no_given_defense_is_named_as_such(digits):
    task, batch = task_of(), batch_of(digits)
    noised = send(task, batch, chain(GaussianNoise(1.0)), stream(0))
    reading = measure(task, noised, batch=batch, source=stream(0))
    assert any("no defense was given (defense=)" in note for note in reading.notes)
    plain = read(task, batch)
    assert any("gives no differential privacy" in note for note in plain.notes)


def test_noise_of_a_seed_gets_no_bound(digits):
    task, batch = task_of(), batch_of(digits)
    update = send(task, batch, PRIVATE, stream(0))
    given = {"batch": batch, "defense": PRIVATE, "policy": ACCEPTED, "source": stream(0)}
    assert measure(task, update, **given).verdict == UNDER_MODEL
    reading = measure(task, update, **given, seeded=True)
    assert reading.verdict == UNDECIDED
    assert reading.bounds == ()
    assert "experiment only" in json.dumps(reading.record())


@pytest.mark.parametrize("attack", [RobbingTheFed(bins=64), TrapWeights(rows=64)])
def test_a_layer_that_local_steps_do_not_move_is_read(attack, digits):
    plan = LocalPlan(5, 1e-3, optimizer="adamw")
    planted = attack.plant(dataclasses.replace(task_of(), plan=plan))
    reading = read(planted, batch_of(digits, 4, at=20))
    found = outcome(reading, "PlantedLayer")
    assert found.verdict == "exposed"
    assert sum(score >= 60 for score in found.scores) >= 2


@pytest.mark.parametrize("spread", [0.0, 30.0], ids=["one-scale", "each-its-own"])
@pytest.mark.parametrize("scale", [1e-20, 1e-9, 1e16])
def test_a_planted_layer_of_any_size_is_read(scale, spread, digits):
    """The same function with tiny or huge weights: the images come out as before."""
    batch = batch_of(digits, 4, at=20)
    planted = inside_an_mlp(task_of(hidden=(128,)), RobbingTheFed(bins=128))
    factor = scale * 10 ** (spread * (uniform((128,), stream(0, "own")).double() - 0.5))
    flat = planted.parameters.clone()
    parts = planted.unflatten(flat)
    parts["1.weight"].mul_(factor[:, None])
    parts["1.bias"].mul_(factor)
    parts["3.weight"].copy_(parts["3.weight"].double() / factor)
    reading = read(planted.with_parameters(flat), batch)
    assert len([v for v in outcome(reading, "PlantedLayer").scores if v >= 20]) >= 3
    assert reading.decision.action == "refuse"


# --- rows of a table


@pytest.fixture(scope="module")
def german():
    """A task on 700 public rows, and the rows that are left."""
    from leakbound.core import Task

    own = data.load("german")
    order = permutation(len(own.labels), stream(0, "rows"))
    public = own.batch(order[:700])
    domain = own.domain.fitted(public.inputs)
    net = models.mlp(input_shape=domain.shape, classes=2, generator=stream(0, "model"))
    task = Task.of(net, classes=2, public=public, domain=domain)
    return task, own.batch(order[700:701]), own.batch(order[710:718])


def test_a_row_that_leaves_without_a_defense_is_exposed(german):
    task, row, rows = german
    reading = read(task, row)
    assert reading.verdict == EXPOSED
    assert outcome(reading, "LinearInversion").scores == (100.0,)
    assert reading.criterion.goal == "18 of 20 columns"
    (reason,) = reading.decision.reasons
    assert "LinearInversion reconstructs one row to 20 of 20 columns" in reason
    assert "the threshold is 18 of 20 columns" in reason
    assert reading.release()["released-best"] == 100
    json.dumps(reading.record())
    several = read(task, rows)
    assert several.verdict == EXPOSED
    assert len(outcome(several, "LinearInversion").matched) == 8


def test_matches_that_nothing_tells_from_chance_are_not_exposed(german):
    task, row, _ = german
    few = dataclasses.replace(
        task, public=Batch(task.public.inputs[:100], task.public.labels[:100])
    )
    quiet = chain(GaussianNoise(1e-6))
    reading = read(few, row, quiet, Policy(on_undecided="warn", probability=0.5))  # 50 decoys
    assert outcome(reading, "LinearInversion").scores == (100.0,)
    assert reading.verdict == UNDECIDED
    assert "no bound" in reading.decision.reasons[0]
    assert "may be chance" in reading.decision.reasons[0]
    assert read(few, row).verdict == EXPOSED  # without noise the update proves the row


def test_noise_on_a_row_is_bounded_by_the_count(german):
    task, row, _ = german
    policy = Policy(probability=0.1, error_bound=True)
    reading = read(task, row, DpSgd(clip_norm=1.0, noise_multiplier=1.0), policy)
    assert reading.verdict == PROTECTED
    (bound,) = reading.bounds
    assert bound.prior.startswith("700 public rows without a model")
    assert any("state nothing of one given example" in words for words in bound.assumptions)
    assert any("bounds on an error" in note for note in reading.notes)
    strict = Policy(probability=0.1, share=1.0)
    assert read(task, row, DpSgd(noise_multiplier=1.0), strict).criterion.within == 0


def test_attacks_of_the_meter_never_see_the_decoys(german):
    task, row, _ = german
    seen = []

    class Looks(MeanImage):
        def __call__(self, observation, generator):
            seen.extend([observation.auxiliary, observation.task.public])
            return super().__call__(observation, generator)

    read(task, row, policy=Policy(attacks=(Looks(),)))
    assert [public.size for public in seen] == [350, 350]


class Fixed(Attack):
    """Answers with the same inputs, whatever it sees."""

    def __init__(self, inputs):
        self.inputs = inputs

    def __call__(self, observation, generator):
        return Reconstruction(self.inputs, observation.labels, 0.0)


def test_a_match_that_several_tests_cannot_tell_from_chance_is_said_to_the_client(digits):
    from leakbound.core import Task

    public = Batch(digits.inputs[:450], digits.labels[:450] % 2)
    model = models.mlp(input_shape=(1, 8, 8), classes=2, generator=stream(0, "model"))
    task = Task.of(model, classes=2, public=public)
    batch = Batch(digits.inputs[500:501], digits.labels[500:501] % 2)
    near = (batch.inputs + 0.06 * normal(batch.inputs.shape, stream(1))).clamp(0, 1)
    loud = chain(GaussianNoise(1.0))
    policy = Policy(psnr=20.0, probability=0.9, attacks=(Fixed(near),))
    reading = read(task, batch, loud, policy)
    assert outcome(reading, "Fixed").verdict == EXPOSED
    assert reading.verdict == UNDECIDED  # 112 decoys show .0088, and two attacks are two tests
    assert any("several attacks are several tests" in why for why in reading.decision.reasons)
    assert reading.decision.action == "warn"
    again = read(task, batch, loud, dataclasses.replace(policy, attacks=(Fixed(near),) * 3))
    assert len(again.assessments) == len(reading.assessments)  # named three times, counted once
    assert again.verdict == reading.verdict


def test_known_parts_are_put_in_and_do_not_count(digits):
    """The client says what attackers have from elsewhere; the labels are not known here."""
    policy = Policy(threat=ThreatModel(labels_known=False, known="region:top"))
    reading = read(task_of(), batch_of(digits), policy=policy)
    assert reading.criterion.known == "region:top"
    assert reading.verdict == EXPOSED
    # A guess has the known half right, which is no reconstruction.
    blind = dataclasses.replace(policy, attacks=(MeanImage(),))
    noisy = chain(ClipExamples(1.0), Mean(), GaussianMechanism(1000.0))
    guess = outcome(read(task_of(), batch_of(digits), noisy, blind), "MeanImage")
    assert guess.verdict != EXPOSED
    assert guess.threat.known == "region:top"
