"""Weights in shards with an index, as `save_pretrained` writes them."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from leakbound import captured, tensors
from leakbound.tensors import read

from ..captured.flat import attack_update

PARTS = {
    "model-00001-of-00002.safetensors": {"0.weight": torch.ones(3, 2), "0.bias": torch.zeros(3)},
    "model-00002-of-00002.safetensors": {"2.weight": torch.ones(1, 3)},
}


def folder(place, parts=PARTS, change=lambda rows: rows):
    place.mkdir()
    rows = {key: name for name, own in parts.items() for key in own}
    for name, own in PARTS.items():
        save_file(own, place / name)
    held = {"metadata": {"total_size": 1}, "weight_map": change(rows)}
    (place / "model.safetensors.index.json").write_text(json.dumps(held))
    return place


def test_a_folder_and_its_index_give_all_shards(tmp_path):
    place = folder(tmp_path / "saved")
    for path in (place, place / "model.safetensors.index.json"):
        named, about = read(path)
        assert sorted(named) == ["0.bias", "0.weight", "2.weight"]
        assert about == {}


def test_a_folder_with_one_file_gives_it(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert list(read(tmp_path)[0]) == ["w"]
    assert captured.load(tmp_path, {"w": torch.zeros(2)}, kind="weights").kind == "weights"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: {**rows, "3.weight": next(iter(PARTS))}, "lacks 3.weight"),
        (lambda rows: {k: v for k, v in rows.items() if k != "0.bias"}, "does not name, 0.bias"),
        (lambda rows: {**rows, "x": "../other.safetensors"}, r"names the shard '../other"),
        (lambda rows: {**rows, "x": "/tmp/other.safetensors"}, "names the shard '/tmp"),
        (lambda rows: {**rows, "x": "other.bin"}, r"names the shard 'other.bin'"),
        (lambda rows: {**rows, "x": 3}, "names the shard '3'"),
        (lambda rows: {**rows, "x": "no.safetensors"}, "does not exist"),
        (lambda rows: [], "has no weight_map"),
    ],
)
def test_an_index_that_is_wrong_is_refused(change, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        read(folder(tmp_path / "saved", change=change))


def test_shards_share_one_limit(tmp_path):
    rows = {"a": "a.safetensors", "b": "b.safetensors"}
    for key, name in rows.items():
        save_file({key: torch.ones(1000)}, tmp_path / name)
    index = json.dumps({"weight_map": rows})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"b.safetensors' takes .*the limit is"):
        read(tmp_path, most=6000)
    assert len(read(tmp_path, most=9000)[0]) == 2


def test_a_json_that_is_none_is_refused(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    for text in ("{", "[" * 10**5):
        path.write_text(text)
        with pytest.raises(ValueError, match="is not valid JSON"):
            read(path)


@pytest.mark.parametrize(
    ("name", "words", "not_words"),
    [
        ("weights.gguf", "is a GGUF file", "Pickled"),
        ("config.json", "is a JSON file without tensors", "Pickled"),
        ("pytorch_model.bin.index.json", "Pickled files", "GGUF"),
        ("weights.pt", "Pickled files", "GGUF"),
    ],
)
def test_other_files_are_called_what_they_are(name, words, not_words, tmp_path):
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(ValueError, match=words) as told:
        read(tmp_path / name)
    assert not_words not in str(told.value)


def test_a_folder_of_pickles_says_how_to_save_it(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="safe_serialization=True"):
        captured.load(tmp_path, kind="weights")


def test_a_folder_without_weights_is_no_file(tmp_path):
    with pytest.raises(ValueError, match="a folder; give one file of it"):
        captured.load(tmp_path, kind="weights")


def test_two_saved_folders_are_an_update(tmp_path):
    torch.manual_seed(0)
    own = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 4))
    for name in ("before", "after"):
        place = tmp_path / name
        place.mkdir()
        parts = {"a.safetensors": ("1.weight", "1.bias"), "b.safetensors": ("3.weight", "3.bias")}
        for file, keys in parts.items():
            held = own.state_dict()
            save_file({key: held[key].contiguous() for key in keys}, place / file)
        rows = {key: file for file, keys in parts.items() for key in keys}
        index = json.dumps({"weight_map": rows})
        (place / "model.safetensors.index.json").write_text(index)
        image = torch.linspace(0, 1, 36).reshape(1, 1, 6, 6)
        nn.functional.cross_entropy(own(image), torch.tensor([1])).backward()
        torch.optim.SGD(own.parameters(), lr=0.1).step()
    found = attack_update(
        tmp_path / "after",
        own,
        before=tmp_path / "before",
        input_shape=(1, 6, 6),
        examples=1,
        attacks="linear_inversion",
    )
    assert found.records[0].verdict == "exposed (certified)"
    assert found.records[0].capture.name == "after"


def test_a_language_model_saved_in_shards_is_read(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=8)
    own = transformers.GPT2LMHeadModel(config)
    own.save_pretrained(tmp_path, max_shard_size="8KB")
    assert tensors.weights_in(tmp_path).name == "model.safetensors.index.json"
    named, _ = read(tmp_path)
    assert torch.equal(named["transformer.wte.weight"], own.transformer.wte.weight)
