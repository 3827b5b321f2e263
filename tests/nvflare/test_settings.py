"""Facts and mistakes of NVFlare's own settings, filter by filter."""

import importlib
import inspect
import json

import pytest

from leakbound.cli import main
from leakbound.risk.deployment.facts import AggregationFacts, ClipFacts, Noise, Participation
from leakbound.risk.deployment.nvflare import (
    DEFAULT_ROUNDS,
    FIVE_ROUNDS,
    TRAINS_NOTHING,
    filters_of,
    read,
    sites_in,
)

FILTERS = "nvflare.app_common.filters."


def client(filters, tasks=("train",), **chain):
    rows = [{"path": path, "args": args} for path, args in filters]
    executor = {"tasks": ["train"], "executor": {"path": "my.Trainer", "args": {"path": "a.b"}}}
    filters = [{"tasks": list(tasks), "filters": rows, **chain}]
    return {"format_version": 2, "executors": [executor], "task_result_filters": filters}


@pytest.fixture
def job(tmp_path):
    """Writes config_fed_client, and the files beside it; returns its path."""

    def made(table, *, server=None, meta=None, name="config_fed_client.json", text=None):
        place = tmp_path / "job" / "app" / "config"
        place.mkdir(parents=True, exist_ok=True)
        if server is not None:
            (place / "config_fed_server.json").write_text(json.dumps(server))
        if meta is not None:
            (tmp_path / "job" / "meta.json").write_text(json.dumps(meta))
        (place / name).write_text(json.dumps(table, indent=2) if text is None else text)
        return place / name

    return made


def names(mistakes):
    return [mistake.name for mistake in mistakes]


def test_percentile_privacy_is_a_clamp_without_a_law(job):
    path = job(client([(FILTERS + "percentile_privacy.PercentilePrivacy", {"gamma": 0.02})]))
    facts, mistakes = read(path, entries=10_000, steps=3)
    expected = ClipFacts(norm=0.02 * 3, kind="elementwise", entries=10_000, at="client")
    assert facts.clip == expected
    assert facts.clip.l2 == pytest.approx(0.02 * 3 * 100)
    assert facts.noise == Noise()
    assert names(mistakes) == ["no-noise"]
    assert read(path)[0].clip.l2 is None
    assert read(path, entries=100)[0].clip.l2 is None, "the number of steps is not known"
    line = path.read_text().splitlines()[mistakes[0].line - 1]
    assert "PercentilePrivacy" in line


@pytest.mark.parametrize("args", [{"gamma": 0}, {"gamma": -1.0}, {"percentile": 101}])
def test_settings_that_switch_percentile_privacy_off(job, args):
    facts, mistakes = read(job(client([(FILTERS + "PercentilePrivacy", args)])))
    assert (facts.clip, names(mistakes)) == (ClipFacts(), ["filter-off"])


def test_sparse_vector_defaults_cost_epsilon_70333(job):
    path = job(client([(FILTERS + "svt_privacy.SVTPrivacy", {})]))
    facts, mistakes = read(path, entries=7_033_300, steps=2)
    assert facts.noise.pure_epsilon == pytest.approx(70333.1, rel=1e-6)
    assert (facts.noise.at, facts.clip.norm) == ("client", 2e-5)
    assert names(mistakes) == ["selection-without-halt"]
    assert "70,333.1" in mistakes[0].text
    assert read(path)[0].noise == Noise(at="client")
    budget = job(client([(FILTERS + "SVTPrivacy", {"epsilon_release": 2.0, "epsilon": 1.0})]))
    assert read(budget)[0].noise.pure_epsilon == 3.0


@pytest.mark.parametrize("given", [None, "bn", ["head.weight"]])
def test_exclude_vars_removes_and_protects_nothing(job, given):
    path = job(client([(FILTERS + "exclude_vars.ExcludeVars", {"exclude_vars": given})]))
    facts, mistakes = read(path)
    assert (facts.clip, facts.noise, names(mistakes)) == (ClipFacts(), Noise(), ["no-noise"])
    assert ("removes nothing" in mistakes[0].text) == (given is None)


def test_encryption_has_one_key_for_all_clients(job):
    he = "nvflare.app_opt.he.model_encryptor.HEModelEncryptor"
    facts, mistakes = read(job(client([(he, {})])))
    shared = AggregationFacts(on=True, kind="homomorphic", shared_key=True)
    assert facts.secure_aggregation == shared
    assert names(mistakes) == ["shared-key", "aggregation-alone"]
    facts, mistakes = read(job(client([(he, {"encrypt_layers": ["conv"]})])))
    assert not facts.secure_aggregation.on
    assert names(mistakes) == ["partly-encrypted", "shared-key"]


def test_a_filter_of_ours_states_clip_and_noise(job):
    own = "leakbound.nvflare.filter.LeakboundFilter"
    args = {"defense": ["clip,clip_norm=2.0", "gaussian_noise,noise_std=0.5"], "model": "net:Net"}
    facts, mistakes = read(job(client([(own, {**args, "learning_rate": 0.1})])))
    assert facts.clip == ClipFacts(norm=0.2, kind="l2", at="client")
    assert facts.noise == Noise(std=0.05, at="client", seeded=False)
    assert not mistakes
    assert read(job(client([(own, {**args, "seed": 1})])))[0].noise.seeded
    turned = {**args, "defense": args["defense"][::-1]}
    assert read(job(client([(own, turned)])))[0].clip.kind == "none"
    odd = {**args, "defense": [args["defense"][0], "quantization", args["defense"][1]]}
    facts, mistakes = read(job(client([(own, odd)])))
    assert (facts.clip, names(mistakes)) == (ClipFacts(), ["not-stated"])


def test_later_filters_do_not_replace_a_law(job):
    own = "leakbound.nvflare.LeakboundFilter"
    args = {"defense": ["clip,clip_norm=2.0", "gaussian_noise,noise_std=0.5"], "model": "net:Net"}
    filters = [(own, args), (FILTERS + "PercentilePrivacy", {}), (FILTERS + "SVTPrivacy", {})]
    facts, _ = read(job(client(filters)), entries=10, steps=1)
    assert (facts.clip.norm, facts.noise.std) == (2.0, 0.5)


def test_an_unknown_filter_is_named_and_states_nothing(job):
    path = job(client([("flip.privacy.SVTPrivacy", {}), ("my.own.DPFilter", {"epsilon": 1})]))
    facts, mistakes = read(path)
    assert (facts.noise, names(mistakes)) == (Noise(), ["not-stated"] * 2)
    assert "flip.privacy.SVTPrivacy" in mistakes[0].text
    assert not mistakes[0].fatal
    lines = path.read_text().splitlines()
    assert "flip" in lines[mistakes[0].line - 1]
    assert "DPFilter" in lines[mistakes[1].line - 1]


def test_a_filter_that_is_named_twice_has_two_lines(job):
    path = job(client([("my.Filter", {}), ("my.Filter", {})]))
    one, two = (mistake.line for mistake in read(path)[1])
    assert one < two


@pytest.mark.parametrize(
    ("chain", "words"),
    [
        ({"tasks": ["*"]}, "exactly"),
        ({"tasks": ["validate"]}, "'train'"),
        ({"direction": "in"}, "'in'"),
    ],
)
def test_a_filter_that_never_runs_states_nothing(job, chain, words):
    facts, mistakes = read(job(client([(FILTERS + "SVTPrivacy", {})], **chain)))
    assert (facts.noise, names(mistakes)) == (Noise(), ["never-runs"])
    assert words in mistakes[0].text


def test_converting_weights_after_training_does_nothing(job):
    args = {"direction": "weights_to_diff"}
    _, mistakes = read(job(client([(FILTERS + "convert_weights.ConvertWeights", args)])))
    assert names(mistakes) == ["never-converts"]


def workflow(path, **args):
    return {"format_version": 2, "workflows": [{"id": "w", "path": path, "args": args}]}


def test_rounds_cohort_and_weights_come_from_the_files_beside_it(job):
    fedavg = workflow("nvflare.app_common.workflows.fedavg.FedAvg", num_clients=2, num_rounds=7)
    sites = {"name": "lungs", "deploy_map": {"app": ["server", "a", "b", "c"]}}
    facts, _ = read(job(client([]), server=fedavg, meta=sites))
    assert (facts.title, facts.rounds, facts.weights) == ("lungs", 7, "examples")
    assert facts.participation == Participation(law="fixed-size", cohort=2, population=3)
    scatter = workflow(
        "nvflare.app_common.workflows.scatter_and_gather.ScatterAndGather",
        min_clients=2,
        num_rounds=3,
        train_task_name="learn",
    )
    scatter["components"] = [{"id": "a", "path": "A", "args": {"weigh_by_local_iter": False}}]
    meta = {"deploy_map": {"app": ["@ALL"]}}
    facts, mistakes = read(job(client([("my.F", {})]), server=scatter, meta=meta))
    assert facts.participation == Participation(law="all", replies=2)
    assert (facts.rounds, facts.weights, names(mistakes)) == (3, "uniform", ["never-runs"])


FEDAVG = "nvflare.app_common.workflows.fedavg.FedAvg"
STATISTICS = "nvflare.app_common.workflows.statistics_controller.StatisticsController"
CLEANSER = "nvflare.app_common.filters.statistics_privacy_filter.StatisticsPrivacyFilter"


@pytest.fixture
def export(tmp_path):
    """A job as NVFlare's job interface exports it: an app for the server, and one for each site."""

    def made(server, *clients, ending=".json"):
        place = tmp_path / "export"
        apps = {"app_server": ["server"]}
        (place / "app_server" / "config").mkdir(parents=True)
        own = place / "app_server" / "config" / "config_fed_server.json"
        own.write_text(json.dumps(server))
        paths = []
        for number, table in enumerate(clients, 1):
            config = place / f"app_site-{number}" / "config"
            config.mkdir(parents=True)
            paths.append(config / "config_fed_client.json")
            paths[-1].write_text(json.dumps(table))
            apps[f"app_site-{number}"] = [f"site-{number}"]
        (place / "meta.json").write_text(json.dumps({"name": "lungs", "deploy_map": apps}))
        return paths

    return made


def test_rounds_of_an_export_stand_in_the_servers_app(export):
    path, _ = export(workflow(FEDAVG, num_clients=2, num_rounds=7), client([]), client([]))
    facts, mistakes = read(path)
    assert (facts.title, facts.rounds, facts.weights) == ("lungs", 7, "examples")
    assert facts.participation == Participation(law="all", cohort=2, population=2)
    assert not mistakes


def test_an_export_leaves_out_rounds_that_are_nvflares_default(export):
    path, _ = export(workflow(FEDAVG, num_clients=1), client([]), client([]))
    facts, _ = read(path)
    assert facts.rounds == DEFAULT_ROUNDS
    assert facts.participation.law == "fixed-size"


def test_rounds_of_a_workflow_that_is_not_nvflares_are_not_known(job):
    assert read(job(client([]), server=workflow("my.FedAvg")))[0].rounds is None


def test_apps_with_other_filters_are_named(export):
    plain, defended = client([]), client([("my.Filter", {})])
    one, _ = export(workflow(FEDAVG, num_clients=2), plain, defended)
    _, mistakes = read(one)
    assert names(mistakes) == ["other-apps"]
    assert "app_site-2" in mistakes[0].text
    assert not mistakes[0].fatal


def test_defaults_are_those_of_nvflare():
    pytest.importorskip("nvflare")
    for module, name in {
        "nvflare.app_common.workflows.cyclic": "Cyclic",
        "nvflare.app_common.workflows.cyclic_ctl": "CyclicController",
        "nvflare.app_common.workflows.fedavg": "FedAvg",
        "nvflare.app_common.workflows.lr.fedavg": "FedAvgLR",
        "nvflare.app_common.workflows.scaffold": "Scaffold",
        "nvflare.app_common.workflows.scatter_and_gather": "ScatterAndGather",
        "nvflare.app_common.workflows.scatter_and_gather_scaffold": "ScatterAndGatherScaffold",
        "nvflare.app_opt.pt.fedavg": "PTFedAvg",
        "nvflare.app_opt.pt.fedopt_ctl": "FedOpt",
    }.items():
        kinds = getattr(importlib.import_module(module), name).__mro__
        made = (inspect.signature(vars(k)["__init__"]) for k in kinds if "__init__" in vars(k))
        given = next(one.parameters for one in made if "num_rounds" in one.parameters)
        assert given["num_rounds"].default == DEFAULT_ROUNDS
        assert name in FIVE_ROUNDS


def statistics():
    """The client and the server of NVFlare's `StatsJob`."""
    executor = "nvflare.app_common.executors.statistics.statistics_executor.StatisticsExecutor"
    args = {"result_cleanser_ids": ["min_count_cleanser"]}
    own = client([(CLEANSER, args)], tasks=["fed_stats"])
    tasks = ["fed_stats_pre_run", "fed_stats"]
    own["executors"] = [{"tasks": tasks, "executor": {"path": executor, "args": {}}}]
    return own, workflow(STATISTICS, statistic_configs={"count": {}})


@pytest.mark.parametrize("alone", [False, True], ids=["with its server", "client alone"])
def test_a_job_of_statistics_is_no_training(job, capsys, alone):
    own, server = statistics()
    path = job(own, server=None if alone else server)
    with pytest.raises(ValueError, match=r"trains no model: .* statistics of each client's data"):
        read(path)
    with pytest.raises(SystemExit) as end:
        main(["bound", "--nvflare", str(path)])
    assert end.value.code == 2
    shown = capsys.readouterr()
    assert "trains no model" in shown.err
    assert "train'" not in shown.out + shown.err


@pytest.mark.parametrize("name", sorted(TRAINS_NOTHING))
def test_other_jobs_that_train_nothing_say_what_they_return(job, name):
    path = job(client([]), server=workflow(f"nvflare.app_common.{name}"))
    with pytest.raises(ValueError, match=f"{name} returns {TRAINS_NOTHING[name]}"):
        read(path)
    ours = job(client([]), server=workflow(f"my.{name}", num_rounds=3))
    assert read(ours)[0].rounds == 3


def test_statistics_of_a_job_that_also_trains_leave_in_the_clear(job):
    own, server = statistics()
    own["executors"] += client([])["executors"]
    server["workflows"] += workflow(FEDAVG, num_rounds=3)["workflows"]
    facts, mistakes = read(job(own, server=server))
    assert facts.rounds == 3
    assert names(mistakes) == ["sent-in-clear"]
    assert "StatisticsController returns statistics" in mistakes[0].text
    scores = "nvflare.app_common.workflows.cross_site_model_eval.CrossSiteModelEval"
    evaluated = workflow(FEDAVG, num_rounds=3)
    evaluated["workflows"] += workflow(scores)["workflows"]
    assert names(read(job(client([]), server=evaluated))[1]) == []


@pytest.mark.parametrize(
    "some",
    [
        ["a", "b"],
        {"sites": ["a", "b"]},
        {"targets": ["a", "b"]},
        [{"sites": ["a"]}, "b"],
        ("a", ["b"]),
    ],
)
def test_every_form_of_a_deploy_map_is_read(some):
    assert sites_in(some) == {"a", "b"}
    assert sites_in("a") == {"a"}
    assert sites_in(None) == sites_in(3) == set()


def test_filters_that_run_on_a_trainings_results(job):
    own = client([("my.A", {"x": 1}), ("my.B", {})])
    own["task_result_filters"] += client([("my.C", {})], tasks=["validate"])["task_result_filters"]
    assert filters_of(job(own)) == [("my.A", {"x": 1}), ("my.B", {})]


POLICY = {
    "scopes": [
        {"name": "open", "task_result_filters": []},
        {
            "name": "closed",
            "properties": {},
            "task_result_filters": [{"path": FILTERS + "SVTPrivacy", "args": {"gamma": 0.1}}],
        },
    ],
    "default_scope": "closed",
}


def test_the_default_scope_of_a_sites_policy_counts(job):
    path = job(POLICY, name="privacy.json")
    facts, mistakes = read(path, steps=1)
    assert (facts.clip.norm, facts.noise.at) == (0.1, "client")
    assert names(mistakes) == ["other-scopes", "selection-without-halt"]
    facts, mistakes = read(job({**POLICY, "default_scope": None}, name="privacy.json"))
    assert (facts.noise, names(mistakes)) == (Noise(), ["no-default-scope"])


HOCON = """
format_version = 2
# a comment that names path = "other"
executors = [{ tasks = ["train"], executor { path = "my.Trainer" } }]
task_result_filters = [
  { tasks = ["train"]
    filters = [{ path = "nvflare.app_common.filters.PercentilePrivacy", args { gamma = 0.5 } }] }
]
"""


def test_hocon_is_read_and_includes_nothing(job):
    pytest.importorskip("pyhocon")
    facts, mistakes = read(job(None, name="config_fed_client.conf", text=HOCON), steps=1)
    assert (facts.clip.norm, mistakes[0].line) == (0.5, 7)
    for line in ('include "other.conf"', 'include url("http://127.0.0.1:1/x")'):
        with pytest.raises(ValueError, match="includes other files"):
            read(job(None, name="config_fed_client.conf", text=f"{line}\n{HOCON}"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[1]", "list"),
        ('{"a": 1}', "neither executors"),
        (" " * 2**20 + "{}", "larger than"),
        ('{"task_result_filters": {"a": 1}}', "no list of tables"),
        ('{"task_result_filters": [{"tasks": ["train"], "filters": [{}]}]}', "has no path"),
    ],
)
def test_files_that_are_no_settings(job, text, words):
    with pytest.raises(ValueError, match=words):
        read(job(None, text=text))


def test_settings_that_are_no_numbers(job):
    for value in ("0.1", True, float("nan")):
        with pytest.raises(ValueError, match="gamma is"):
            read(job(client([(FILTERS + "PercentilePrivacy", {"gamma": value})])))
    with pytest.raises(ValueError, match="cannot be read"):
        read("/nowhere/config_fed_client.json")
