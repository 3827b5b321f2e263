"""The count of tokens, which bounds the package's size."""

import importlib.util
from pathlib import Path

PATH = Path(__file__).parents[1] / "tools" / "size.py"


def _tool():
    spec = importlib.util.spec_from_file_location("size", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_only_code_counts():
    tool = _tool()
    plain = "def f(a):\n    return a\n"
    explained = 'def f(a):\n    """What it does.\n\n    More.\n    """\n\n    # why\n    return a\n'
    assert tool.count(plain) == tool.count(explained) == (8, 2)
    assert tool.count("x = '''a\nb'''\n") == (3, 2)


def test_a_package_over_the_limit_fails(monkeypatch, capsys, tmp_path):
    tool = _tool()
    (tmp_path / "a.py").write_text("x = 1\n" * 200_000)
    monkeypatch.setattr(tool, "PACKAGE", tmp_path)
    assert tool.main() == 1
    assert "600,000 tokens; pyproject.toml allows" in capsys.readouterr().out
    (tmp_path / "a.py").write_text("x = 1\n")
    assert tool.main() == 0
