"""Whole jobs in NVFlare's simulator, and what their server sees."""

import psutil
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from leakbound.captured import attack_update
from leakbound.captured.capture import load_all
from leakbound.cli import main
from leakbound.nvflare import capture_job
from leakbound.types import Batch

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
    assert attacked(load_all(defended)[0], 1) < 20
    assert not [p for p in psutil.process_iter() if "simulator" in " ".join(_words(p))]


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


def test_folders_that_are_no_jobs(tmp_path):
    with pytest.raises(ValueError, match=r"no meta\.json"):
        capture_job(tmp_path, tmp_path / "out")
    (tmp_path / "meta.json").write_text("{}")
    with pytest.raises(ValueError, match="config_fed_server"):
        capture_job(tmp_path, tmp_path / "out2")
    with pytest.raises(ValueError, match="rounds is 0"):
        capture_job(tmp_path, tmp_path / "out2", rounds=(0,))
    assert called(["capture", str(tmp_path), "--out", "o", "--run-config", "a=1"]) == 2
