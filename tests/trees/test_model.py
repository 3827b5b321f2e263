"""Reading XGBoost's JSON: what XGBoost wrote is read as XGBoost reads it; damage is named."""

import copy
import json
import random
import subprocess
import sys

import numpy as np
import pytest
import xgboost
from safetensors.numpy import save_file
from sklearn.datasets import load_breast_cancer

from leakbound import trees

ROWS, LABELS = load_breast_cancer(return_X_y=True)
ROWS = ROWS.astype(np.float32)


def train(rows=ROWS[:200], labels=LABELS[:200], rounds=3, names=None, **given):
    settings = {"objective": "binary:logistic", "eta": 0.1, "max_depth": 6, "nthread": 1}
    data = xgboost.DMatrix(rows, label=labels, feature_names=names)
    return xgboost.train({**settings, **given}, data, rounds)


@pytest.fixture(scope="module")
def valid():
    return json.loads(train().save_raw("json"))


def part(model):
    return model["learner"]["gradient_booster"]["model"]


def encoded(model):
    return json.dumps(model).encode()


@pytest.mark.parametrize("method", ["hist", "exact", "approx"])
def test_every_row_reaches_the_leaf_that_xgboost_names(method):
    booster = train(tree_method=method, rounds=20, gamma=0.5)
    held = ROWS.copy()
    held[::3, ::2] = np.nan  # default directions
    wanted = booster.predict(xgboost.DMatrix(held), pred_leaf=True).astype(int)
    found = trees.revealed(trees.read(bytes(booster.save_raw("json")))).leaves(held)
    assert (found == wanted).all()


def test_a_model_is_read_from_every_kind_of_file(tmp_path, valid):
    raw, path = encoded(valid), tmp_path / "model.json"
    train().save_model(path)
    bytes_ = np.frombuffer(raw, np.uint8)
    np.savez(tmp_path / "m.npz", bytes_)
    save_file({"0": bytes_}, tmp_path / "m.safetensors")
    sources = (
        raw,
        path,
        tmp_path / "m.npz",
        tmp_path / "m.safetensors",
        encoded(part(valid)["trees"]),
    )
    read = [trees.read(source) for source in sources]
    assert all(a.same(b) for m in read for a, b in zip(m.trees, read[0].trees, strict=True))
    assert (read[1].objective, read[1].features, read[1].first) == ("binary:logistic", 30, 1)
    assert read[1].base_score == (pytest.approx(LABELS[:200].mean()),)
    assert trees.read(b"").trees == ()
    assert (
        trees.read(bytes(train(names=[f"c{i}" for i in range(30)]).save_raw("json"))).name(4)
        == "c4"
    )


def test_reading_needs_neither_xgboost_nor_torch(tmp_path):
    train().save_model(tmp_path / "m.json")
    code = (
        "import sys; from leakbound import trees; m = trees.read(sys.argv[1]); trees.revealed(m);"
        "print(len(m.trees), {'torch', 'xgboost', 'scipy'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "m.json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "3 set()"


def put(path, value):
    """A change of one place: `0.left_children.1` of the trees, or a path from the root."""

    def change(model):
        place = model if path.startswith("learner") else part(model)["trees"]
        *above, last = path.split(".")
        for key in above:
            place = place[int(key) if isinstance(place, list) else key]
        if value is DROP:
            del place[int(last) if isinstance(place, list) else last]
        else:
            place[int(last) if isinstance(place, list) else last] = value

    return change


DROP = object()
MODEL = "learner.gradient_booster.model"
DAMAGES = [
    ("learner", DROP, "has no learner.gradient_booster.name"),
    (
        "learner.gradient_booster.name",
        "gblinear",
        "booster 'gblinear', a linear model without trees; attack its",
    ),
    (f"{MODEL}.trees", DROP, "has no trees"),
    (f"{MODEL}.trees", {}, "holds trees as dict, not as list"),
    (f"{MODEL}.gbtree_model_param.num_trees", "4", "holds 3 trees, but says 4"),
    (f"{MODEL}.gbtree_model_param.num_trees", "-1", "as '-1', which is no count"),
    (f"{MODEL}.iteration_indptr", [0, 9], "no numbers of trees"),
    (f"{MODEL}.tree_info", [0, 0], r"says 3 \(tree_info: 2\)"),
    (f"{MODEL}.tree_info", [0, 0, "x"], "no numbers of trees"),
    ("learner.learner_model_param.num_feature", "x", "num_feature as 'x', which is no count"),
    ("learner.learner_model_param.num_feature", "9" * 5000, "which is no count"),
    ("learner.learner_model_param.num_feature", "3", "feature that is none of 3"),
    ("learner.learner_model_param.base_score", "[nan]", "'nan', which is no finite number"),
    ("learner.feature_names", ["a"], "names 1 features of 30"),
    ("0.left_children", DROP, "tree 0 that has no list left_children"),
    ("0.left_children.0", 999, "a child that is none of its"),
    ("0.left_children.0", -1, "a child that is none of its"),
    ("0.left_children.0", 1.5, "a child that is none of its"),
    ("1.left_children.1", 0, "tree 1 that has a child that is none"),
    ("1.left_children.1", 1, "tree 1 that reaches a node twice"),
    ("1.left_children.0", 2, "tree 1 that reaches a node twice"),
    ("2.sum_hessian", [1.0], r"tree 2 that has 1 sum_hessian for \d+ nodes"),
    ("2.split_conditions.0", float("nan"), "no finite number"),
    ("2.split_conditions.0", 1e300, "no finite number"),
    ("2.base_weights.0", "many", "base_weights that are no list of numbers"),
    ("2.split_conditions", [[1.0]], "split_conditions that are no list of numbers"),
    ("2.split_indices.0", -3, "feature that is none of 30"),
    ("0.split_type.0", 1, "splits by categories, which is not read; train with one-hot"),
    ("0.tree_param.size_leaf_vector", "3", "size_leaf_vector 3; at most 1 is read"),
    ("0.tree_param.num_nodes", "900", "num_nodes 900; at most"),
    ("0", 7, "tree 0 that has no list left_children"),
]


@pytest.mark.parametrize(("path", "value", "words"), DAMAGES)
def test_a_damaged_model_is_named(valid, path, value, words):
    model = copy.deepcopy(valid)
    put(path, value)(model)
    with pytest.raises(ValueError, match=words) as caught:
        trees.read(encoded(model))
    assert "; " in str(caught.value)


def kept(given, data=None, rounds=2):
    """A model that XGBoost saves under these settings."""
    rows = xgboost.DMatrix(*(data or load_breast_cancer(return_X_y=True)))
    return json.loads(bytes(xgboost.train(given, rows, rounds).save_raw("json")))


def test_boosters_that_are_not_read_get_a_mend_that_helps():
    """ "Save the model again" helps none of them."""
    logistic = {"objective": "binary:logistic", "nthread": 1}
    dart = kept({**logistic, "booster": "dart", "rate_drop": 0.5})
    with pytest.raises(ValueError, match=r"dart.*scales trees.*give the list learner") as caught:
        trees.read(encoded(dart))
    assert "save the model again" not in str(caught.value)
    made = dart["learner"]["gradient_booster"]["gbtree"]["model"]["trees"]
    seen = trees.revealed(trees.read(json.dumps(made).encode()))  # as it says
    assert seen.thresholds
    assert not seen.counts
    linear = kept({**logistic, "booster": "gblinear"})
    with pytest.raises(ValueError, match=r"gblinear.*linear model without trees") as caught:
        trees.read(encoded(linear))
    assert "save the model again" not in str(caught.value)
    assert len(linear["learner"]["gradient_booster"]["model"]["weights"]) == 31  # as it says


def test_leaves_of_vectors_get_a_mend_that_helps():
    rows, labels = load_breast_cancer(return_X_y=True)
    both = rows, np.stack([labels, 1 - labels], 1)
    given = {"objective": "binary:logistic", "tree_method": "hist", "nthread": 1}
    vectors = kept({**given, "multi_strategy": "multi_output_tree"}, both)
    with pytest.raises(ValueError, match=r"vector in each leaf.*one_output_per_tree") as caught:
        trees.read(encoded(vectors))
    assert "save the model again" not in str(caught.value)
    assert trees.read(encoded(kept({**given, "multi_strategy": "one_output_per_tree"}, both))).trees


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (bytes(train().save_raw("ubj")), "is UBJ, which is not read; .*save_model"),
        (b"\x80\x04\x95", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"[]", "a list without trees"),
        (b"7", "has no learner"),
        (b" " * (2**26 + 1), "has over 67,108,864 bytes"),
    ],
)
def test_what_is_no_model_is_named(content, words):
    with pytest.raises(ValueError, match=words):
        trees.read(content)


def test_a_file_that_is_none_is_named(tmp_path):
    np.savez(tmp_path / "floats.npz", np.ones(3))
    for path, words in ((tmp_path, "it is a folder"), (tmp_path / "no", "does not exist")):
        with pytest.raises(ValueError, match=words):
            trees.read(path)
    with pytest.raises(ValueError, match="no single array of bytes"):
        trees.read(tmp_path / "floats.npz")
    (tmp_path / "large.json").write_bytes(b" " * 101)
    with pytest.raises(ValueError, match="over 100 bytes"):
        trees.read(tmp_path / "large.json", most=100)


ODD = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    1e308,
    -1.5,
    float("nan"),
    "",
    "x",
    "[]",
    [],
    {},
    [[]],
    "1" * 5000,
)


def mutate(model, source):
    """One random change: of a byte, or of a value anywhere in the JSON."""
    if source.random() < 0.4:
        raw = bytearray(encoded(model))
        for _ in range(source.randint(1, 3)):
            raw[source.randrange(len(raw))] = source.randrange(256)
        return bytes(raw)
    model = copy.deepcopy(model)
    place = model
    while True:
        keys = [*place] if isinstance(place, dict) else [*range(len(place))]
        key = source.choice(keys)
        if not isinstance(place[key], dict | list) or not place[key] or source.random() < 0.15:
            break
        place = place[key]
    if source.random() < 0.2:
        del place[key]
    else:
        place[key] = source.choice(ODD)
    return encoded(model)


@pytest.mark.parametrize("seed", range(4))
def test_random_mutations_give_a_result_or_a_value_error(valid, seed):
    source, ends = random.Random(seed), {True: 0, False: 0}
    for _ in range(60):
        raw = mutate(valid, source)
        try:
            seen = trees.revealed(trees.read(raw))
            rows = (
                np.zeros((2, seen.model.features), np.float32) if seen.model.features < 99 else None
            )
            if rows is not None:
                seen.brackets(rows)
                trees.measured(seen, rows, np.ones_like(rows))
            ends[True] += 1
        except ValueError:
            ends[False] += 1
    assert min(ends.values()) > 15
