"""Whole jobs in NVFlare's simulator, and what their server sees."""

import json
import re
from types import SimpleNamespace

import psutil
import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.event_type import EventType
from sklearn.datasets import load_digits
from torch import nn

from leakbound.captured.capture import load_all
from leakbound.cli import main
from leakbound.cli.captured import EXPOSED_CODE
from leakbound.core import Batch
from leakbound.nvflare import ServerWatch, capture_job
from leakbound.nvflare.capture import _defenses
from leakbound.nvflare.watch import ClientWatch

from ..captured.flat import attack_update
from .conftest import NET

NOISE = 0.02
FILTER = {
    "path": "leakbound.nvflare.LeakboundFilter",
    "args": {
        "defense": ["clip,clip_norm=0.5", f"gaussian_noise,noise_std={NOISE}"],
        "model": "net:Net",
        "seed": 11,
    },
}
CONVERT = {
    "path": "nvflare.app_common.filters.convert_weights.ConvertWeights",
    "args": {"direction": "weights_to_diff"},
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 12), nn.Linear(12, 10)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x.flatten(1))))


def called(words):
    with pytest.raises(SystemExit) as end:
        main(words)
    return end.value.code


def moved(capture):
    """The change of the weights that a captured update shows, as one vector."""
    is_change = capture.kind == "delta"
    names = list(Net().state_dict())
    parts = (capture.update[n] - (0 if is_change else capture.before[n]) for n in names)
    return torch.cat([part.reshape(-1) for part in parts])


def attacked(capture, site):
    bunch = load_digits()
    inputs = torch.tensor(bunch.images[site : site + 1], dtype=torch.float32)[:, None] / 16
    truth = Batch(inputs, torch.tensor(bunch.target[site : site + 1]))
    found = attack_update(
        *(capture, Net()),
        input_shape=(1, 8, 8),
        examples=1,
        learning_rate=0.5,
        truth=truth,
        attacks=("linear_inversion",),
        pictures=False,
    )
    return max(record.scores[0] or 0.0 for record in found.records)


@pytest.mark.slow
def test_a_job_is_captured_attacked_and_defended(job, tmp_path):
    plain, defended = tmp_path / "plain", tmp_path / "defended"
    place = job(clients=2, rounds=3)
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    code = called(
        ["capture", str(place), "--out", str(plain), "--rounds", "1", "2", "--clients", "2"]
    )
    assert code == 0
    assert before == {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    captures = load_all(plain)
    rows = [(c.about["round"], c.about["client"], c.about["site"]) for c in captures]
    assert rows == [(r, c, f"site-{c}") for r in "12" for c in "12"]
    assert {c.about["model"] for c in captures} == {"net:Net"}
    assert {c.about["optimizer"] for c in captures} == {"sgd,momentum=0"}
    assert {c.about["learning_rate"] for c in captures} == {"0.5"}
    assert attacked(captures[0], 1) > 60
    assert attacked(captures[1], 2) > 60

    files = capture_job(job([FILTER, CONVERT], clients=2), defended, clients=2)
    assert len(files) == 2
    for own, true in zip(load_all(defended), captures[:2], strict=True):
        assert own.kind == "weights"  # NVFlare 2.9: ConvertWeights changes no result
        clipped = moved(true) * min(1.0, 0.5 / float(moved(true).norm()))
        noise = moved(own) - clipped
        assert float(noise.std()) == pytest.approx(NOISE, rel=4 / (2 * len(noise)) ** 0.5)
        assert abs(float(noise.mean())) < 4 * NOISE / len(noise) ** 0.5
        assert "site-" not in own.about["defense_from"]
    assert attacked(load_all(defended)[0], 1) < 20
    assert SAID in signed(defended, tmp_path, 0)
    undefended = signed(plain, tmp_path, EXPOSED_CODE)
    assert "No defense was declared for the captured updates" in undefended
    assert not [p for p in psutil.process_iter() if "simulator" in " ".join(_words(p))]


SAID = "The defense tested is not enough"


def signed(captured, tmp_path, code):
    """The sign-off page on an attack of a captured folder, which ends with this exit code."""
    out = tmp_path / f"{captured.name}-report"
    words = ["attack", "--update", str(captured), "--model", "net:Net", "--input-shape", "1,8,8"]
    words += ["--round", "1", "--batch-size", "1", "--attack", "linear_inversion"]
    (tmp_path / "net.py").write_text(NET)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path)
        assert called([*words, "--out", str(out)]) == code
        assert called(["evidence", str(out), "--out", str(out / "evidence")]) == 0
    return " ".join(re.sub("<[^>]*>", "", page) for page in pages(out / "evidence"))


def pages(folder):
    return [path.read_text() for path in folder.rglob("*.html")]


def _words(process):
    try:
        return [word for word in process.cmdline() if "leakbound-nvflare-" in word]
    except psutil.Error:
        return []


@pytest.mark.slow
def test_a_filter_for_all_tasks_runs_for_none_and_nothing_leaves(job, tmp_path):
    """NVFlare compares the names of tasks exactly; the filter notices, and empties the result."""
    with pytest.raises(ValueError, match="did not pass the leakbound filter"):
        capture_job(job([FILTER], tasks=("*",)), tmp_path / "out", clients=1)
    assert not list((tmp_path / "out").rglob("*.safetensors"))


OTHER = {"path": "my.own.Filter", "args": {}}
PRUNED = {**FILTER, "args": {**FILTER["args"], "defense": ["magnitude_pruning,rate=0.5"]}}
DP_SGD = ["clip_examples,clip_norm=0.5", "mean", "gaussian_noise,noise_std=0.5"]
SCALED = {**FILTER, "args": {**FILTER["args"], "learning_rate": 0.1}}


def declares(job, *filters):
    place = job(filters, clients=2)
    meta = json.loads((place / "meta.json").read_text())
    found = _defenses(place, meta, ["site-1", "site-2"])
    assert found["site-1"] == found["site-2"]
    return found["site-1"]


def test_what_a_jobs_filters_do_is_declared(job):
    """A captured update of a defended client said "No defense was tested"."""
    found = declares(job, FILTER, CONVERT)
    links = json.loads(found["defense"])
    assert [(one["name"], *list(one.values())[1:]) for one in links] == [
        ("clip", 0.5),
        ("gaussian_noise", NOISE),
    ]
    assert "app/config/config_fed_client.json" in found["defense_from"]
    assert json.loads(declares(job, SCALED)["defense"])[0]["clip_norm"] == 0.05
    assert declares(job) == {}
    anew = {**FILTER, "args": {**FILTER["args"], "defense": DP_SGD}}
    assert declares(job, anew)["optimizer"] == "sgd", "not the train script's"


def test_the_optimizer_of_a_sites_script_reaches_its_server(tmp_path):
    client = ClientWatch(str(tmp_path))
    context = SimpleNamespace(get_identity_name=lambda default: "site-2")
    client.handle_event(EventType.BEFORE_TASK_EXECUTION, context)
    weight = torch.nn.Parameter(torch.ones(2))
    weight.sum().backward()
    torch.optim.AdamW([weight], lr=0.25, weight_decay=0.5).step()
    client.handle_event(EventType.AFTER_TASK_EXECUTION, context)
    client.handle_event(EventType.END_RUN, context)
    watch = ServerWatch(str(tmp_path), notes=str(tmp_path))
    known = watch._trained("site-2")
    assert known["optimizer"].startswith("adamw,betas=[0.9, 0.999]")
    assert (known["learning_rate"], known["weight_decay"], known["steps"]) == ("0.25", "0.5", "1")
    assert watch._trained("site-1") == {}
    assert ServerWatch(str(tmp_path))._trained("site-2") == {}


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ((FILTER, OTHER), "LeakboundFilter, Filter ran .* Filter is not known"),
        ((OTHER,), "Filter is not known"),
        ((PRUNED,), "MagnitudePruning.* not as a clip or noise"),
    ],
)
def test_filters_that_cannot_be_declared_are_named(job, filters, words):
    found = declares(job, *filters)
    assert list(found) == ["defense_note"]
    assert re.search(words, found["defense_note"])
    assert found["defense_note"].endswith("nothing is declared")


def test_a_defense_counts_only_with_the_mark_of_the_filter(tmp_path):
    known = {"defense": "[]", "defense_from": "a job"}
    watch = ServerWatch(str(tmp_path), clients=["a", "b"], defenses={"a": known})
    marked, plain = (DXO(DataKind.WEIGHTS, {"w": torch.ones(1).numpy()}) for _ in range(2))
    marked.add_filter_history("LeakboundFilter")
    assert watch._defense("a", marked) == known
    assert "does not carry the mark" in watch._defense("a", plain)["defense_note"]
    assert "settings are not known" in watch._defense("b", marked)["defense_note"]
    assert watch._defense("b", plain) == {}


def test_a_job_that_trains_nothing_is_not_run(job, tmp_path):
    place = job()
    path = "nvflare.app_common.workflows.statistics_controller.StatisticsController"
    server = {"workflows": [{"id": "w", "path": path, "args": {}}], "components": []}
    (place / "app" / "config" / "config_fed_server.json").write_text(json.dumps(server))
    with pytest.raises(ValueError, match="trains no model: StatisticsController returns"):
        capture_job(place, tmp_path / "out")


def test_folders_that_are_no_jobs(tmp_path):
    with pytest.raises(ValueError, match=r"no meta\.json"):
        capture_job(tmp_path, tmp_path / "out")
    (tmp_path / "meta.json").write_text("{}")
    with pytest.raises(ValueError, match="config_fed_server"):
        capture_job(tmp_path, tmp_path / "out2")
    with pytest.raises(ValueError, match="rounds is 0"):
        capture_job(tmp_path, tmp_path / "out2", rounds=(0,))
    assert called(["capture", str(tmp_path), "--out", "o", "--run-config", "a=1"]) == 2
