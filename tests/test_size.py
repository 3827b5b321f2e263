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
    assert tool.count(plain) == (8, 2, 0, 2)
    assert tool.count(explained) == (8, 2, 1, 8)
    assert tool.count("x = '''a\nb'''\n") == (3, 2, 0, 2)


def test_a_package_over_a_limit_fails(monkeypatch, capsys, tmp_path):
    tool = _tool()
    file = tmp_path / "a.py"
    monkeypatch.setattr(tool, "PACKAGE", tmp_path)
    for source, fault in (
        ("x = 1  # why\n" * 200_000, "tokens (most_tokens)"),
        ("x = a + b + c + d + e + f + g  # why\n", "a line (most_tokens_a_line)"),
        ("x = 1\n", "(least_comments)"),
        ("x = 1  # why\n", ""),
    ):
        file.write_text(source)
        assert tool.main() == int(bool(fault)), source[:40]
        assert fault in capsys.readouterr().out
