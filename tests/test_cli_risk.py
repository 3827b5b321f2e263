"""`leakbound bound` and `leakbound calibrate` as a user sees them."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from PIL import Image

from leakbound import data
from leakbound.bounds.counting import PublicSample
from leakbound.cli import main
from leakbound.risk import TrainingSetting, calibrate_setting

TARGET = "psnr>=20 with probability<=0.001"
KNOWN = ("--dim", 784, "--norm", 9, "--prior", "sphere")
pytestmark = pytest.mark.usefixtures("wide")


def call(*arguments):
    """The exit code of `leakbound ARGUMENTS`, run here."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code


def said(capsys):
    return " ".join(capsys.readouterr().out.split())


def parsed(capsys, *arguments):
    assert call(*arguments, "--json") == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def test_calibrate_shows_answer_and_scope(capsys):
    assert call("calibrate", "--target", TARGET, "--data", "mnist5k", "--prior", "sphere") == 0
    text = said(capsys)
    found = calibrate_setting(TARGET, TrainingSetting(1.0, dim=784, norm=4.225793), prior=None)
    assert f"noise_multiplier = {found.noise_multiplier:.6g}" in text
    for words in (
        "1 step at rate 1 (visible participation)",
        "least norm 4.226 of mnist5k",
        f"epsilon {found.epsilon:.4g} at delta 1e-05",
        "upper bound: no attacker exceeds",
        "attained by a linear estimator",
        "noise against naming 1 of 5000 examples │ 2.22",
        "% less)",
        "prior: direction uniform on a sphere",
        "covers: all attackers, who see which steps hold the example; prior: direction uniform "
        "on a sphere; unit: one example. Scopes: --explain",
    ):
        assert words in text, words
    assert "it does not say: " not in text


@pytest.mark.parametrize("command", ["bound", "calibrate"])
def test_explain_prints_the_scopes(capsys, command):
    what = ("--noise-multiplier", 1) if command == "bound" else ("--target", TARGET)
    known = ("--dim", 64, "--norm", 4, "--prior", "sphere")
    assert call(command, *what, *known, "--explain") == 0
    text = said(capsys)
    for words in (
        "upper bound (Hayes et al. 2023",
        "covers: all attackers, models and gradient maps",
        "covers: the best attack on the linear trap",
        "known to the attacker: everything but the example and the noise",
        "it does not say: a bound for one given example",
    ):
        assert words in text, words
    assert "--explain" not in text
    assert parsed(capsys, command, *what, *known, "--explain")[0]


@pytest.mark.parametrize(
    "arguments",
    [("bound", "--noise-multiplier", 1), ("calibrate", "--target", TARGET)],
    ids=["bound", "calibrate"],
)
@pytest.mark.parametrize("known", [(), ("--dim", 64, "--norm", 4)], ids=["nothing", "numbers"])
def test_no_prior_is_taken_that_protects_nothing(capsys, arguments, known):
    assert call(*arguments, *known) == 2
    error = capsys.readouterr().err
    missing = "prior is" if known else "dim and norm are"
    assert error.startswith(f"leakbound: {missing} not given; give data with examples like yours")
    assert 'the prior "sphere"' in error


def test_tiny_numbers_are_not_spelled_out(capsys):
    """2.51e-20 suggests a precision that nothing has; JSON keeps it."""
    arguments = ("bound", "--noise-multiplier", 1, *KNOWN, "--psnr", 15, 30)
    assert call(*arguments) == 0
    text = said(capsys)
    assert text.count("<1e-9") >= 4
    assert not re.search(r"\de-[1-9]\d", text.replace("1e-05", ""))
    rows = parsed(capsys, *arguments)[0]["thresholds"]
    assert 0 < rows[0]["bound"] < 1e-9


@pytest.mark.parametrize(
    ("solve", "more", "key"),
    [
        ("noise_multiplier", (), "noise_multiplier"),
        ("clip_norm", ("--noise-std", 0.5), "clip_norm"),
        ("steps", ("--noise-multiplier", 0.5), "steps"),
        ("sampling_rate", ("--noise-multiplier", 0.05, "--steps", 50), "sampling_rate"),
    ],
)
def test_every_solve(capsys, solve, more, key):
    found, _ = parsed(capsys, "calibrate", "--target", TARGET, *KNOWN, "--solve", solve, *more)
    assert found["solved"] == solve
    assert found["attained"] <= found["bound"] <= 0.001
    assert found["target"] == {
        "eta": 0.01,
        "gamma": 0.001,
        "psnr": 20,
        "goal": None,
        "ncc": None,
        "words": str_target(),
    }
    call("calibrate", "--target", TARGET, *KNOWN, "--solve", solve, *more)
    value = (found["setting"] | {"clip_norm": found["clip_norm"]})[key]
    assert f"{solve} = {value:.6g}" in said(capsys)


def str_target():
    return "PSNR >= 20 dB with probability <= 0.001"


def test_visible_epsilon_is_the_larger(capsys):
    arguments = ("bound", "--noise-multiplier", 1, *KNOWN, "--steps", 50, "--sampling-rate", 0.05)
    hidden, _ = parsed(capsys, *arguments, "--participation", "hidden")
    seen, _ = parsed(capsys, *arguments)
    assert seen["epsilon"] > hidden["epsilon"]
    assert "who see which steps" in seen["bound_scope"]["attackers"]
    for row in (*hidden["thresholds"], *seen["thresholds"]):
        assert row["attained"] <= row["bound"]


def test_bound_table_and_files(capsys, tmp_path):
    out = tmp_path / "new" / "folder"
    arguments = ("bound", "--noise-multiplier", 0.05, *KNOWN, "--eta", 0.02, "--accept", 0.01)
    assert call(*arguments, "--out", out) == 0
    text = said(capsys)
    assert sorted(path.name for path in out.iterdir()) == ["bound.json", "corridor.png"]
    assert (out / "corridor.png").read_bytes()[1:4] == b"PNG"
    found, _ = parsed(capsys, *arguments)
    kept = json.loads((out / "bound.json").read_text())
    assert kept.pop("written_by").startswith("leakbound, sha256 ")
    assert found == kept
    rows = found["thresholds"]
    assert [row["psnr"] for row in rows] == sorted(row["psnr"] for row in rows)
    assert [row["verdict"] for row in rows] == [_verdict(row, 0.01, False) for row in rows]
    assert min(row["bound"] for row in rows) < 0.01
    assert "accepted probability: 0.01" in text
    assert "written: bound.json, corridor.png into" in text


def _verdict(row, accepted, informed=True):
    blind = max(10.0 ** row["log10_baseline"], row["matched"] or 0.0)
    if row["attained"] > max(accepted, blind):
        return "recoverable in principle"
    if row["guess"] > accepted:
        return "undecided (guessable)"
    below = informed and max(row["bound"], blind) <= accepted
    return "protected under a model" if below else "undecided"


def test_what_a_guess_reaches_is_not_exposed_by_the_update(capsys):
    """|X|^2 / N = 0.1: the zero image has 10 dB. At much noise the lower edge is the guess's."""
    given = ("--norm", 2.5298, "--dim", 64, "--psnr", 5, 30)
    for noise, words in (
        (0, ["undecided (guessable)", "recoverable in principle"]),
        (5.0, ["undecided (guessable)", "undecided"]),
    ):
        found, _ = parsed(capsys, "bound", "--noise-multiplier", noise, *given, "--prior", "sphere")
        rows = found["thresholds"]
        assert rows[0]["attained"] == rows[0]["bound"] == 1.0
        assert [row["verdict"] for row in rows] == words


@pytest.mark.parametrize("command", ["bound", "calibrate"])
def test_a_prior_that_knows_nothing_of_the_data_is_named(capsys, command):
    what = (
        ("--noise-multiplier", 0.5)
        if command == "bound"
        else ("--target", "psnr>=30 with probability<=0.1")
    )
    words = "knows nothing about the data"
    assert call(command, *what, "--data", "digits", "--prior", "sphere") == 0
    assert words in said(capsys)
    known = ("--norm", 1, "--dim", 100, "--prior", "sphere")
    assert call(command, *what, *known) == 0
    assert words in said(capsys)
    assert call(command, *what, "--data", "digits") == 0  # the default counts the examples then
    text = said(capsys)
    assert words not in text
    assert "1797 public examples without a model" in text


def test_json_stays_json_with_out(capsys, tmp_path):
    found, errors = parsed(
        capsys, "bound", "--noise-multiplier", 0, *KNOWN, "--psnr", 20, "--out", tmp_path
    )
    assert found["epsilon"] is None
    assert [row["verdict"] for row in found["thresholds"]] == ["recoverable in principle"]
    assert "written: bound.json, corridor.png into" in errors
    json.loads((tmp_path / "bound.json").read_text())


@pytest.mark.parametrize("prior", ["gaussian", "mixture", "gallery"])
def test_priors_from_data(capsys, prior):
    found, _ = parsed(
        capsys, "bound", "--noise-multiplier", 0.5, "--data", "digits", "--prior", prior
    )
    assert prior in found["prior"].lower() or "Gaussian" in found["prior"]
    assert found["prior"] in found["bound_scope"]["prior"]
    assert "examples like the public ones" in found["attained_scope"]["prior"]
    for row in found["thresholds"]:
        assert row["verdict"] == _verdict(row, 0.001)


def test_no_whole_number_of_steps_is_rounded_away(capsys):
    found, _ = parsed(
        capsys,
        *("calibrate", "--target", TARGET, *KNOWN, "--solve", "steps", "--noise-multiplier", 0.1),
    )
    assert isinstance(found["setting"]["steps"], int)


SPHERE = ("--prior", "sphere")
GOOD = ("calibrate", "--target", TARGET)
BOUND = ("bound", "--noise-multiplier", "1")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*GOOD,), "dim and norm are not given"),
        ((*GOOD, "--dim", 4, "--norm", 1), "prior is not given"),
        ((*GOOD, *SPHERE), "dim and norm are not given"),
        ((*GOOD, *SPHERE, "--dim", 0, "--norm", 1), "dim is 0"),
        ((*GOOD, *SPHERE, "--dim", "9" * 400, "--norm", 1), "dim is"),
        ((*GOOD, *SPHERE, "--dim", 4, "--norm", -1), "norm is -1"),
        ((*GOOD, *SPHERE, "--dim", 4, "--norm", "nan"), "norm is nan"),
        ((*GOOD, *SPHERE, "--dim", 4, "--norm", 2, 1), "norm is"),
        ((*GOOD, *SPHERE, "--dim", 4, "--norm", 1, 1.5, 2), "norm is"),
        ((*GOOD, *SPHERE, "--dim", 4, "--norm", 50), "norm is 50 to 50, but 4 values from 0 to 1"),
        ((*GOOD, *KNOWN, "--steps", 0), "steps is 0"),
        ((*GOOD, *KNOWN, "--steps", 10**13), "steps is"),
        ((*GOOD, *KNOWN, "--sampling-rate", 0), "sampling_rate is 0"),
        ((*GOOD, *KNOWN, "--sampling-rate", 1.5), "sampling_rate is 1.5"),
        ((*GOOD, *KNOWN, "--clip-norm", 0), "clip_norm is 0"),
        ((*GOOD, *KNOWN, "--delta", 0), "delta is 0"),
        ((*GOOD, *KNOWN, "--input-range", 1, 0), "input_range is 1 0"),
        ((*GOOD, *KNOWN, "--input-range", 0, "nan"), "input_range is"),
        ((*GOOD, *KNOWN, "--input-range", 0, 1e200), "input_range is"),
        (
            (*GOOD, *KNOWN, "--noise-multiplier", 1),
            "noise_multiplier is 1, but solve is 'noise_multiplier'",
        ),
        ((*GOOD, *KNOWN, "--noise-std", 1), "noise_std"),
        ((*GOOD, *KNOWN, "--solve", "clip_norm"), "noise_std"),
        ((*GOOD, *KNOWN, "--solve", "steps"), "noise_multiplier is not given"),
        (
            (*GOOD, *KNOWN, "--solve", "steps", "--noise-multiplier", 0),
            "noise_multiplier is 0: not one step",
        ),
        (
            (*GOOD, *KNOWN, "--solve", "steps", "--noise-multiplier", "inf"),
            "noise_multiplier is inf",
        ),
        ((*GOOD, *KNOWN, "--prior", "mixture"), "prior is 'mixture'.*give --data"),
        ((*GOOD, *KNOWN, "--size", 8), "size, channels, schema, person and people_mean"),
        ((*GOOD, "--data", "no-such-data"), "no-such-data"),
        ((*GOOD, "--data", "digits", "--dim", 7), "dim is 7, but the data have 64"),
        ((*GOOD, "--data", "digits", "--input-range", 0, 0.5), "input_range is 0 to 0.5, but the"),
        ((*GOOD, "--data", "digits", "--norm", 9), "norm is 9 to 9, but the data's run from"),
        (("calibrate", "--target", "safe", *KNOWN), "target is 'safe'; write it as"),
        (("calibrate", "--target", "psnr>=5 with probability<=0.1", *KNOWN), "zero image"),
        (
            ("calibrate", "--target", "psnr>=12 with probability<=0.001", "--data", "mnist5k"),
            "zero image alone|mean image|constant image",
        ),
        ((*BOUND, *SPHERE), "dim and norm are not given"),
        (("bound", "--noise-multiplier", -1, *KNOWN), "noise_multiplier is -1"),
        (("bound", "--noise-multiplier", "nan", *KNOWN), "noise_multiplier is nan"),
        (("bound", "--noise-multiplier", "inf", *KNOWN), "noise_multiplier is inf"),
        ((*BOUND, *KNOWN, "--accept", 0), "accept is 0"),
        ((*BOUND, *KNOWN, "--delta", 2), "delta is 2"),
        ((*BOUND, *KNOWN, "--psnr", 4000), "psnr is 4000"),
        ((*BOUND, *KNOWN, "--eta", 0), "eta is 0"),
        ((*BOUND, *KNOWN, "--eta", 1e-320), "eta is"),
        ((*BOUND, *KNOWN, "--psnr"), "psnr and eta are empty"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, words):
    assert call(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = [text for text in captured.err.splitlines() if text.startswith("leakbound:")]
    assert re.search(words, line), line
    assert "Traceback" not in captured.err


def test_out_that_is_a_file(capsys, tmp_path):
    (tmp_path / "file").write_text("x")
    out = ("--psnr", 20, "--out", tmp_path / "file")
    assert call("bound", "--noise-multiplier", 0, *KNOWN, *out) == 2
    assert "out is " in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "x"


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A thousand digits: what is compared with each other grows with the square of their number."""
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    known = data.load("mnist5k", limit=1000)
    np.savez(path, inputs=known.inputs.numpy(), labels=known.labels.numpy())
    return f"npz:{path}"


def test_given_data_a_uniform_direction_protects_nothing(capsys, digits):
    """What was 1e-285 and "protected" under it is 0.41 under a prior that has seen digits."""
    given = ("--noise-multiplier", 1.1, "--data", digits, "--steps", 1000)
    given += ("--sampling-rate", 0.01, "--psnr", 15, 25, 30)
    blank, _ = parsed(capsys, "bound", *given, "--prior", "sphere")
    rows = blank["thresholds"]
    assert rows[1]["bound"] < 1e-100
    words = ["undecided (guessable)", "undecided", "undecided"]
    assert [row["verdict"] for row in rows] == words
    found, _ = parsed(capsys, "bound", *given, "--prior", "mixture")
    rows = found["thresholds"]
    # at 15 dB one codeword matches many digits, with and without an update
    assert 0.01 < rows[0]["guess"] <= rows[0]["attained"] < rows[0]["bound"]
    assert 0.995 > rows[0]["bound"] > rows[0]["matched"] > 0.001
    assert rows[1]["bound"] == pytest.approx(0.41, abs=0.005)
    assert [row["verdict"] for row in rows] == [
        *("undecided (guessable)", "undecided", "protected under a model")
    ]
    assert call("bound", *given, "--prior", "mixture") == 0
    assert "attained by: codebook" in said(capsys)


@pytest.mark.parametrize(
    ("prior", "word", "accepted"),
    [
        ("sphere", "undecided", 0.001),
        ("mixture", "protected under a model", 0.001),
        ("sample", "protected from strangers", 0.1),
    ],
)
def test_calibrate_ends_with_the_word_of_bound(capsys, prior, word, accepted, digits):
    target = f"psnr>=30 with probability<={accepted}"
    what = ("--target", target, "--data", digits, "--prior", prior)
    found, _ = parsed(capsys, "calibrate", *what)
    assert found["verdict"] == word
    given = (
        "--noise-multiplier",
        found["setting"]["noise_multiplier"],
        "--psnr",
        30,
        "--prior",
        prior,
        "--accept",
        accepted,
    )
    beside, _ = parsed(capsys, "bound", *given, "--data", digits)
    assert beside["thresholds"][0]["verdict"] == word
    assert call("calibrate", *what) == 0
    assert f"verdict of `leakbound bound` on this answer: {word}" in said(capsys)


def images(folder, *, dark=(), count=80):
    """A folder of random images, of which some are nearly black."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(count):
        pixels = rng.integers(0, 3 if i in dark else 256, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:03d}.png")
    return f"folder:{folder}"


def test_an_example_that_a_constant_matches_is_named_and_left_out(capsys, tmp_path):
    """It stopped the calibration for all others, and was not named."""
    target = ("--target", "psnr>=30 with probability<=0.2")
    source = images(tmp_path / "some", dark=(17, 40))
    found, _ = parsed(capsys, "calibrate", *target, "--data", source)
    assert found["left_out"] == ["017.png", "040.png"]
    assert call("calibrate", *target, "--data", source) == 0
    text = said(capsys)
    assert "2 examples are left out" in text
    assert "017.png, 040.png" in text
    assert "The answer is for the other 78" in text
    by_hand = ("--exclude", "017.png", 40)
    other, _ = parsed(capsys, "calibrate", *target, "--data", source, *by_hand)
    assert other["left_out"] == []
    assert other["setting"] == found["setting"]
    most = images(tmp_path / "most", dark=range(50))
    assert call("calibrate", *target, "--data", most) == 2
    assert "a constant image matches 50 of 80 examples" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["999", "-1", "nobody.png"])
def test_an_example_to_exclude_must_be_there(capsys, tmp_path, word):
    source = images(tmp_path / "some")
    assert call("bound", "--noise-multiplier", 1, "--data", source, f"--exclude={word}") == 2
    assert f"exclude holds '{word}', which names no example" in capsys.readouterr().err


def test_examples_of_zeros_are_named(capsys, tmp_path):
    inputs = np.random.default_rng(0).random((70, 1, 4, 4), dtype=np.float32)
    inputs[[3, 5]] = 0
    np.savez(tmp_path / "own.npz", inputs=inputs, labels=np.zeros(70, int))
    given = ("bound", "--noise-multiplier", 1, "--data", f"npz:{tmp_path / 'own.npz'}")
    assert call(*given) == 2
    assert "2 examples of 70 that are all zeros" in (text := capsys.readouterr().err)
    assert "3, 5; leave them out: --exclude" in text
    assert call(*given, "--exclude", 3, 5) == 0


def test_too_few_examples(capsys, tmp_path):
    """A model needs 64; a count takes any number, and says how many a target needs."""
    source = images(tmp_path / "few", count=20)
    given = ("bound", "--noise-multiplier", 1, "--data", source)
    assert call(*given, "--prior", "mixture") == 2
    assert "holds 20 examples; give at least 64" in (text := capsys.readouterr().err)
    assert "--prior sphere" in text
    assert call(*given) == 0
    assert "20 public examples without a model" in said(capsys)
    target = "psnr>=30 with probability<=0.01"
    assert call("calibrate", "--target", target, "--data", source) == 2
    assert "give 555 examples or more" in capsys.readouterr().err


@pytest.mark.parametrize("chance", ["1e-300", "9e-13", "1e-12", "0.999999999999"])
def test_extreme_probabilities_end(capsys, chance):
    """Under 1e-300 the search went on for ever; such a precision is refused by a line."""
    target = f"psnr>=20 with probability<={chance}"
    code = call("calibrate", "--target", target, *KNOWN)
    assert code == (2 if float(chance) < 1e-12 else 0)
    assert ("at least 1e-12" in capsys.readouterr().err) == (code == 2)


@pytest.mark.parametrize("command", ["bound", "calibrate"])
def test_known_labels_need_more_noise(capsys, command, digits):
    if command == "bound":
        ask = ("bound", "--noise-multiplier", 1, "--psnr", 26, "--data", digits)
        values = [parsed(capsys, *ask, *more)[0]["thresholds"][0]["bound"] for more in FLAG]
    else:
        ask = ("calibrate", "--target", "psnr>=26 with probability<=0.2", "--data", digits)
        values = [parsed(capsys, *ask, *m)[0]["setting"]["noise_multiplier"] for m in FLAG]
    assert values[0] < values[1]
    assert call(*ask, "--labels-known", "--prior", "mixture") == 2
    assert "labels_known needs the prior" in capsys.readouterr().err


FLAG = ((), ("--labels-known",))


def test_the_private_examples_themselves(capsys, digits):
    """Exact for them, so the bound is lower than for new ones."""
    ask = ("bound", "--noise-multiplier", 1, "--psnr", 26, "--data", digits, "--accept", 0.05)
    new, own = (parsed(capsys, *ask, "--prior", p)[0]["thresholds"][0] for p in ("sample", "these"))
    assert own["bound"] < new["bound"]
    assert own["verdict"] == "protected (these examples)"


def test_calibrate_for_a_gain_needs_no_data(capsys):
    found, _ = parsed(capsys, "calibrate", "--target", "gain<=0.1", "--steps", 4)
    assert found["setting"]["noise_multiplier"] == pytest.approx(7.958, abs=1e-3)
    assert found["gain"] <= 0.1
    assert call("calibrate", "--target", "gain<=0.1", "--steps", 4, "--explain") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "gain <= 0.1: noise_multiplier = 7.95" in shown
    assert "whatever they know already" in shown
    assert "it does not say: the success itself" in shown


def test_calibrate_for_the_gain_on_one_column(capsys):
    what = ("calibrate", "--target", "gain<=0.1 for foreign_worker", "--data", "german")
    assert call(*what) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "noise_multiplier = 3.979" in shown
    assert "One fixed answer gives foreign_worker for 0.9" in shown
    assert "This holds for foreign_worker of every person" in shown


def test_a_wrong_known_column_is_refused_before_counting(capsys, monkeypatch):
    monkeypatch.setattr(PublicSample, "counts", lambda *given: pytest.fail("counted"))
    assert call("bound", "--noise-multiplier", 1, "--data", "german", "--known", "foreigner") == 2
    assert "foreigner" in capsys.readouterr().err


def test_calibrate_for_an_intruder_names_what_they_know(capsys):
    known = ("--data", "german", "--known", "foreign_worker,personal_status_and_sex")
    assert call("calibrate", "--target", "columns>=0.9 with probability<=0.2", *known) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "against an intruder who knows foreign_worker,personal_status_and_sex: protected" in shown
    )
    assert "95% confidence, foreign_worker,personal_status_and_sex known" in shown
