"""Some seconds of malformed files (`make fuzz` takes an hour), and that a fault would be found."""

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def targets():
    spec = importlib.util.spec_from_file_location("fuzz_targets", HERE / "targets.py")
    module = sys.modules["fuzz_targets"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_some_seconds(targets, tmp_path):
    found = targets.fuzz(tmp_path, 15.0, seed=1)
    assert not found.faults, "\n".join(
        f"{f.target} {f.number}: {f.trace}" for f in found.faults[:5]
    )
    assert min(found.counts.values()) >= 20
    assert all(found.read[name] < found.counts[name] for name in found.counts)  # damage is damage


def test_valid_files_are_read_and_a_fault_is_found(targets, tmp_path):
    for name, form in targets.formats(tmp_path).items():
        read, trace = targets.attempt(form, tmp_path / name, form.files[form.damaged])
        assert read, (name, trace)
    broken = targets.one("x", b"12", lambda path: 1 / (int(path.read_bytes()) - 12))
    assert "ZeroDivisionError" in targets.attempt(broken, tmp_path / "own", b"12")[1]
    silent = targets.one("x", b"", lambda path: (_ for _ in ()).throw(ValueError()))
    assert "without a message" in targets.attempt(silent, tmp_path / "own", b"")[1]
