"""Faults change one line, compile, leave texts alone, and are found again where code has moved."""

import importlib.util
import sys
import textwrap
from pathlib import Path

spec = importlib.util.spec_from_file_location("faults", Path(__file__).with_name("faults.py"))
faults = importlib.util.module_from_spec(spec)
sys.modules["faults"] = faults
spec.loader.exec_module(faults)

TEXT = textwrap.dedent('''
    """A module: 1 + 1."""
    LIMIT = 3

    def area(a: int = 1, b: float = 2.0) -> float:
        """1 + 1 stays."""
        if a < 0 and b > 1:
            raise ValueError(f"{a} < 0 or {a + b}")
        total = a * b
        return min(total, 9).clamp(0, 1)

    class Shape:
        side = 4

        def twice(self):
            total = self.side + self.side
            return total
''')


def written(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text, "utf-8")
    return folder


def test_changes(tmp_path):
    path = written(tmp_path, shapes=TEXT) / "shapes.py"
    found = {(f.function, f.before, f.after) for f in faults.candidates(path, "shapes.py")}
    guard = "if a < 0 and b > 1:"
    message = 'raise ValueError(f"{a} < 0 or {a + b}")'
    answer = "return min(total, 9).clamp(0, 1)"
    assert found == {
        *(("area", guard, f"if {test}:") for test in ("a <= 0 and b > 1", "a < 0 and b >= 1")),
        *(("area", guard, f"if {test}:") for test in ("a < 1 and b > 1", "a < 0 and b > 0")),
        *(("area", guard, f"if {test}:") for test in ("a < 0 or b > 1", "False")),
        ("area", message, "pass"),
        ("area", "total = a * b", "total = a / b"),
        *(("area", answer, f"return {new}") for new in ("max(total, 9).clamp(0, 1)", "None")),
        *(("area", answer, f"return {new}") for new in ("min(total, 10).clamp(0, 1)",)),
        *(("area", answer, f"return min(total, 9){new}") for new in ("", ".clamp(1, 1)")),
        ("area", answer, "return min(total, 9).clamp(0, 0)"),
        ("Shape.twice", "total = self.side + self.side", "total = self.side - self.side"),
        ("Shape.twice", "return total", "return None"),
    }


def test_a_fault_is_found_where_its_code_has_moved(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    source = written(old, shapes=TEXT)
    sample = faults.sample(source, 4, seed=0)
    assert sample == faults.sample(source, 4, seed=0)
    # The function of another name is found by its line, which stands nowhere else.
    written(new, other="\n\n" + TEXT.replace("def area", "def _surface"), empty="")
    for fault, place in zip(sample, faults.locate(new, sample), strict=True):
        before = place.path.read_text("utf-8").split("\n")
        after = faults.put(fault, place).split("\n")
        changed = [at for at in range(len(before)) if before[at] != after[at]]
        assert changed == [place.line - 1]
        assert place.line in place.lines
    written(new, other=TEXT.replace("a * b", "b * a"), empty="")
    gone = faults.Fault("shapes.py", "area", "total = a * b", "total = a / b")
    assert faults.locate(new, [gone]) == [None]


def test_a_line_that_stands_in_two_places_is_not_guessed(tmp_path):
    fault = faults.Fault("shapes.py", "area", "total = a * b", "total = a / b")
    written(tmp_path, one=TEXT, two=TEXT)
    assert faults.locate(tmp_path, [fault]) == [None]
    written(tmp_path, two=TEXT.replace("def area", "def other"))
    assert faults.locate(tmp_path, [fault])[0].path.name == "one.py"
