"""Small audits of every kind of data: series, masks, and tables with numbers as labels."""

import csv

import pytest
import torch

from leakbound import run_audit
from leakbound.data.schema import Schema

QUICK = {"defenses": ["none", "dp_sgd,noise_multiplier=5.0"], "seeds": [0]}


def ends(found):
    return {(one.attack.name, one.defense.name): one.end for one in found.assessments}


def test_series():
    attacks = ["linear_inversion", "inverting_gradients,steps=5"]
    found = run_audit("mlp,hidden=[16]", {"source": "ecg", "size": 32}, attacks=attacks, **QUICK)
    own = ends(found)
    assert "failed" not in own.values()
    assert own["linear_inversion", "none"] == "exposed"
    assert found.assessments[0].criterion.metric == "snr"
    assert "dp_sgd" in {one.defense.name for one in found.assessments if one.bounds}


def test_masks():
    data = {"source": "photo_masks", "size": 16, "limit": 400}
    attacks = ["inverting_gradients,steps=2"]
    own = ends(run_audit("unet,width=4", data, attacks=attacks, **QUICK))
    assert own.keys() == {("inverting_gradients", "none"), ("inverting_gradients", "dp_sgd")}
    assert not {"failed", "not_applicable"} & set(own.values())


@pytest.mark.parametrize(("loss", "rows"), [("mse", 600), ("l1", 600), ("mse", 60)])
def test_a_table_with_numbers_as_labels(tmp_path, loss, rows):
    """One row is exposed: by chance hardly, and with too few decoys by its certificate."""
    draws = torch.rand(rows, 4, generator=torch.Generator().manual_seed(1)).tolist()
    with (tmp_path / "t.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["a", "b", "kind", "cost"])
        writer.writerows([x, 10 * y, "uvw"[int(3 * z)], f"{x + y + w:.4f}"] for x, y, z, w in draws)
    text = Schema.infer(tmp_path / "t.csv", target="cost").text()
    (tmp_path / "t.toml").write_text(text.replace("confirmed = false", "confirmed = true"))
    data = {"source": str(tmp_path / "t.csv"), "loss": loss}
    found = run_audit("mlp,hidden=[24]", data, attacks=["linear_inversion"], **QUICK)
    plain, noisy = found.assessments
    assert (plain.status, noisy.status) == ("ok", "ok")
    assert plain.scores == (100.0,)
    assert (plain.chance.p_value is None) == (rows == 60)
    assert "outer product" in plain.certificate
    assert (plain.verdict, plain.matched) == ("exposed", (True,))
    assert noisy.certificate is None
    assert noisy.verdict != "exposed"
    assert plain.model.loss == loss
