"""Where models and batches live. No GPU is at hand: a device without values stands for it."""

import json

import pytest
import torch

from leakbound import audit
from leakbound._util import files
from leakbound.audit.context import usable
from leakbound.audit.plan import DataSpec
from leakbound.cli import main


@pytest.mark.parametrize("device", ["nowhere", "", "meta", "cuda:99"])
def test_a_device_that_is_not_here_is_named(device, tiny, tmp_path):
    with pytest.raises(ValueError, match=f'device is \'{device}\'.*give "cpu", or "cuda"'):
        audit.audit(tiny, tmp_path / "run", device=device)
    assert not (tmp_path / "run").exists()


def test_the_command_says_so_too(capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        main(["audit", "--quick", "--device", "nowhere", "--out", str(tmp_path / "run")])
    assert stopped.value.code == 2
    assert "device is 'nowhere'" in capsys.readouterr().err


def test_everything_handed_out_is_on_the_device():
    bench = audit.PlanContext(DataSpec("digits"))
    bench.device = torch.device("meta")
    (batch,) = bench.batches(3, 1, seed=0)
    for own in (batch, bench.public, bench.batch(torch.tensor([1, 2]))):
        assert (own.inputs.device.type, own.labels.device.type) == ("meta", "meta")
    assert bench.dataset.domain.blind(bench.public.inputs).device.type == "meta"


def test_a_folder_keeps_to_one_device(tiny, tmp_path):
    """On the CPU run.json is what it was; a folder of another device is refused."""
    folder = tmp_path / "run"
    audit.audit(tiny, folder, pictures=False)
    about = json.loads((folder / "run.json").read_text())
    assert "device" not in about["machine"]
    about["machine"]["device"] = "some GPU"
    (folder / "run.json").unlink()
    del about["written_by"]
    files.write(folder / "run.json", json.dumps(about).encode())
    with pytest.raises(ValueError, match="another kind of machine"):
        audit.audit(tiny, folder, pictures=False)


def test_usable():
    assert usable("cpu") == torch.device("cpu")
