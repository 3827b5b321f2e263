"""A model of 7 million weights: the command keeps to its limits, as the operating system counts."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.linux]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """64 images of 96 x 96, 8 steps of Adam, batch norm in training mode."""
    sys.path.append(str(BENCHMARKS))
    script = importlib.import_module("memory_and_time")
    folder = tmp_path_factory.mktemp("client")
    script.train(script.CLIENTS[0], folder)
    return script, folder


@pytest.mark.parametrize("gigabytes", [8, 3])
def test_a_large_model_ends_in_time_and_memory_with_its_page(client, gigabytes):
    script, folder = client
    limits = replace(script.CLIENTS[0], gigabytes=gigabytes)
    taken = script.attack(limits, folder)
    assert taken.first < 30  # s, with all imports, on a machine in use
    assert taken.seconds < limits.seconds + 15
    assert taken.peak < gigabytes * 1e9
    assert taken.page
    assert {fact.kind for one in taken.records for fact in one.facts} >= {"batch statistics"}
    searches = [one for one in taken.records if one.attack.name != "linear_inversion"]
    assert searches
    assert all("not run: its first step takes about" in one.reason for one in searches)


def test_a_search_that_saves_memory_stays_below_its_limit(client):
    """With 2 steps of 32 images: 16 GB by an engine, 3 GB by graphs that are computed again."""
    script, folder = client
    less = replace(script.CLIENTS[0], examples=32, steps=2, batch=32, seconds=200)
    limits = replace(less, gigabytes=4)
    taken = script.attack(
        limits, folder, "--attack", "inverting_gradients", "--labels", "0,1," * 15 + "0,1"
    )
    (record,) = taken.records
    assert record.status == "ok", record.reason
    assert "stopped early, after" in record.problem
    assert taken.peak < 4e9
    assert taken.seconds < limits.seconds + 15
