"""One bad client of a captured round is skipped, with its reason; the others are attacked."""

import json
import sys

import pytest
import torch
from torch import nn

from leakbound import captured
from leakbound.cli import main
from leakbound.randomness import normal, stream, uniform

SHAPE, RATE = (1, 6, 6), 0.1
CODE = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 4))
"""


def model():
    names = {}
    exec(CODE, names)
    return names["build"]()


def change():
    """What one step of SGD on one example changes."""
    own = model()
    image = uniform((1, *SHAPE), stream(0, "skipped"))
    nn.functional.cross_entropy(own(image), torch.tensor([2])).backward()
    return {k: -RATE * p.grad for k, p in own.named_parameters()}


def spoiled(value):
    return {k: torch.full_like(v, value) for k, v in change().items()}


def full_rank():
    return {k: normal(v.shape, stream(0, "rank")) for k, v in change().items()}


def renamed():
    found = change()
    found["9.weight"] = found.pop("3.weight")
    return found


BAD = {
    "nan": (lambda: spoiled(torch.nan), 1, "NaN or infinite values in every tensor"),
    "inf": (lambda: spoiled(torch.inf), 1, "NaN or infinite values in every tensor"),
    "zeros": (lambda: spoiled(0.0), 1, "is zero in every tensor"),
    "keys": (renamed, 1, "9.weight (4, 16) is not in the model"),
    "no examples": (change, 0, "the metadata give examples as '0'"),
    "full rank": (full_rank, None, "batch size is not known"),
}


def recorded(folder, *bad):
    """A round: client 1 is sound, the others are not."""
    before = model().state_dict()
    rows = [(change, 1), *(BAD[name][:2] for name in bad)]
    for client, (update, count) in enumerate(rows, 1):
        about = {"round": 1, "client": client, "kind": "delta"}
        about |= {} if count is None else {"examples": count}
        captured.write(folder, before, update(), about)
    return folder


def attacked(folder, **given):
    skipped = []
    found = captured.load_all(folder, skipped=skipped)
    specs = captured.run.plans.Spec("linear_inversion")
    settings = captured.Settings(SHAPE, attacks=(specs,))
    output = captured.Output(given.pop("out", None))
    return captured.attack_all(found, model(), settings, output=output, skipped=skipped, **given)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_client_is_skipped_and_the_other_is_certified(name, tmp_path):
    found = attacked(recorded(tmp_path / "seen", name))
    (record,) = found.records
    assert record.verdict == "exposed (certified)"
    (lost,) = found.skipped
    assert lost.name == "round-0001/client-2.safetensors"
    assert BAD[name][2] in lost.reason


def test_the_report_and_run_json_say_what_was_skipped(tmp_path):
    found = attacked(recorded(tmp_path / "seen", *BAD), out=tmp_path / "run")
    notes = json.loads((tmp_path / "run" / "run.json").read_text())["notes"]
    assert notes == [str(one) for one in found.skipped]
    assert len(notes) == len(BAD)
    page = found.page.read_text("utf-8")
    assert "Not every captured update was attacked" in page
    for number in range(2, len(BAD) + 2):
        assert f"round-0001/client-{number}.safetensors is not attacked" in page


def test_a_round_of_bad_clients_alone_is_an_error(tmp_path):
    folder = recorded(tmp_path / "seen", "keys", "no examples")
    (folder / "round-0001" / "client-1.safetensors").unlink()
    with pytest.raises(ValueError, match="none of 2 updates can be attacked: round-0001/client-2"):
        attacked(folder)
    (folder / "round-0001" / "client-2.safetensors").unlink()
    with pytest.raises(ValueError, match=r"^client-3.safetensors: the metadata give examples"):
        attacked(folder)


def test_without_a_list_for_them_bad_files_are_errors(tmp_path):
    folder = recorded(tmp_path / "seen", "keys")
    (folder / "round-0001" / "client-2.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match="not a valid safetensors file"):
        captured.load_all(folder)


def test_the_command_line_attacks_the_others_and_says_why(tmp_path, monkeypatch, capsys):
    (tmp_path / "skipping_model.py").write_text(CODE)
    recorded(tmp_path / "seen", "zeros", "no examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    words = ["attack", "--update", "seen", "--model", "skipping_model:build"]
    words += ["--input-shape", "1,6,6", "--attack", "linear_inversion"]

    def code():
        with pytest.raises(SystemExit) as ended:
            main(words)
        return ended.value.code

    assert code() == 3
    told = capsys.readouterr()
    assert "2 of 3 updates could not be attacked" in told.out
    assert "client-2.safetensors is not attacked" in told.err
    assert "client-3.safetensors is not attacked: the metadata give examples" in told.err
    (tmp_path / "seen" / "round-0001" / "client-1.safetensors").unlink()
    assert code() == 2
    assert "none of 2 updates" in capsys.readouterr().err.replace("\n", " ")
    sys.modules.pop("skipping_model")
