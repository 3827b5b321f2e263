"""No page shows what only Python understands; the same content is the same bytes."""

import pytest
from jinja2 import UndefinedError

from leakbound.cli import main
from leakbound.report.template import environment_of


def rendered(text, **values):
    return environment_of().from_string(text).render(values)


@pytest.mark.parametrize("key", ["update", "items", "values", "copy", "keys", "pop"])
def test_an_entry_stands_before_a_method_of_its_dictionary(key):
    assert rendered("{{ row." + key + " }}", row={key: "mine"}) == "mine"


@pytest.mark.parametrize("text", ["{{ row.update }}", "{{ print }}", "{{ a.split }}"])
def test_what_is_a_function_is_refused(text):
    with pytest.raises(TypeError, match="a page would show"):
        rendered(text, row={}, print=print, a="b")


def test_what_is_not_there_is_refused():
    with pytest.raises(UndefinedError):
        rendered("{{ row.name }}", row={})


def test_evidence_of_a_captured_update_names_it_and_is_the_same_twice(tmp_path, make_captured):
    folder, pages = make_captured(tmp_path / "run"), []
    for place in ("one", "two"):
        with pytest.raises(SystemExit) as ended:
            main(["evidence", str(folder), "--out", str(tmp_path / place)])
        assert ended.value.code == 0
        names = ("evidence.html", "evidence-annex.html", "report.json")
        pages.append([(tmp_path / place / name).read_bytes() for name in names])
    assert pages[0] == pages[1]
    _, annex, _ = pages[0]
    assert not [one for one in pages[0] if b"built-in method" in one]
    assert annex.count(b">update<") >= 2
