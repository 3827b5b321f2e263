import math
import re

import pytest

from leakbound import audit, registry
from leakbound._util.files import MOST_TOML
from leakbound.assess.header import defense_parameters
from leakbound.audit.plan import DataSpec, Plan, Spec, refuse_large
from leakbound.defenses import DpSgd
from leakbound.registry import row_of


def refused(table, *words):
    with pytest.raises(ValueError) as caught:
        audit.parse(table)
    for word in words:
        assert word in str(caught.value)


CHANGES = [
    ({"attcks": []}, ["attcks", "did you mean 'attacks'"]),
    ({"attacks": [{"name": "linear_inverson"}]}, ["did you mean 'linear_inversion'"]),
    ({"attacks": [{"name": "idlg", "step": 3}]}, ["did you mean 'steps'"]),
    ({"attacks": [{"steps": 3}]}, ["has no name"]),
    ({"attacks": []}, ["names no attacks", "[[attacks]]"]),
    ({"attacks": {"name": "idlg"}}, ["[[attacks]]"]),
    ({"attacks": ["idlg"]}, ["[[attacks]]"]),
    ({"attacks": [{"name": "idlg"}, {"name": "idlg"}]}, ["attacks holds 'idlg' twice"]),
    ({"attacks": [{"name": "idlg", "steps": []}]}, ["idlg.steps is an empty list"]),
    ({"attacks": [{"name": "idlg", "steps": "many"}]}, ["idlg.steps is 'many'", "int"]),
    ({"attacks": [{"name": "idlg", "steps": True}]}, ["idlg.steps is True"]),
    ({"attacks": [{"name": "idlg", "steps": 2**63}]}, ["attacks.0.steps", "64 bits"]),
    ({"models": [{"name": "mlpp"}]}, ["did you mean 'mlp'"]),
    ({"models": [{"name": "mlp", "hiden": [3]}]}, ["did you mean 'hidden'"]),
    ({"models": [{"name": 3}]}, ["models.name is 3"]),
    ({"models": [{"name": "mlp", "train_steps": 1.5}]}, ["train_steps holds 1.5"]),
    ({"models": [{"name": "mlp", "train_steps": -1}]}, ["train_steps holds -1"]),
    ({"models": [{"name": "mlp", "train_steps": []}]}, ["train_steps is an empty list"]),
    ({"models": [{"name": "mlp", "weights": 3}]}, ["weights is 3", "str"]),
    ({"models": [{"name": "a:b", "x": float("nan")}]}, ["models.0.x is nan", "finite"]),
    ({"models": [{"name": "a:b", "x": {"y": 1}}]}, ["table {'y': 1}"]),
    ({"defenses": []}, ["defenses is empty"]),
    ({"defenses": [{"name": "none", "rate": 1}]}, ["'none' has no setting 'rate'"]),
    ({"defenses": [{"name": "gausian_noise"}]}, ["did you mean 'gaussian_noise'"]),
    ({"defenses": [{"name": "gaussian_noise", "noise_std": -1}]}, ["noise_std is -1.0"]),
    ({"defenses": [{"links": [], "name": "x"}]}, ["no key 'name'"]),
    ({"defenses": [{"links": []}]}, ["links is empty"]),
    ({"defenses": [{"links": ["clip"]}]}, ["[[defenses.links]]"]),
    (
        {"defenses": [{"links": [{"name": "mean"}, {"name": "clip_examples"}]}]},
        ["ClipExamples", "Mean()", "first"],
    ),
    ({"seeds": [-1]}, ["seeds holds -1"]),
    ({"seeds": [0, 0]}, ["seeds holds 0 twice"]),
    ({"seeds": [True]}, ["seeds holds True"]),
    ({"seeds": []}, ["seeds is empty"]),
    ({"batch_sizes": [0]}, ["batch_sizes holds 0"]),
    ({"batch_sizes": 1.5}, ["batch_sizes holds 1.5"]),
    ({"criterion": {"psnr": 0}}, ["psnr is 0"]),
    ({"criterion": {"psnr": 1e9}}, ["psnr is 1e+09; give decibels"]),
    ({"criterion": {"psrn": 20}}, ["did you mean 'psnr'"]),
    ({"criterion": 20}, ["[criterion]"]),
    ({"threat": {"server": "evil"}}, ["server is 'evil'"]),
    ({"threat": {"label_known": True}}, ["did you mean 'labels_known'"]),
    ({"threat": {"labels_known": 1}}, ["labels_known is 1"]),
    ({"data": {"sorce": "digits"}}, ["did you mean 'source'"]),
    ({"data": {"size": "big"}}, ["data.size is 'big'"]),
    ({"utility": {"rounds": -1}}, ["rounds is -1"]),
    ({"utility": {"round": 1}}, ["did you mean 'rounds'"]),
    ({"utility": {"learning_rate": 0}}, ["learning_rate is 0"]),
    ({"name": 3}, ["name is 3"]),
]


@pytest.mark.parametrize(("change", "words"), CHANGES, ids=lambda value: str(value)[:40])
def test_bad_values_are_named(table, change, words):
    refused(table | change, *words)


def test_lists_expand_but_list_valued_settings_do_not(table):
    table["models"] = [
        {"name": "mlp", "hidden": [64, 32], "activation": ["relu", "sigmoid"]},
        {"name": "some.module:build", "widths": [1, 2], "train_steps": [0, 5]},
    ]
    table["attacks"] = [{"name": "idlg", "steps": [5, 10], "restarts": 1}]
    table["defenses"] = [
        {
            "links": [
                {"name": "clip_examples", "clip_norm": [1, 2]},
                {"name": "mean"},
                {"name": "gaussian_mechanism", "noise_multiplier": [0.1, 1]},
            ]
        }
    ]
    plan = audit.parse(table)
    settings = [(dict(model.settings), model.train_steps) for model in plan.models]
    assert settings == [
        ({"activation": "relu", "hidden": (64, 32)}, 0),
        ({"activation": "sigmoid", "hidden": (64, 32)}, 0),
        ({"widths": (1, 2)}, 0),
        ({"widths": (1, 2)}, 5),
    ]
    assert [attack.parameters["steps"] for attack in plan.attacks] == [5, 10]
    chains = [[link.parameters for link in links] for links in plan.defenses]
    assert [(c[0]["clip_norm"], c[2]["noise_multiplier"]) for c in chains] == [
        (1.0, 0.1),
        (1.0, 1.0),
        (2.0, 0.1),
        (2.0, 1.0),
    ]
    assert len(plan.experiments()) == 4 * 2 * 4 * 2


def test_none_adds_no_link(table):
    clip = {"name": "clip", "clip_norm": 2}
    table["defenses"] = [{"name": "none"}, {"links": [{"name": "none"}, clip]}]
    plain, joined = audit.parse(table).defenses
    assert plain == ()
    assert [link.name for link in joined] == ["clip"]


def test_cell_ids(table):
    """They name every setting, not the place in the plan."""
    cells = audit.parse(table).experiments()
    assert len({cell.id for cell in cells}) == len(cells)
    assert cells[0].id == "6946942d21e5214e"
    moved = table | {"seeds": [5, 1, 0], "name": "other", "defenses": table["defenses"][::-1]}
    assert {cell.id for cell in cells} < {cell.id for cell in audit.parse(moved).experiments()}
    for change in (
        {"batch_sizes": [2]},
        {"criterion": {"psnr": 21}},
        {"threat": {"labels_known": False}},
        {"threat": {"defense_known": False}},
        {"threat": {"server": "malicious"}},
        {"models": [{"name": "mlp", "hidden": [17]}]},
        {"models": [{"name": "mlp", "hidden": [16], "train_steps": 1}]},
        {"models": [{"name": "mlp", "hidden": [16], "weights": "a.safetensors"}]},
        {"attacks": [{"name": "linear_inversion", "tolerance": 0.1}]},
        {"data": {"source": "digits", "limit": 100}},
        {"data": {"source": "digits", "size": 9}},
        {"seeds": [7]},
    ):
        others = {cell.id for cell in audit.parse(table | change).experiments()}
        assert not others & {cell.id for cell in cells}, change


def test_large_grids_are_refused_before_anything_of_them_is_made(table, monkeypatch):
    many = [i / 1000 for i in range(1, 1001)]
    row = {"name": "gradient_matching", "total_variation": many, "learning_rate": many[1:]}
    pair = [
        {"name": "magnitude_pruning", "rate": many},
        {"name": "gaussian_noise", "noise_std": many},
    ]
    settle = registry.settle

    def counted(entry, given):
        assert entry.kind not in ("defense", "attack"), f"{entry.name} is made"
        return settle(entry, given)

    monkeypatch.setattr(registry, "settle", counted)
    refused(table | {"attacks": [row], "seeds": list(range(50))}, "999000 attacks x 50 seeds")
    refused(table | {"defenses": [{"links": pair[1:] * 4}]}, f"{1000**4} defenses")
    table["seeds"] = [0]
    refused(table | {"defenses": [{"links": pair}]}, "defenses has 1000000 settings, more than")
    fields = {"name": "p", "data": DataSpec(), "models": (), "defenses": ((),)}
    with pytest.raises(ValueError, match="models is empty"):
        Plan(**fields, attacks=(Spec("idlg"),))


def test_files(tmp_path):
    def message(path):
        with pytest.raises(ValueError) as caught:
            audit.load(path)
        assert str(path) in str(caught.value)
        return str(caught.value)

    path = tmp_path / "plan.toml"
    assert "No such file" in message(path)
    assert "it is a folder" in message(tmp_path)
    path.write_bytes(b"name = \xff")
    assert "not UTF-8" in message(path)
    path.write_text("name = ?\n")
    assert re.search("not valid TOML: .*line 1", message(path))
    path.write_text("a = " + "[" * 5000)
    assert "not valid TOML" in message(path)
    path.write_text("a = " + "1" * 5000)
    assert "not valid TOML" in message(path)
    path.write_bytes(b"#" * (MOST_TOML + 1))
    assert "over 4194304 bytes" in message(path)
    path.write_text('day = 2020-01-01\n[[models]]\nname="mlp"')
    with pytest.raises(ValueError, match="no key 'day'"):
        audit.load(path)
    path.write_text('[[models]]\nname="a:b"\nday = 2020-01-01\n[[attacks]]\nname="idlg"')
    with pytest.raises(ValueError, match=r"models.0.day is 2020-01-01"):
        audit.load(path)
    path.write_bytes(b'\xef\xbb\xbf[[models]]\nname = "mlp"\n[[attacks]]\nname = "idlg"\n')
    assert audit.load(path).name == "plan"


def test_a_grid_that_is_too_large_is_refused_by_its_lengths():
    words = "2000 attacks x 1000 seeds = 2000000 experiments, more than 1000000; split it"
    with pytest.raises(ValueError, match=words):
        refuse_large({"attacks": 2000, "seeds": 1000})


def test_links_of_one_name_are_told_apart_by_their_place():
    clip = Spec("clip", (("clip_norm", 1.0),))
    assert defense_parameters((clip,)) == {"clip_norm": 1.0}
    found = defense_parameters((clip, clip, Spec("mean", (("a", 2),))))
    assert found == {"clip[0].clip_norm": 1.0, "clip[1].clip_norm": 1.0, "mean.a": 2}


def test_a_defense_is_written_as_the_links_of_its_chain():
    links = row_of("defense", DpSgd(1.0, 0.5))["links"]
    assert [link["name"] for link in links] == ["clip_examples", "mean", "gaussian_mechanism"]


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("optimizer=adam,steps=3", {"optimizer": "adam", "steps": 3}),
        ("a=true,b=inf,c=nano", {"a": True, "b": math.inf, "c": "nano"}),
        ('word="x=y,z"', {"word": "x=y,z"}),
        ("many=[1, 2], last = one_step", {"many": [1, 2], "last": "one_step"}),
    ],
)
def test_words_in_settings_need_no_quotes(text, settings):
    assert row_of("attack", f"some,{text}") == {"name": "some", **settings}


def test_settings_that_are_no_settings():
    with pytest.raises(ValueError, match="write settings as in attack NAME"):
        row_of("attack", "some,key=one two")
