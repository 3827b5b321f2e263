"""Is it this person? After an audit, from the reconstructions that the run stores."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from leakbound import audit
from leakbound._util import files
from leakbound._util.intervals import clopper_pearson
from leakbound.assess.measure import strip
from leakbound.audit import reidentification
from leakbound.bounds.knowledge import naming_success
from leakbound.cli import main
from leakbound.randomness import stream, uniform
from leakbound.report import folder as folders
from leakbound.report.tables import RunSummary

ATTACKS = ["linear_trap"]
TAIL = 0.0005
MATCHER = """import torch

def match(reconstructions, candidates):
    return -torch.cdist(reconstructions.flatten(1), candidates.flatten(1))

def embed(images):
    return images.flatten(1) - images.flatten(1).mean(1, keepdim=True)

def broken(reconstructions, candidates):
    raise KeyError("weights")
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Digits, each alone in an update and four of them, without noise and with three noises."""
    out = tmp_path_factory.mktemp("who") / "run"
    defenses = ["none", *(f"dp_sgd,noise_multiplier={noise}" for noise in (0.1, 1.0, 4.0))]
    audit.run_audit(
        "mlp,hidden=[16]",
        "digits",
        attacks=ATTACKS,
        defenses=defenses,
        batch_sizes=[1, 4],
        seeds=range(12),
        threat=audit.parse(
            {
                "models": [{"name": "mlp"}],
                "attacks": [{"name": "linear_trap"}],
                "threat": {"server": "malicious"},
            }
        ).threat,
        error_bound="none",
        out=out,
    )
    return out


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module with the user's functions."""
    (tmp_path / "my_faces.py").write_text(MATCHER)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_faces"


def _rows(run):
    rows = RunSummary(folders.read(run)).configurations
    return {(row.defense.rpartition("=")[2], row.batch_size): row.identified for row in rows}


def test_an_audit_names_people_until_noise_hides_them(run):
    rows = _rows(run)
    alone = rows["no defense", 1]
    assert (alone.share.hits, alone.share.n, alone.bound) == (12, 12, None)
    assert alone.beyond_chance
    assert alone.chance == pytest.approx(1 / alone.candidates)
    for noise in (0.1, 1.0, 4.0):
        for size in (1, 4):
            row = rows[f"{noise:g}", size]
            assert naming_success(row.candidates, noise) <= row.bound + 1e-9
            assert clopper_pearson(row.share.hits, row.share.n, TAIL)[0] <= row.bound
    assert rows["0.1", 1].beyond_chance
    assert not rows["4", 4].beyond_chance


def test_galleries_are_the_same_for_every_attack_and_defense_of_a_seed(run):
    """So that shares compare; nothing of them depends on the reconstruction."""
    near = {}
    for own in folders.read(run).assessments:
        near.setdefault((own.seed, own.batch_size), set()).add(
            (own.reidentified[0].near, own.reidentified[0].candidates)
        )
    assert all(len(one) == 1 for one in near.values())


def test_stored_pictures_give_the_same_answers(run):
    """They hold 256 levels, which cost no name."""
    before = {a.experiment: a.reidentified for a in folders.read(run).assessments}
    records = files.read(run / "records.jsonl")
    found = audit.reidentify_run(run, "nearest")
    assert found.keys() == before.keys()
    assert files.read(run / "records.jsonl") == records
    told = [own.reidentified for own in folders.read(run).assessments]
    assert all([one.matcher for one in some] == ["edges", "nearest"] for some in told)
    differ = total = 0
    for name, match in found.items():
        first = before[name][0]
        assert (first.candidates, first.near) == (match.candidates, match.near)
        assert (first.noise_multiplier, first.bound) == (match.noise_multiplier, match.bound)
        differ += sum(a != b for a, b in zip(first.right, match.right, strict=True))
        total += len(match.right)
    assert differ <= 0.05 * total


def test_the_command_takes_a_matcher_or_an_embedding(run, mine, capsys):
    def call(*words):
        with pytest.raises(SystemExit) as stopped:
            main(["reidentify", str(run), *words])
        return stopped.value.code, capsys.readouterr()

    code, said = call("--matcher", f"{mine}:match", "--candidates", "20")
    text = " ".join(said.out.split())
    assert code == 0, said.err
    assert "12 of 12 named right among 20 candidates" in text
    assert f"the matcher {mine}:match" in text
    code, said = call("--embedding", f"{mine}:embed")
    assert code == 0
    assert f"the matcher {mine}:embed" in " ".join(said.out.split())
    lines = [json.loads(line) for line in (run / "reidentified.jsonl").read_text().splitlines()]
    assert len(lines) == 96
    names = {one["matcher"] for one in lines[0]["found"]}
    assert {f"{mine}:match", f"{mine}:embed"} <= names
    page = (run / "report.html").read_text()
    assert "Is it this person?" in page
    assert f"{mine}:embed" in page
    for words, part in [
        (("--matcher", f"{mine}:broken"), f"matcher '{mine}:broken'"),
        (("--matcher", "edges", "--embedding", f"{mine}:embed"), "give one"),
        (("--matcher", f"{mine}:missing"), "has no 'missing'"),
    ]:
        code, said = call(*words)
        assert code == 2
        assert part in " ".join(said.err.split())


@pytest.mark.parametrize("channels", [1, 3])
def test_a_strip_is_read_as_it_was_written(tmp_path, channels):
    images = uniform((3, channels, 5, 4), stream(0, "strip"))
    name, content = strip(2 * images - 1, (-1.0, 1.0))
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / name).write_bytes(content)
    context = SimpleNamespace(
        input_shape=(channels, 5, 4), domain=SimpleNamespace(input_range=(-1.0, 1.0))
    )
    own = SimpleNamespace(pictures={"reconstruction": name})
    read = reidentification._reconstructions(tmp_path, own, context)
    assert read.shape == images.shape
    assert float((read - (2 * images - 1)).abs().max()) <= 1 / 255 + 1e-6
    (tmp_path / "pictures" / name).write_bytes(b"other")
    with pytest.raises(ValueError, match="missing or damaged"):
        reidentification._reconstructions(tmp_path, own, context)


def test_a_run_without_pictures_is_refused(tmp_path):
    out = tmp_path / "run"
    settings = {"attacks": ["linear_inversion"], "seeds": [0], "out": out, "pictures": False}
    audit.run_audit("mlp,hidden=[16]", "digits", **settings)
    own = folders.read(out).assessments[0]
    assert [one.matcher for one in own.reidentified] == ["nearest", "edges"]
    with pytest.raises(ValueError, match="stores no reconstructed images"):
        audit.reidentify_run(out, "nearest")


def test_rows_of_a_table_are_named_too():
    """The domain's own distance says which row is nearest; there are no edges."""
    found = audit.run_audit(
        "mlp,hidden=[16]", "german", attacks=["linear_inversion"], seeds=[0], error_bound="none"
    )
    own = folders.read(found.folder).assessments[0]
    assert [(one.matcher, one.right) for one in own.reidentified] == [("nearest", (True,))]


def test_another_picture_of_the_person_names_them(tmp_path, capsys):
    """Four pictures of each of sixty persons; one is in the update, another in the gallery."""
    source = np.random.default_rng(0)
    for person in range(60):
        folder = tmp_path / "images" / f"P{person:02}" / ("ill" if person % 2 else "well")
        folder.mkdir(parents=True)
        own = source.integers(40, 215, (8, 8))
        for number in range(4):
            pixels = own + source.integers(-30, 30, (8, 8))
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    out = tmp_path / "run"
    plan = {
        "models": [{"name": "mlp", "hidden": [16]}],
        "attacks": [{"name": "linear_inversion"}],
        "data": {"source": f"folder:{tmp_path / 'images'}", "person": "outer_folder"},
        "seeds": [*range(8)],
        "error_bound": {"kind": "none"},
    }
    audit.run_audit(audit.parse(plan), out=out)
    found = audit.reidentify_run(out, "nearest", by_person=True)
    assert {(one.by_person, one.right) for one in found.values()} == {(True, (True,))}
    # All others of the private and test parts have four pictures, too.
    assert min(one.candidates for one in found.values()) >= 20
    blind = audit.reidentify_run(out, lambda a, b: torch.zeros(len(a), len(b)), by_person=True)
    assert sum(one.right[0] for one in blind.values()) <= 3
    with pytest.raises(SystemExit):
        main(["reidentify", str(out), "--by-person"])
    assert "the matcher nearest by person" in " ".join(capsys.readouterr().out.split())
    kinds = {one.how for one in folders.read(out).assessments[0].reidentified}
    assert {"nearest", "edges", "nearest by person"} <= kinds


def test_by_person_needs_persons(run):
    with pytest.raises(ValueError, match="does not say who is who"):
        audit.reidentify_run(run, "nearest", by_person=True)
