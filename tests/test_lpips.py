"""LPIPS: against sums over windows in numpy, its properties, and what it refuses to load."""

import hashlib
import json
import pickle

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.lib.stride_tricks import sliding_window_view
from safetensors.torch import save_file

from leakbound import audit, cli, evaluate, metrics
from leakbound._util.text import plain
from leakbound.assess import record
from leakbound.audit.context import check_plan
from leakbound.core import Batch
from leakbound.lpips import Lpips
from leakbound.pairing import Paired
from leakbound.report import write

from .metric_contract import check_metric

# Number of the layer among the features, outputs, side, stride, padding; "M3" is a max pool.
ALEX = [[(0, 64, 11, 4, 2)], ["M3", (3, 192, 5, 1, 2)], ["M3", (6, 384, 3, 1, 1)],
        [(8, 256, 3, 1, 1)], [(10, 256, 3, 1, 1)]]  # fmt: skip
VGG = [[(0, 64, 3, 1, 1), (2, 64, 3, 1, 1)],
       ["M2", (5, 128, 3, 1, 1), (7, 128, 3, 1, 1)],
       ["M2", (10, 256, 3, 1, 1), (12, 256, 3, 1, 1), (14, 256, 3, 1, 1)],
       ["M2", (17, 512, 3, 1, 1), (19, 512, 3, 1, 1), (21, 512, 3, 1, 1)],
       ["M2", (24, 512, 3, 1, 1), (26, 512, 3, 1, 1), (28, 512, 3, 1, 1)]]  # fmt: skip
NETS = {"alex": (ALEX, 31), "vgg": (VGG, 16)}


def random_state(net):
    """A state dict in the published form, with random weights."""
    rng = np.random.default_rng(5)
    state = {
        "scaling_layer.shift": np.array([-0.030, -0.088, -0.188]).reshape(1, 3, 1, 1),
        "scaling_layer.scale": np.array([0.458, 0.448, 0.450]).reshape(1, 3, 1, 1),
    }
    inputs = 3
    for number, part in enumerate(NETS[net][0]):
        for place, outputs, side, _, _ in (layer for layer in part if layer not in ("M2", "M3")):
            weight = rng.normal(size=(outputs, inputs, side, side)) * (inputs * side**2 / 2) ** -0.5
            state[f"net.slice{number + 1}.{place}.weight"] = weight
            state[f"net.slice{number + 1}.{place}.bias"] = 0.1 * rng.normal(size=outputs)
            inputs = outputs
        state[f"lin{number}.model.1.weight"] = rng.uniform(size=(1, inputs, 1, 1))
    return {name: torch.tensor(value, dtype=torch.float32) for name, value in state.items()}


def features(state, net, image):
    """The outputs of the five slices for one (3, H, W) image, each (C, H, W)."""
    x = (image - state["scaling_layer.shift"][0]) / state["scaling_layer.scale"][0]
    for number, part in enumerate(NETS[net][0]):
        for layer in part:
            if isinstance(layer, str):
                windows = sliding_window_view(x, (int(layer[1]),) * 2, axis=(1, 2))
                x = windows[:, ::2, ::2].max((3, 4))
                continue
            place, _, _, stride, padding = layer
            x = np.pad(x, ((0, 0), (padding, padding), (padding, padding)))
            weight, bias = (state[f"net.slice{number + 1}.{place}.{w}"] for w in ("weight", "bias"))
            windows = sliding_window_view(x, weight.shape[2:], axis=(1, 2))[:, ::stride, ::stride]
            x = np.einsum("oikl,ihwkl->ohw", weight, windows, optimize=True)
            x = np.maximum(x + bias[:, None, None], 0)
        yield x


def reference(state, net, a, b):
    """The distance of two (3, H, W) images in [-1, 1] by the paper's formula."""
    state = {name: value.double().numpy() for name, value in state.items()}
    total = 0.0
    both = zip(features(state, net, a), features(state, net, b), strict=True)
    for number, (x, y) in enumerate(both):
        x, y = (z / (np.sqrt((z**2).sum(0)) + 1e-10) for z in (x, y))
        weights = state[f"lin{number}.model.1.weight"][0]
        total += (weights * (x - y) ** 2).sum(0).mean()
    return total


@pytest.fixture(scope="module")
def states():
    return {net: random_state(net) for net in NETS}


@pytest.fixture(scope="module")
def files(states, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lpips")
    for net, state in states.items():
        save_file(state, folder / f"{net}.safetensors")
    return {net: folder / f"{net}.safetensors" for net in NETS}


@pytest.fixture(scope="module")
def alex(files):
    return Lpips.load(files["alex"])


def paired(truth, guess):
    return Paired(Batch(truth, torch.zeros(len(truth), dtype=torch.long)), guess, None, ())


def images(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("net", "size"), [("alex", (43, 35)), ("vgg", (16, 19))])
def test_values_are_those_of_the_formula(states, files, net, size):
    """In inputs of another range than [0, 1] too, and for a guess outside of it."""
    truth, noise = images(2, 3, *size), images(2, 3, *size, seed=1)
    guess = truth + 0.4 * (noise - 0.5)
    low, width = -3.0, 5.0
    found = Lpips.load(files[net]).distances(
        paired(low + width * truth, low + width * guess), data_range=width, low=low
    )
    for value, a, b in zip(found, guess.numpy(), truth.numpy(), strict=True):
        expected = reference(states[net], net, 2 * a - 1, 2 * b - 1)
        assert expected > 1e-3
        assert value == pytest.approx(expected, rel=1e-9)


def test_zero_for_equal_images_symmetric_and_alone_as_in_a_batch(alex):
    truth, guess = images(3, 3, 32, 32), images(3, 3, 32, 32, seed=1)
    assert alex.distances(paired(truth, truth), data_range=1.0) == [0.0] * 3
    there = alex.distances(paired(truth, guess), data_range=1.0)
    assert there == alex.distances(paired(guess, truth), data_range=1.0)
    assert min(there) > 0
    alone = alex.distances(paired(truth[1:2], guess[1:2]), data_range=1.0)
    assert alone == there[1:2]


def test_gray_images_are_repeated(alex):
    truth, guess = images(2, 1, 33, 40), images(2, 1, 33, 40, seed=1)
    gray = alex.distances(paired(truth, guess), data_range=1.0)
    color = [x.repeat(1, 3, 1, 1) for x in (truth, guess)]
    assert gray == alex.distances(paired(*color), data_range=1.0)


@pytest.mark.parametrize("net", NETS)
def test_the_least_size(files, net):
    network, least = Lpips.load(files[net]), NETS[net][1]
    for shape in ((1, least - 1, 99), (1, 99, least - 1), (2, 99, 99), (4, 99, 99), (99,)):
        x = images(2, *shape)
        assert network.distances(paired(x, x), data_range=1.0) == [None, None]
    x = images(1, 1, least, least)
    assert network.distances(paired(x, 1 - x), data_range=1.0)[0] > 0
    small = torch.zeros(1, 1, least - 1, least)
    with pytest.raises(RuntimeError, match="too small"):
        network._features(small[0].double())


def test_the_metric_keeps_the_contract_and_joins_the_others(alex):
    check_metric(alex.metric())
    pair = paired(images(2, 1, 32, 32), images(2, 1, 32, 32, seed=1))
    found = evaluate(pair, data_range=1.0, more=[alex.metric()])
    assert list(found) == [*(metric.name for metric in metrics.METRICS), "lpips"]
    assert found["lpips"] == alex.distances(pair, data_range=1.0)
    assert "lpips" not in evaluate(pair, data_range=1.0)


@pytest.mark.parametrize("form", ["lins", "both"])
def test_both_names_of_the_last_layers(states, alex, tmp_path, form):
    state = dict(states["alex"])
    for i in range(5):
        weight = state.pop(f"lin{i}.model.1.weight") if form == "lins" else torch.zeros(3)
        state[f"lins.{i}.model.1.weight"] = weight
    save_file(state, tmp_path / "w.safetensors")
    pair = paired(images(1, 3, 32, 32), images(1, 3, 32, 32, seed=1))
    found = Lpips.load(tmp_path / "w.safetensors").distances(pair, data_range=1.0)
    assert found == alex.distances(pair, data_range=1.0)


CONV = "net.slice1.0.weight"
BAD = [
    (lambda s: s.pop("net.slice3.6.bias"), r"net\.slice3\.6\.bias \(384,\) is missing"),
    (lambda s: s.pop("lin2.model.1.weight"), r"lin2\.model\.1\.weight .* is missing"),
    (lambda s: s.pop("scaling_layer.shift"), r"scaling_layer\.shift .* is missing"),
    (lambda s: s.pop(CONV), r"slice1\.0\.weight of shape None; give the state dict"),
    (lambda s: s.update({CONV: torch.zeros(64, 3, 3, 11)}), r"shape \(64, 3, 3, 11\); give"),
    (lambda s: s.update({"net.slice5.10.bias": torch.zeros(255)}), r"bias is \(255,\) in the file"),
    (lambda s: s.update({CONV: s[CONV].long()}), r"weight holds integers in the file"),
    (lambda s: s.update({"lin5.model.1.weight": torch.zeros(1)}), "lin5.* not in the model"),
    (lambda s: s.update({CONV: s[CONV] * torch.nan}), f"{CONV} holds .* NaN"),
    (lambda s: s.update({"lin0.model.1.weight": -torch.ones(1, 64, 1, 1)}), "negative weights"),
    (lambda s: s.update({"scaling_layer.scale": torch.zeros(1, 3, 1, 1)}), "not above 0"),
]


@pytest.mark.parametrize(("change", "words"), BAD, ids=[words for _, words in BAD])
def test_files_that_do_not_fit(states, tmp_path, change, words):
    state = dict(states["alex"])
    change(state)
    path = tmp_path / "w.safetensors"
    save_file(state, path)
    with pytest.raises(ValueError, match=words) as caught:
        Lpips.load(path)
    assert str(path) in str(caught.value)


def declared(shape):
    """A safetensors file whose header tells of a tensor that is not there."""
    size = 4 * int(np.prod(shape, dtype=object))
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}
    header = json.dumps({CONV: entry}).encode()
    return len(header).to_bytes(8, "little") + header


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "w.safetensors"
    with pytest.raises(ValueError, match=r"lpips_weights .*does not exist"):
        Lpips.load(path)
    with pytest.raises(ValueError, match="can run code when opened"):
        Lpips.load(tmp_path / "alex.pth")
    for content in (b"", pickle.dumps({CONV: [1.0]}), declared([10**9]), declared([64, 3, 11, 11])):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"lpips_weights .* not a valid safetensors file"):
            Lpips.load(path)


TABLE = {
    "seeds": [0, 1],
    "data": {"source": "digits", "size": 32, "limit": 200},
    "models": [{"name": "mlp", "hidden": [16]}],
    "attacks": [{"name": "linear_inversion"}],
    "error_bound": {"kind": "none"},
}


def test_the_file_is_part_of_the_plan_s_name():
    plan = audit.parse(TABLE)
    assert plan == audit.parse(TABLE | {"metrics": {}})
    assert plain(plan)["lpips_weights"] is None
    named = audit.parse(TABLE | {"metrics": {"lpips_weights": "a.safetensors"}})
    other = audit.parse(TABLE | {"metrics": {"lpips_weights": "b.safetensors"}})
    plans = (plan, named, other)
    assert len({p.hash for p in plans}) == len({p.experiments()[0].id for p in plans}) == 3
    assert plain(named)["lpips_weights"] == "a.safetensors"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"lpips_weight": "a"}, "did you mean 'lpips_weights'"),
        ({"lpips_weights": 3}, "lpips_weights is 3"),
        ("a.safetensors", r"\[metrics\]"),
    ],
)
def test_bad_tables(value, words):
    with pytest.raises(ValueError, match=words):
        audit.parse(TABLE | {"metrics": value})


def test_records_hold_it_and_nothing_else_changes(files, tmp_path):
    path = files["alex"]
    folders = tmp_path / "without", tmp_path / "with"
    tables = TABLE, TABLE | {"metrics": {"lpips_weights": str(path)}}
    read, noise = [], {"name": "gaussian_noise", "noise_std": 0.001}
    for folder, table in zip(folders, tables, strict=True):
        audit.audit(audit.parse(table | {"defenses": [noise]}), folder)
        read.append([*record.read(folder / "records.jsonl", record.Assessment)])
    run = json.loads((folders[1] / "run.json").read_text())
    assert run["data"]["weights"] == {str(path): hashlib.sha256(path.read_bytes()).hexdigest()}
    for bare, with_lpips in zip(*read, strict=True):
        (value,) = with_lpips.metrics.pop("lpips")
        assert value > 0
        assert bare.experiment != with_lpips.experiment
        assert replace(with_lpips, experiment=bare.experiment) == bare
    texts = [write(folder).read_text("utf-8") for folder in folders]
    assert "LPIPS" not in texts[0]
    assert "Median LPIPS" in texts[1]
    assert f"weights in {path}" in texts[1]


def test_a_plan_is_refused_before_any_cell(files, tmp_path):
    for path, table, words in (
        (tmp_path / "absent.safetensors", TABLE, "does not exist"),
        (files["alex"], TABLE | {"data": {"source": "digits", "size": 28}}, "at least 31 x 31"),
        (files["alex"], TABLE | {"data": {"source": "wine"}}, "1 or 3 channels"),
    ):
        plan = audit.parse(table | {"metrics": {"lpips_weights": str(path)}})
        with pytest.raises(ValueError, match=words) as caught:
            check_plan(plan, audit.PlanContext(plan.data))
        assert repr(str(path)) in str(caught.value)


def test_the_command(files, capsys):
    arguments = ["attack", "--attack", "linear_inversion", "--error-bound", "none"]
    for more, shown in ([], False), (["--lpips-weights", str(files["vgg"])], True):
        with pytest.raises(SystemExit) as caught:
            cli.main([*arguments, *more])
        assert not caught.value.code
        assert ("LPIPS" in capsys.readouterr().out) == shown
