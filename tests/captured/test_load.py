import numpy as np
import pytest
import torch

from leakbound import captured, tensors
from leakbound.captured import Settings, attack_update, load, load_all, updates_in

BEFORE = {"w": torch.ones(4, 3), "b": torch.zeros(4)}
AFTER = {"w": torch.ones(4, 3) * 1.01, "b": torch.full((4,), 0.01)}
DELTA = {k: AFTER[k] - BEFORE[k] for k in BEFORE}
SKEW = {"w": torch.tensor([[1.0, -1.0, 0.0]]).expand(4, 3).clone(), "b": torch.ones(4)}


def recorded(folder, rounds=2, clients=2, **about):
    for number in range(1, rounds + 1):
        for client in range(clients):
            own = {"round": number, "client": client, "kind": "weights", "examples": 4, **about}
            captured.write(folder, BEFORE, AFTER, own)
    return folder


def test_a_new_folder_is_its_owners_alone_at_every_level(tmp_path):
    folder = tmp_path / "seen"
    captured.write(folder, BEFORE, AFTER, {"round": 1, "client": 2, "kind": "weights"})
    for place in (folder, folder / "round-0001"):
        assert place.stat().st_mode & 0o777 == 0o700


def test_what_the_recorder_writes_is_found_and_loaded(tmp_path):
    recorded(tmp_path)
    names = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.safetensors"))
    assert names == [
        f"round-000{r}/{name}.safetensors"
        for r in (1, 2)
        for name in ("before", "client-0", "client-1")
    ]
    assert [row[:2] for row in updates_in(tmp_path)] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    found = load_all(tmp_path, round=2)
    assert [c.about["client"] for c in found] == ["0", "1"]
    assert all(c.kind == "weights" and c.number("examples") == 4 for c in found)
    assert all(torch.equal(c.before["w"], BEFORE["w"]) for c in found)
    assert len(load_all(tmp_path / "round-0001")) == 2


def test_a_folder_with_nothing_in_it_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no captured update"):
        load_all(tmp_path)
    (tmp_path / "round-0001").mkdir()
    with pytest.raises(ValueError, match="holds no captured update"):
        load_all(tmp_path)
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        load_all(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds the rounds \[1, 2\]"):
        load_all(recorded(tmp_path), round=3)


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"round": 1, "client": 2, "kind": "grad"}, "did you mean 'gradient'"),
        ({"round": -1, "client": 2, "kind": "delta"}, r"about\['round'\] is '-1'"),
        ({"round": 1, "client": "../2", "kind": "delta"}, r"about\['client'\] is '../2'"),
        ({"client": 2, "kind": "delta"}, r"about\['round'\] is None"),
    ],
    ids=["kind", "round", "path", "missing"],
)
def test_a_recorder_that_says_nonsense_is_refused(about, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        captured.write(tmp_path, BEFORE, AFTER, about)
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("kind", ["gradient", "delta", "weights"])
def test_the_kind_of_a_file_is_read_from_its_metadata(kind, tmp_path):
    about = {"leakbound.kind": kind, "leakbound.learning_rate": "0.5", "other": "x"}
    tensors.write(tmp_path / "u.safetensors", AFTER, about)
    found = load(tmp_path / "u.safetensors", BEFORE)
    assert (found.kind, found.about) == (kind, {"kind": kind, "learning_rate": "0.5"})
    assert found.number("learning_rate") == 0.5
    assert found.number("steps") is None


def test_weights_are_told_by_their_likeness_and_said_so():
    found = load(AFTER, BEFORE)
    assert found.kind == "weights"
    assert "taken as the weights after training" in found.notes[0]


@pytest.mark.parametrize("update", [SKEW, {k: -v for k, v in SKEW.items()}], ids=["plus", "minus"])
def test_a_gradient_and_a_delta_are_not_told_apart_by_guessing(update):
    with pytest.raises(ValueError, match="give kind: gradient or delta"):
        load(update, BEFORE)


def test_weights_that_moved_far_are_asked_for_too():
    far = {"w": torch.full((4, 3), 3.0), "b": torch.zeros(4)}
    with pytest.raises(ValueError, match="or weights, if they moved far"):
        load(far, BEFORE)
    assert load(far, BEFORE, kind="weights").kind == "weights"


def test_without_the_weights_before_the_kind_must_be_given():
    with pytest.raises(ValueError, match=r"give kind .* and the weights before"):
        load(AFTER)


@pytest.mark.parametrize(
    ("kind", "after", "words"),
    [
        ("auto", 1.0, "are identical in every tensor"),
        ("weights", 1.0, "are identical in every tensor"),
        ("delta", 0.0, "is zero in every tensor"),
    ],
)
def test_an_identical_pair_and_a_zero_update_are_refused(kind, after, words):
    model = torch.nn.Linear(2, 2)
    before = dict(model.state_dict())
    update = {name: after * value for name, value in before.items()}
    with pytest.raises(ValueError, match=words):
        attack_update(load(update, before, kind=kind), model, Settings((2,)))


def test_arrays_and_lists_in_memory_are_taken():
    arrays = [np.asarray(v) for v in AFTER.values()]
    found = load(arrays, [np.asarray(v) for v in BEFORE.values()], kind="weights")
    assert list(found.update) == ["0", "1"]
    assert torch.equal(found.update["0"], AFTER["w"])
    with pytest.raises(ValueError, match=r"update\['w'\] holds values of type object"):
        load({"w": np.array([None])}, BEFORE, kind="delta")


@pytest.mark.parametrize("text", ["", "fast", "nan", "-1", "0"])
def test_metadata_that_are_no_number_are_refused(text, tmp_path):
    about = {"leakbound.kind": "delta", "leakbound.learning_rate": text}
    tensors.write(tmp_path / "u.safetensors", DELTA, about)
    with pytest.raises(ValueError, match="give learning_rate as an option"):
        load(tmp_path / "u.safetensors", BEFORE).number("learning_rate")


def test_the_digest_depends_on_values_names_and_kind():
    a = load(AFTER, BEFORE).digest
    assert a == load(dict(reversed(AFTER.items())), BEFORE).digest
    other = {"w": AFTER["w"], "b": AFTER["b"] + 1e-3}
    assert a != load(other, BEFORE).digest
    assert a != load(AFTER, BEFORE, kind="delta").digest


def test_tensors_without_names_are_compared_with_named_ones_of_their_shape():
    arrays = [np.asarray(v) for v in AFTER.values()]
    found = load(
        {f"arr_{at}": value for at, value in enumerate(arrays)}, dict(reversed(BEFORE.items()))
    )
    assert found.kind == "weights"
    wrapped = {f"module.{name}": value for name, value in AFTER.items()}
    assert load(wrapped, BEFORE).kind == "weights"


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (
            {"net.w": AFTER["w"], "net.b": AFTER["b"]},
            r"update \(net.w \(4, 3\), .* no tensor of one",
        ),
        (
            {k: torch.full_like(v, float("nan")) for k, v in AFTER.items()},
            "NaN or infinite values in every tensor .w .4, 3., b",
        ),
        ({k: v.to(torch.int8) for k, v in AFTER.items()}, "w holds values of type torch.int8"),
    ],
    ids=["names", "nan", "integers"],
)
def test_automatic_kinds_say_what_is_really_wrong(update, words):
    with pytest.raises(ValueError, match=words):
        load(update, BEFORE)


@pytest.mark.parametrize("count", [2**16 + 1, 10**15])
def test_a_count_that_nobody_could_have_trained_on_is_not_believed(count, tmp_path):
    recorded(tmp_path, 1, 1, examples=count)
    (found,) = load_all(tmp_path)
    with pytest.raises(ValueError, match="1 to 65536 are accepted from a file"):
        found.whole("examples")
