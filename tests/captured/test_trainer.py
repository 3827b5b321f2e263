"""What a trainer's folder says of its training."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from leakbound import captured, tensors
from leakbound.captured import trainer
from leakbound.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
PLAIN = {"global_step": 10, "epoch": 5.0, "train_batch_size": 4, "log_history": [{"loss": 1.0}]}


def state(folder, **changes):
    """The state of a checkpoint, with changes; None leaves a value out."""
    folder.mkdir(parents=True, exist_ok=True)
    held = {key: value for key, value in {**PLAIN, **changes}.items() if value is not None}
    (folder / trainer.STATE).write_text(json.dumps(held))
    return folder


def counts(place, before=None):
    """Steps, batch size and examples that are stated."""
    about = trainer.stated(place, before)
    return [about.get(name) for name in ("steps", "batch_size", "examples")]


def test_the_last_checkpoint_counts(tmp_path):
    state(tmp_path / "checkpoint-9", global_step=9)
    state(tmp_path / "checkpoint-10")
    (tmp_path / "checkpoint-best").mkdir()
    assert counts(tmp_path) == ["10", "4", "8"]
    assert counts(tmp_path / "adapter_model.safetensors") == ["10", "4", "8"]
    assert counts(tmp_path / "checkpoint-9" / "model.safetensors") == ["9", "4", "7"]


def test_steps_before_an_earlier_checkpoint_do_not_count(tmp_path):
    before = state(tmp_path / "checkpoint-4", global_step=4, epoch=2.0)
    after = state(tmp_path / "checkpoint-10")
    assert counts(after, before) == ["6", "4", "8"]
    assert counts(after, after) == [None] * 3
    assert counts(after, tmp_path / "elsewhere" / "before.safetensors") == ["10", "4", "8"]


def test_within_an_epoch_no_example_repeats(tmp_path):
    assert counts(state(tmp_path, epoch=0.1)) == ["10", "4", "40"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train_batch_size": None}, ["10", None, None]),
        ({"train_batch_size": 0}, ["10", None, None]),
        ({"epoch": None}, ["10", "4", "40"]),
        ({"global_step": 0}, [None] * 3),
    ],
)
def test_what_is_not_known_is_not_stated(tmp_path, changes, expected):
    assert counts(state(tmp_path, **changes)) == expected


def test_other_places_state_nothing(tmp_path):
    assert trainer.stated(tmp_path) == {}
    state(tmp_path / "checkpoint-10")
    assert trainer.stated(tmp_path / "client_7.safetensors") == {}
    assert trainer.note({}) == ()


NO_NUMBERS = ("NaN", "Infinity", "-1.0", "1e300")


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"global_step": "ten"}',
        '{"epoch": 1.0}',
        f'{{"global_step": {10**30}}}',
        *(f'{{"global_step": 1, "epoch": {one}, "train_batch_size": 2}}' for one in NO_NUMBERS),
    ],
)
def test_a_damaged_state_is_refused(tmp_path, text):
    (tmp_path / trainer.STATE).write_text(text)
    with pytest.raises(ValueError, match="trainer state"):
        trainer.stated(tmp_path)


def test_a_whole_model_of_a_trainer_is_read_with_its_steps(tmp_path):
    place = state(tmp_path / "out" / "checkpoint-10")
    before = {"w": torch.ones(3)}
    tensors.write(place / "model.safetensors", {"w": torch.tensor([0.9, 1.0, 1.1])})
    capture = captured.load(place, before)
    assert (capture.whole("steps"), capture.source) == (10, trainer.STATE)
    assert "if the trainer resumed" in capture.notes[0]
    ours = captured.Capture("x", "weights", before, about={"steps": "3"})
    assert ours.source == "the file's metadata"


def test_a_trainers_folder_on_the_command_line(tmp_path, capsys, monkeypatch):
    """transformers' own Trainer, of which trl's is one: nothing is given but the files."""
    peft = pytest.importorskip("peft")
    hf = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def build(**_):
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
        config = hf.LlamaConfig(vocab_size=400, num_attention_heads=2, **sizes)
        return hf.LlamaForCausalLM(config)

    monkeypatch.setitem(sys.modules, "own_base", SimpleNamespace(build=build))
    lora = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(build(), lora)
    model.save_pretrained(tmp_path / "server")
    texts = torch.randint(400, (4, 8), generator=torch.Generator().manual_seed(1)).tolist()
    settings = {"per_device_train_batch_size": 2, "max_steps": 6, "save_steps": 6}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 100}
    run = hf.Trainer(
        model,
        hf.TrainingArguments(tmp_path / "out", **settings, **quiet),
        train_dataset=[{"input_ids": text, "labels": text} for text in texts],
    )
    run.train()
    run.save_model()
    given = ["--update", tmp_path / "out", "--adapter", tmp_path / "server"]
    words = ["--model", "own_base:build", "--vocabulary", "400", "--input-shape", "8"]
    with pytest.raises(SystemExit):
        main(["attack", *map(str, given), *words, "--attack", "adapter_words", "--time", "1"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, value in (("local steps", 6), ("batch size", 4), ("local batch size", 2)):
        # Of a training that may have resumed, on devices that may be several.
        assert f"{name}: {value} (not certain): {trainer.STATE}" in shown
    assert "Adam or similar" in shown
