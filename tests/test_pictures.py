"""Pictures for notebooks: bounded, escaped, never an error, and the right pixels."""

import base64
import io
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import leakbound as lb
from leakbound._util import pictures
from leakbound.assess.record import DefenseInfo, ModelInfo, Training
from leakbound.audit import AuditResult, Result, parse, run
from leakbound.risk import TrainingSetting, calibrate_setting, corridor

TAGS = {"div", "strong", "small", "em", "br", "span", "img"}
TAGS |= {"table", "thead", "tbody", "tr", "th", "td"}
HOSTILE = "<script>alert(1)</script>'\"><img src=x onerror=alert(2)>\x1b[2J"


def decoded(page, kind="image/png"):
    """The bytes of every picture of a page."""
    found = re.findall(rf"src='data:{re.escape(kind)};base64,([^']+)'", page)
    return [base64.b64decode(text, validate=True) for text in found]


def pixels(page):
    return [np.asarray(Image.open(io.BytesIO(content))) for content in decoded(page)]


class Elements(HTMLParser):
    """What a browser would take for elements and attributes."""

    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.sources = set(), set(), []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.sources += [value for name, value in attrs if name == "src"]


def safe(page):
    """The page, which holds no element and no attribute of a stranger's, and loads nothing."""
    found = Elements()
    found.feed(page)
    assert found.tags <= TAGS
    assert found.attributes <= {"style", "alt", "src"}
    assert all(source.startswith("data:image/") for source in found.sources)
    assert "\x1b" not in page
    return page


@pytest.fixture(scope="module")
def played():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    digits = lb.data.load("digits")
    task = lb.Task.of(model, classes=10)
    sources = [lb.stream(0, "client"), lb.stream(0, "server")]
    batch = digits.batch(torch.tensor([3, 4]))
    return lb.play(task, [batch], lb.defenses.GaussianNoise(noise_std=1e-4), sources)


def test_gray_pixels_arrive_as_they_are():
    image = torch.linspace(0, 1, 64).reshape(1, 1, 8, 8)
    (found,) = pixels(pictures.images(image))
    assert found.shape == (8, 8)
    assert np.array_equal(found, (image[0, 0] * 255).round().numpy().astype(np.uint8))


def test_color_pixels_arrive_as_they_are():
    image = torch.zeros(1, 3, 4, 6)
    image[0, 0] = 1
    (found,) = pixels(pictures.images(image))
    assert found.shape == (4, 6, 3)
    assert (found == [255, 0, 0]).all()


def test_values_outside_of_the_range_are_clamped():
    image = torch.full((1, 1, 4, 4), 0.5)
    image[0, 0, 0, 0], image[0, 0, 3, 3] = -1e30, 1e30
    (found,) = pixels(pictures.images(image, input_range=(0.0, 1.0)))
    assert (found[0, 0], found[1, 1], found[3, 3]) == (0, 128, 255)


def test_a_range_of_its_own_is_said():
    page = pictures.images(torch.linspace(-2, 2, 16).reshape(1, 1, 4, 4))
    (found,) = pixels(page)
    assert (found.min(), found.max()) == (0, 255)
    assert "black is -2, white is 2" in page


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "infinite"])
def test_values_that_are_not_finite_are_gray_and_said(value):
    image = torch.zeros(1, 1, 4, 4)
    image[0, 0, 1, 1] = value
    page = pictures.images(image)
    assert pixels(page)[0][1, 1] == 128
    assert "not finite" in page
    assert "not finite" not in pictures.images(torch.zeros(1, 1, 4, 4))


def test_pictures_are_limited_in_number_and_size():
    page = pictures.images(torch.rand(3, 200, 90).expand(500, -1, -1, -1))
    shown = pixels(page)
    assert len(shown) == pictures.MOST
    assert all(picture.shape[0] == pictures.SIDE for picture in shown)
    assert f"and {500 - pictures.MOST} more" in page
    assert len(page) < 1_000_000


def test_large_pictures_are_averaged_down():
    image = torch.zeros(1, 1, 2 * pictures.SIDE, 2 * pictures.SIDE)
    image[..., ::2] = 1
    assert (pixels(pictures.images(image))[0] == 128).all()


@pytest.mark.parametrize(
    "shape",
    [(0, 1, 8, 8), (3, 10), (2, 2, 8, 8), (1, 1, 1, 9), (5,), (), (1, 1, 8, 8, 8)],
    ids=str,
)
def test_what_is_no_image_gives_text(shape):
    page = pictures.images(torch.zeros(shape))
    assert "no images to show" in page
    assert "<img" not in page


@pytest.mark.parametrize("kind", [torch.uint8, torch.bool, torch.float16, torch.bfloat16], ids=str)
def test_every_type_of_number_is_shown(kind):
    assert len(pixels(pictures.images(torch.ones(1, 1, 4, 4).to(kind)))) == 1


def test_text_is_escaped_and_short():
    assert safe(f"<div>{pictures.text(HOSTILE)}</div>")
    assert len(pictures.text("<" * 100_000)) < 5 * pictures.LONGEST
    safe(pictures.table([HOSTILE], [[HOSTILE, HOSTILE]]))
    safe(pictures.block(HOSTILE, pictures.note(HOSTILE), pictures.facts([(HOSTILE, HOSTILE)])))
    safe(pictures.images(torch.zeros(1, 1, 4, 4), [HOSTILE], name=HOSTILE))


def test_long_tables_are_cut_and_say_so():
    page = pictures.table(("a",), [(i,) for i in range(1000)])
    assert page.count("<tr>") == pictures.ROWS + 1
    assert f"and {1000 - pictures.ROWS} more rows" in page


def test_a_finished_picture_is_checked():
    assert "<img" in pictures.picture(b"\x89PNG\r\n\x1a\n....", "x")
    assert "<img" not in pictures.picture(b"<svg onload=alert(1)>", "x")
    huge = b"\x89PNG\r\n\x1a\n" + bytes(pictures.MOST_BYTES)
    assert "<img" not in pictures.picture(huge, "x")


def test_a_reconstruction_shows_its_pictures_and_labels():
    guess = lb.Reconstruction(torch.rand(2, 1, 8, 8), torch.tensor([7, 3]), 0.25)
    page = safe(guess._repr_html_())
    assert len(pixels(page)) == 2
    assert "label 7" in page
    assert "objective 0.25" in page
    assert "failed" not in page


def test_a_reconstruction_says_that_it_failed():
    page = safe(lb.Reconstruction(torch.rand(1, 1, 8, 8), problem=HOSTILE)._repr_html_())
    assert "no evidence of safety" in page


def test_features_are_words():
    features = torch.zeros(2, 5)
    guess = lb.Reconstruction(torch.rand(2, 1, 1, 9), features=features, layer=HOSTILE)
    page = safe(guess._repr_html_())
    assert "2 inputs of the layer" in page
    assert not decoded(page)


def test_an_observation_and_a_round_show_no_picture(played):
    for thing in (played, played.observation):
        page = safe(thing._repr_html_())
        assert not decoded(page)
        assert "650 numbers" in page
        assert "Gaussian" in page
    assert "not shown: the true batch of 2" in played._repr_html_()
    assert "true" not in played.observation._repr_html_()


def test_an_unknown_defense_is_not_told(played):
    threat = lb.ThreatModel(labels_known=False, defense_known=False)
    sources = [lb.stream(0, "client"), lb.stream(0, "server")]
    task, noise = played.observation.task, lb.defenses.GaussianNoise(noise_std=1e-4)
    page = lb.play(task, [played.truth], noise, sources, threat=threat)._repr_html_()
    assert "nothing more" in page
    assert "Gaussian" not in page


def test_a_pair_shows_truth_and_guess_with_the_error():
    truth = lb.Batch(torch.zeros(1, 1, 4, 4), torch.tensor([5]))
    page = safe(lb.pair(truth, lb.Reconstruction(torch.full((1, 1, 4, 4), 0.1)))._repr_html_())
    black, gray = pixels(page)
    assert (black == 0).all()
    assert (gray == 26).all()
    assert "MSE 0.01; 20 dB" in page
    assert "label 5" in page


def test_a_pair_in_other_units_keeps_one_scale():
    truth = lb.Batch(torch.tensor([-2.0, 2.0]).repeat(8).reshape(1, 1, 4, 4), torch.tensor([0]))
    page = lb.pair(truth, lb.Reconstruction(torch.zeros(1, 1, 4, 4)))._repr_html_()
    assert (pixels(page)[1] == 128).all()
    assert "dB" not in page


def test_an_outcome_counts_its_verdicts():
    outcome = AuditResult(Path("runs") / HOSTILE, 3, 1, {"exposed": 2, "not_applicable": 1})
    page = safe(outcome._repr_html_())
    assert "not applicable" in page
    assert "failed experiments or trainings: 1" in page


def test_a_corridor_shows_both_edges_and_whom_they_cover():
    edges = corridor(TrainingSetting(0.5, dim=16), np.linspace(0.1, 0.9, 40) / 16)
    page = safe(edges._repr_html_())
    assert "mean squared error, at most" in page
    for scope in (edges.attained_scope, edges.bound_scope):
        assert pictures.text(scope.attackers) in page
        assert pictures.text(scope.not_said) in page


def test_a_corridor_at_one_threshold_is_a_table():
    page = corridor(TrainingSetting(0.5, dim=16), [0.5 / 16])._repr_html_()
    assert "0.0682" in page
    assert "0.12" in page


def test_a_prior_only_success_below_any_float_is_shown_as_tiny():
    page = corridor(TrainingSetting(0.5, dim=50_000), [1e-9])._repr_html_()
    assert "&lt;1e-9" in page


def test_a_calibration_says_what_it_means():
    found = calibrate_setting(
        "mse<=0.0006 with probability<=0.001",
        TrainingSetting(1.0, dim=784),
        clip_norm=2,
        prior=None,
    )
    page = safe(found._repr_html_())
    assert "noise multiplier (solved for)" in page
    assert f"{found.noise_multiplier:g}" in page
    assert f"{found.epsilon:.3g} at delta 1e-05" in page
    assert pictures.text(found.corridor.bound_scope.attackers) in page


def cell(**change):
    plan = {
        "data": {"source": "digits"},
        "models": [{"name": "mlp"}],
        "attacks": [{"name": "linear_inversion"}],
        "defenses": [{"name": "none"}],
        "seeds": [0],
    }
    return next(iter(run(parse(plan | change))))


def test_a_cell_shows_truth_guess_and_numbers():
    result = cell()
    page = safe(result._repr_html_())
    assert len(pixels(page)) == 2
    assert f"{result.record.scores[0]:.3g}" in page
    assert result.record.verdict in page


def test_a_cell_without_an_answer_says_why():
    result = cell(models=[{"name": "two_layer"}], attacks=[{"name": "trap_weights"}])
    assert result.record.status == "not_applicable"
    assert pictures.text(result.record.reason) in safe(result._repr_html_())


def test_a_training_shows_its_numbers():
    info = DefenseInfo(
        name="none", parameters={}, settings="none", guarantee="none", data_dependent_law=False
    )
    record = Training(
        training="id",
        defense=info,
        model=ModelInfo(name="mlp", parameters={}),
        seed=0,
        rounds=1,
        optimizer="adam",
        training_loss=0.5,
        accuracy=0.75,
    )
    assert "0.75" in safe(Result(record)._repr_html_())


@pytest.mark.browser
def test_the_browser_draws_all_and_says_nothing(tmp_path, played):
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if path is None:
        pytest.skip("no Chromium was found")
    playwright = pytest.importorskip("playwright.sync_api")
    things = [
        played,
        lb.Reconstruction(torch.rand(3, 3, 9, 9), problem=HOSTILE),
        AuditResult(Path(HOSTILE), 3, 1, {HOSTILE: 2}),
        corridor(TrainingSetting(0.5, dim=16), np.linspace(0.1, 0.9, 40) / 16),
    ]
    body = "".join(thing._repr_html_() for thing in things)
    page_file = tmp_path / "page.html"
    page_file.write_text(f"<!doctype html><meta charset=utf-8><body>{body}", "utf-8")
    trouble = []
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        page = chromium.new_page()
        page.on("console", lambda message: trouble.append(message.text))
        page.on("dialog", lambda dialog: (trouble.append(dialog.message), dialog.dismiss()))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.goto(page_file.as_uri())
        drawn = page.evaluate("[...document.images].map((i) => i.complete && i.naturalWidth > 0)")
        chromium.close()
    assert len(drawn) == 3
    assert all(drawn)
    assert trouble == []
