"""Which tests are long is measured, not listed by hand."""

import json
from types import SimpleNamespace

import pytest


@pytest.fixture
def module(pytestconfig):
    return pytestconfig.pluginmanager.get_plugin(str(pytestconfig.rootpath / "conftest.py"))


@pytest.fixture
def recorder(module, monkeypatch, tmp_path):
    """What records durations, into a file of this test."""
    file = tmp_path / "tests" / "durations.json"
    file.parent.mkdir()
    file.write_text('{"gone.py": 9.0}')
    (tmp_path / "a.py").touch()
    monkeypatch.setattr(module, "DURATIONS", file)
    return module._Durations()


def _recorded(recorder, tmp_path, *reports):
    for nodeid, when, seconds in reports:
        report = SimpleNamespace(nodeid=nodeid, when=when, passed=True, duration=seconds)
        recorder.pytest_runtest_logreport(report)
    recorder.pytest_sessionfinish(SimpleNamespace(config=object()))
    return json.loads((tmp_path / "tests" / "durations.json").read_text())


def test_a_slow_call_is_long_and_a_slow_fixture_makes_its_file_long(recorder, tmp_path):
    calls = [("a.py::slow", "call", 1.5), ("a.py::quick", "call", 0.9), ("a.py::slow", "setup", 0)]
    fixture = [("b.py::first", "setup", 3.0), ("b.py::second", "setup", 0.0)]
    assert _recorded(recorder, tmp_path, *calls, *fixture) == {"a.py::slow": 1.5, "b.py": 3.0}


def test_what_is_long_stays_so_until_it_is_clearly_quicker(recorder, tmp_path):
    _recorded(recorder, tmp_path, ("a.py::x", "call", 1.1), ("a.py::y", "call", 1.1))
    recorder.seconds.clear()
    kept = _recorded(recorder, tmp_path, ("a.py::x", "call", 0.8), ("a.py::z", "call", 0.8))
    assert kept == {"a.py::x": 0.8, "a.py::y": 1.1}
    recorder.seconds.clear()
    assert _recorded(recorder, tmp_path, ("a.py::x", "call", 0.6)) == {"a.py::y": 1.1}


def test_several_processes_begin_with_the_files_that_take_longest(module):
    def item(nodeid, *marks):
        return SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda name: name in marks)

    items = [item(f"many.py::{number}") for number in range(9)]
    items += [item("one.py::long"), item("fixture.py::a"), item("slow.py::a", "slow")]
    long = {"one.py::long": 5.0, "fixture.py": 2.0, "slow.py::a": 99.0, "gone.py::a": 9.0}
    items.sort(key=module._file_seconds(long, items), reverse=True)
    order = list(dict.fromkeys(each.nodeid.partition("::")[0] for each in items))
    assert order == ["one.py", "fixture.py", "many.py", "slow.py"]
