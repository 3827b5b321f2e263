"""Names, settings and their types; third parties through entry points."""

from collections.abc import Sequence
from typing import Any, Literal

import pytest

from leakbound import registry
from leakbound.attacks import LinearInversion
from leakbound.randomness import stream
from leakbound.registry import Entry, build, entries, find, settle, snake, takes_list


@pytest.fixture(autouse=True)
def _fresh():
    entries.cache_clear()
    yield
    entries.cache_clear()


@pytest.mark.parametrize("kind", ["attack", "defense", "model"])
def test_every_entry_is_described_and_its_settings_have_defaults(kind):
    for name, entry in entries(kind).items():
        assert name == entry.name == snake(name)
        assert entry.summary.endswith((".", ":"))
        given = {p.name: p.default for p in entry.parameters}
        assert settle(entry, {k: v for k, v in given.items() if v is not None}) is not None


def test_nothing_but_entries_is_listed():
    assert not {"attack", "best_of", "chain", "defense", "infer_labels"} & {
        name for kind in registry.PACKAGES for name in entries(kind)
    }
    assert all(name in vars(package) for package in registry.PACKAGES.values()
               for name in registry.HIDDEN & set(package.__all__))  # fmt: skip


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("GaussianNoise", "gaussian_noise"), ("dlg", "dlg"), ("ResNet18", "res_net18")],
)
def test_snake(name, wanted):
    assert snake(name) == wanted


def test_unknown_names_and_settings_offer_the_closest():
    with pytest.raises(ValueError, match="attack 'dgl' is not known; did you mean 'dlg'"):
        find("attack", "dgl")
    with pytest.raises(ValueError, match="'dlg' has no setting 'step'; did you mean 'steps'"):
        settle(find("attack", "dlg"), {"step": 3})
    with pytest.raises(ValueError, match="has no setting 'generator'"):
        settle(find("model", "mlp"), {"generator": 3})


def some(
    a: int,
    b: float = 1.0,
    c: str = "x",
    d: bool = False,
    e: float | None = None,
    f: tuple[float, ...] = (),
    g: Sequence[int] = (),
    h: list[str] | None = None,
    i: Any = None,
    j: Literal["u", "v"] = "u",
    k: int | float = 1,
):
    """Something with settings."""
    return locals()


SOME = Entry("defense", "some", some)


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("b", 2, 2.0),
        ("e", 2, 2.0),
        ("e", None, None),
        ("f", [1, 2.5], (1.0, 2.5)),
        ("f", (), ()),
        ("g", [1, 2], (1, 2)),
        ("h", ["p"], ("p",)),
        ("h", None, None),
        ("i", [1, "x"], [1, "x"]),
        ("j", "v", "v"),
        ("k", 2, 2),
        ("d", True, True),
    ],
)
def test_values_take_the_type_of_the_setting(name, given, wanted):
    value = settle(SOME, {"a": 1, name: given})[name]
    assert value == wanted
    assert type(value) is type(wanted)
    if name == "f":
        assert all(type(x) is float for x in value)


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("a", "1", "int"),
        ("a", True, "int"),
        ("a", 1.0, "int"),
        ("a", None, "int"),
        ("a", [1, 2], "int"),
        ("b", True, "float"),
        ("b", "0.1", "float"),
        ("c", 1, "str"),
        ("d", 1, "bool"),
        ("e", "x", "float"),
        ("f", 1.0, "list"),
        ("g", "12", "list"),
        ("h", "p", "list"),
        ("k", "p", "int or float"),
    ],
)
def test_wrong_types_are_refused(name, given, words):
    with pytest.raises(ValueError) as error:
        settle(SOME, {"a": 1, name: given})
    assert str(error.value) == f"some.{name} is {given!r}; give a value of type {words}"


def test_wrong_items_of_a_list_are_named():
    with pytest.raises(ValueError, match=r"some.g\[1\] is 'x'; give a value of type int"):
        settle(SOME, {"a": 1, "g": [1, "x"]})


def test_a_missing_setting_is_named():
    with pytest.raises(ValueError, match="defense 'some' needs the setting 'a'"):
        settle(SOME, {})


def test_takes_list():
    assert [p.name for p in SOME.parameters if takes_list(SOME, p.name)] == ["f", "g", "h"]
    assert takes_list(find("model", "mlp"), "hidden")
    assert not takes_list(find("attack", "dlg"), "steps")
    assert not takes_list(SOME, "unheard_of")


def test_parameters_leave_out_what_the_audit_gives():
    shown = {p.name: (p.kind, p.default) for p in find("model", "mlp").parameters}
    assert shown == {"hidden": ("Sequence[int]", (128,)), "activation": ("str", "relu")}


def test_build():
    assert build("attack", "linear_inversion", {"tolerance": 1}) == LinearInversion(1.0)
    given = {"input_shape": (1, 4, 4), "classes": 3, "generator": stream(0)}
    model = build("model", "mlp", {"hidden": [8, 5]}, **given)
    assert [p.shape[0] for p in model.parameters()] == [8, 8, 5, 5, 3, 3]
    with pytest.raises(ValueError, match=r"noise_std is -1\.0"):
        build("defense", "gaussian_noise", {"noise_std": -1})


class Point:
    def __init__(self, name, thing):
        self.name, self.value, self._thing = name, f"other.package:{name}", thing

    def load(self):
        if isinstance(self._thing, Exception):
            raise self._thing
        return self._thing


def _install(monkeypatch, *points):
    def found(*, group):
        return points if group == "leakbound.defenses" else ()

    monkeypatch.setattr(registry, "entry_points", found)


def test_third_parties_are_found(monkeypatch):
    _install(monkeypatch, Point("theirs", some))
    assert build("defense", "theirs", {"a": 3})["a"] == 3
    assert list(entries("defense")) == sorted(entries("defense"))
    assert "theirs" not in entries("attack")


def test_a_clash_with_a_built_in_is_refused(monkeypatch):
    _install(monkeypatch, Point("clip", some))
    with pytest.raises(
        ValueError, match=r"'other.package:clip' calls itself 'clip', which is taken"
    ):
        entries("defense")


def test_two_third_parties_of_one_name_are_refused(monkeypatch):
    _install(monkeypatch, Point("theirs", some), Point("theirs", some))
    with pytest.raises(ValueError, match="calls itself 'theirs', which is taken"):
        entries("defense")


def test_a_broken_package_is_named(monkeypatch):
    _install(monkeypatch, Point("theirs", ImportError("No module named 'x'")))
    with pytest.raises(ValueError, match=r"'other.package:theirs' .* does not load: No module"):
        entries("defense")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("prior=digits.safetensors", "digits.safetensors"),
        ("prior=/home/me/a-b.safetensors", "/home/me/a-b.safetensors"),
        ("prior=my.module:build", "my.module:build"),
        ("prior=true", True),
        ("prior=1.5", 1.5),
        ("prior='with space'", "with space"),
    ],
)
def test_paths_need_no_quotes(text, value):
    assert registry.row_of("attack", f"learned_prior,{text}")["prior"] == value
