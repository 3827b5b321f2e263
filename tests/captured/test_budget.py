"""An attack that does not fit into memory or time does not run, and says both numbers."""

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from leakbound import models
from leakbound._util.memory import GB, Allowed
from leakbound.assess.verdict import of_configuration
from leakbound.attacks.matching.cost import Cost, CostLine, StepCost
from leakbound.captured import Settings, TrainingInfo, attack_all, attack_update, budget, load
from leakbound.captured.run import Listener, Output
from leakbound.client import is_frugal
from leakbound.domains import TokenDomain
from leakbound.registry import build

SHAPE = (3, 12, 12)
SEARCH = "inverting_gradients,steps=4"


def line(seconds, gigabytes):
    return CostLine(2, Cost(2 * seconds, 2 * gigabytes * GB), Cost(4 * seconds, 4 * gigabytes * GB))


def cost(seconds=1e-4, gigabytes=1e-4, why=""):
    """A cost for each example of a local step; a training alone takes a tenth."""
    alone = line(seconds / 10, gigabytes / 10)
    return StepCost(line(seconds, gigabytes), None, alone, 0.0, 0.0, 0.0, 1, 1, 1, why)


@pytest.fixture(scope="module")
def client():
    """Four images, two steps of SGD on a network with batch norm in training mode."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.Tanh(), nn.AvgPool2d(5)),
        *(nn.Flatten(), nn.Linear(8, 4)),
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs, labels = torch.rand(4, *SHAPE), torch.arange(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model, load(dict(model.state_dict()), before, kind="weights")


KNOWN = TrainingInfo(examples=4, learning_rate=0.1, steps=2)


def attacked(client, *, known=KNOWN, output=None, listener=None, **settings):
    model, update = client
    settings = Settings(SHAPE, **{"attacks": SEARCH, **settings})
    return attack_update(update, model, settings, known, output=output, listener=listener)


def measured(monkeypatch, value):
    monkeypatch.setattr(budget, "step_cost", lambda *given, **more: value)


def test_a_first_step_over_its_share_does_not_run(client, monkeypatch):
    """Both numbers are named, and it is no attempt; what is certain still stands."""
    measured(monkeypatch, cost(seconds=10.0))
    outcome = attacked(client, seconds=30.0)
    (record,) = outcome.records
    assert record.status == "not_applicable"
    assert "not run: its first step takes about 80 s and to judge it 24 s" in record.reason
    assert "its share of the time is 30 s" in record.reason or "29." in record.reason
    assert {fact.kind for fact in record.facts} >= {"batch statistics"}
    assert outcome.verdict == "facts exposed"
    assert outcome.best is None


def test_without_facts_nothing_ran(client, monkeypatch):
    measured(monkeypatch, cost(seconds=10.0))
    (record,) = attacked(client, seconds=30.0).records
    bare = type(record)(
        **{**{f: getattr(record, f) for f in record.__struct_fields__}, "facts": ()}
    )
    assert of_configuration([bare]) == "not run"
    assert of_configuration([record]) == "facts exposed"


def test_a_step_that_does_not_fit_is_refused_with_both_numbers(client, monkeypatch):
    measured(monkeypatch, cost(gigabytes=100.0, why="batch norm couples the examples"))
    monkeypatch.setattr(Allowed, "room", property(lambda self: 6.5 * GB))
    (record,) = attacked(client).records
    assert "its first step takes about 600 GB of memory, and 6.5 GB are left" in record.reason
    assert "it cannot be split, since batch norm couples the examples" in record.reason


def test_a_step_that_fits_only_in_parts_runs_in_parts(client, monkeypatch):
    """With 4 GB: all graphs take 12, one takes 6, and that of two examples 3."""
    forms = []
    monkeypatch.setattr(Allowed, "room", property(lambda self: 4 * GB))
    taken = budget.search_fit

    def noted(*given):
        forms.append(taken(*given))
        return forms[-1]

    monkeypatch.setattr(budget, "search_fit", noted)
    measured(monkeypatch, cost(gigabytes=1.0))
    (record,) = attacked(client).records
    assert forms[0].cost.form.chunk == 2
    assert record.status == "ok"
    measured(monkeypatch, cost(gigabytes=0.6))
    attacked(client)
    assert forms[1].cost.form.chunk is None
    measured(monkeypatch, cost(gigabytes=0.1))
    attacked(client)
    assert forms[2].cost.form is None
    assert not is_frugal()


def test_saved_memory_changes_no_answer(client, monkeypatch):
    """On a network with batch norm, whose steps are never split; without an engine."""
    monkeypatch.setenv("LEAKBOUND_ENGINE", "autograd")
    monkeypatch.setattr(Allowed, "room", property(lambda self: 4 * GB))
    answers = []
    for size in (0.1, 0.6):
        measured(monkeypatch, cost(gigabytes=size, why="coupled"))
        (answer,) = attacked(client).answers
        answers.append(answer.inputs)
    assert torch.equal(*answers)


def test_what_an_answer_explains_is_left_out_where_it_does_not_fit(client, monkeypatch):
    measured(monkeypatch, cost(gigabytes=100.0, why="batch norm couples the examples"))
    monkeypatch.setattr(Allowed, "room", property(lambda self: 6.5 * GB))
    (record,) = attacked(client, attacks="constant_image,value=0.5").records
    assert record.status == "ok", record.reason
    assert record.capture.explained is None
    assert "a simulated training takes about 60 GB" in record.capture.notes[-1]


def test_no_search_for_local_steps_begins_that_cannot_end(client, monkeypatch):
    """Of a client that does not send how many batches its norms saw."""
    model, whole = client
    parts = (
        {name: value for name, value in named.items() if "num_batches" not in name}
        for named in (whole.update, whole.before)
    )
    sent = load(*parts, kind="weights")
    measured(monkeypatch, cost(seconds=0.01))
    began = time.monotonic()
    known = replace(KNOWN, steps=None)
    outcome = attacked((model, sent), known=known, seconds=60.0, search=8.0)
    assert time.monotonic() - began < 30
    (found,) = (f for f in outcome.inferred[0].findings if f.name == "local steps")
    assert found.value == "1"
    # 60 steps for each of 1, 2, 5, 10, 20: 0.04 s for a local step on four examples.
    assert "no search among them: they would take 91.2 s, and 8 s are left" in found.how


def test_the_cost_is_said_where_it_is_large(client, monkeypatch):
    for seconds, stated in ((1e-4, False), (2.0, True)):
        heard = []
        measured(monkeypatch, cost(seconds=seconds))
        outcome = attacked(client, seconds=10.0, listener=Listener(cost=heard.append))
        names = [finding.name for finding in heard[0].inferred.findings]
        assert (budget.COST in names) == stated
        (record,) = outcome.records
        assert (budget.COST in [one.name for one in record.capture.findings]) == stated
    (said,) = (one for one in record.capture.findings if one.name == budget.COST)
    assert said.value == "16 s, 0.0012 GB"


def test_the_real_cost_of_a_small_model_is_measured(client):
    (record,) = attacked(client, memory=8.0, seconds=60.0).records
    assert record.status == "ok"
    assert record.problem is None or "stopped early" not in record.problem


def test_a_page_is_written_although_no_time_was_left(client, tmp_path):
    out = tmp_path / "run"
    outcome = attacked(client, seconds=1e-6, output=Output(out))
    (record,) = outcome.records
    assert "not run: the time was over" in record.reason
    assert "mean and variance" in (out / "report.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("optimizer", "count", "searches"), [("sgd", 8, 3), ("sgd", 9, 2), ("adam", 8, 2)]
)
def test_few_examples_after_sgd_are_searched_by_lbfgs_too(client, optimizer, count, searches):
    """On smooth models the other searches end far from what it reaches."""
    known = replace(KNOWN, examples=count, optimizer=optimizer)
    assert attacked(client, known=known, attacks=None, seconds=1e-6).unended == searches


def test_rounds_of_one_client_are_also_searched_together(client):
    model, update = client
    rounds = [
        replace(update, about={**update.about, "client": "1", "round": str(number)})
        for number in (1, 2)
    ]
    found = attack_all(rounds, model, Settings(SHAPE, seconds=1e-6), KNOWN)
    assert found.unended == 3 + 5  # of the first, the closed form was passed over


def test_how_far_a_cut_search_came_is_said(client):
    (record,) = attacked(client, attacks="inverting_gradients,steps=100000", seconds=1.0).records
    assert "of 100,000 steps" in record.problem


def test_how_often_a_search_trains_before_it_asks_for_the_time():
    """Also where an attack has another one inside."""
    for name, calls in {
        **dict.fromkeys(("inverting_gradients", "strong_matching", "fed_avg_matching"), 1),
        **dict.fromkeys(("gias", "token_matching"), 1),
        **{"dlg": 20, "tab_leak": 8, "grad_inversion": 4, "gauss_newton": 40},
        **dict.fromkeys(("linear_inversion", "constant_image", "patch_span"), 0),
    }.items():
        assert build("attack", name, {}).step_trainings == calls, name


def of_text(steps):
    """A decoder, an update of two sequences, and what is known of it."""
    generator = torch.Generator().manual_seed(0)
    model = models.decoder(
        input_shape=(6,),
        classes=40,
        width=16,
        layers=1,
        heads=2,
        generator=generator,
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tokens = torch.randint(40, (2, 6), generator=generator)
    scores = model(tokens)[:, :-1].flatten(0, 1)
    nn.functional.cross_entropy(scores, tokens[:, 1:].flatten()).backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 0.1 * weight.grad
    update = load(dict(model.state_dict()), before, kind="weights")
    settings = Settings((6,), domain=TokenDomain(40, 6), loss="next_token", seconds=30.0)
    return model, update, settings, TrainingInfo(examples=2, learning_rate=0.1, steps=steps)


def test_searches_for_tokens_are_measured_too():
    """The step that is timed is one of weights of candidate tokens, and is refused in words."""
    model, update, settings, known = of_text(1)
    costs = []
    taken = budget.step_cost

    def noted(*given, **more):
        costs.append(taken(*given, **more))
        return replace(costs[-1], search=line(100.0, 1e-4), engine=None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "step_cost", noted)
        settings = replace(settings, attacks="token_matching,steps=3")
        (record,) = attack_update(update, model, settings, known).records
    assert costs[0].search.one.seconds < 5
    assert "not run: its first step takes about" in record.reason


def test_what_closed_forms_on_text_explain_keeps_to_the_time():
    """A million local steps would take hours to simulate."""
    model, update, settings, known = of_text(1_000_000)
    settings = replace(settings, attacks="token_rows")
    (record,) = attack_update(update, model, settings, known).records
    assert record.capture.explained is None
    assert any("not computed: a simulated training takes" in n for n in record.capture.notes)


def test_lbfgs_sees_the_time_only_after_its_line_search():
    fits = [
        budget.search_fit(cost(seconds=1.0), float("inf"), 10.0, build("attack", name, {}))
        for name in ("inverting_gradients", "dlg")
    ]
    assert not fits[0].refused
    assert "first step takes about 20 s" in fits[1].refused


def test_a_device_that_is_not_here_is_refused_by_name(client):
    model, update = client
    for name in ("tpu9", "meta" if torch.cuda.is_available() else "cuda"):
        with pytest.raises(ValueError, match=f"device is '{name}'"):
            attack_update(update, model, Settings(SHAPE), KNOWN, device=name)


def test_memory_is_a_positive_number():
    with pytest.raises(ValueError, match="memory is 0"):
        Settings(SHAPE, memory=0)
