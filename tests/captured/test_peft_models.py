"""Adapters of any kind, read into the model that PEFT itself built."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from leakbound import captured, tensors
from leakbound.captured import budget
from leakbound.captured.adapters import WEIGHTS, read_adapter, sent_tensors
from leakbound.cli import main
from leakbound.cli.captured import EXPOSED_CODE

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
V, N = 2000, 8
TARGETS = {"target_modules": ["q_proj", "v_proj"]}
KINDS = {
    "adalora": (peft.AdaLoraConfig, {"init_r": 4, "total_step": 100, **TARGETS}),
    "ia3": (peft.IA3Config, {"task_type": "CAUSAL_LM"}),
    "loha": (peft.LoHaConfig, {"r": 4, **TARGETS}),
    "lokr": (peft.LoKrConfig, {"r": 4, **TARGETS}),
    "pissa": (peft.LoraConfig, {"r": 4, "init_lora_weights": "pissa", **TARGETS}),
    "vera": (peft.VeraConfig, {"r": 8, **TARGETS}),
    "head": (peft.LoraConfig, {"r": 4, "modules_to_save": ["lm_head"], **TARGETS}),
}
PROMPTS = {
    "PROMPT_TUNING": peft.PromptTuningConfig,
    "PREFIX_TUNING": peft.PrefixTuningConfig,
    "P_TUNING": peft.PromptEncoderConfig,
}


def base(width=64):
    transformers = pytest.importorskip("transformers")
    settings = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=width,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(settings)


def built(kind, width=64):
    """PEFT's model as both sides build it, in training mode."""
    config, settings = KINDS[kind]
    with torch.random.fork_rng():
        return peft.get_peft_model(base(width), config(**settings))


def drawn(*size):
    return torch.randperm(V, generator=torch.Generator().manual_seed(1))[: size[0] * size[1]].view(
        size
    )


def trained(model, ids, steps=1, optimizer=torch.optim.SGD, rate=0.1):
    """After some steps on PEFT's own loss, which of AdaLoRA has a penalty."""
    model.eval()
    moved = optimizer([p for p in model.parameters() if p.requires_grad], rate)
    for _ in range(steps):
        moved.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        moved.step()
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_gives_the_outputs_of_the_model_that_wrote_it(tmp_path, kind):
    ids = drawn(2, N)
    theirs = trained(built(kind), ids, 3)
    theirs.save_pretrained(tmp_path)
    fresh = built(kind)
    kept = {name: value.clone() for name, value in fresh.state_dict().items()}
    ours = read_adapter(tmp_path, fresh)
    assert not ours.training
    with torch.no_grad():
        assert torch.equal(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)
        assert not torch.allclose(fresh.eval()(input_ids=ids).logits, theirs(input_ids=ids).logits)
    assert all(torch.equal(value, kept[name]) for name, value in fresh.state_dict().items())
    sent = sent_tensors(tmp_path, fresh)
    names = {name for name, p in ours.named_parameters() if p.requires_grad}
    assert names <= sent.keys()
    for name in names:
        assert torch.equal(sent[name], theirs.get_parameter(name))


@pytest.mark.parametrize("kind", ["adalora", "pissa"])
def test_words_of_other_kinds_are_found_on_the_command_line(tmp_path, capsys, monkeypatch, kind):
    """After AdamW; no word is wrong, also with the penalty that AdaLoRA adds to the loss.

    A list of words explains no update, so no training is simulated: large models take minutes.
    """
    monkeypatch.setattr(budget, "step_cost", lambda *_, **__: pytest.fail("training was measured"))
    monkeypatch.setitem(
        sys.modules, "own_peft", SimpleNamespace(build=lambda **_: built(kind, width=256))
    )
    ids = drawn(1, N)
    model = built(kind, width=256)
    model.save_pretrained(tmp_path / "server")
    trained(model, ids, 10, torch.optim.AdamW, 1e-3).save_pretrained(tmp_path / "client")
    words = ["--update", tmp_path / "client", "--adapter", tmp_path / "server"]
    words += ["--model", "own_peft:build", "--vocabulary", V, "--input-shape", N]
    words += ["--batch-size", 1, "--optimizer", "adamw", "--learning-rate", 1e-3]
    words += ["--local-steps", 10, "--attack", "adapter_words", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(["attack", *map(str, words)])
    assert ended.value.code == EXPOSED_CODE
    found = json.loads(capsys.readouterr().out)[0]
    stated = {int(token) for fact in found["facts"] for token in fact["items"]}
    assert len(stated) >= 3
    assert found["capture"]["explained"] is None
    assert stated <= set(ids.flatten().tolist())


@pytest.mark.parametrize("kind", PROMPTS)
def test_trained_prompts_are_refused_by_name(tmp_path, kind):
    settings = {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(base(), PROMPTS[kind](**settings))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"the kind {kind}, which puts trained rows before"):
        read_adapter(tmp_path, model)


def test_files_that_do_not_fit_are_refused(tmp_path):
    model = built("ia3")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"peft_type is 'IA3'; .* need PEFT's own model"):
        read_adapter(tmp_path, base())
    with pytest.raises(ValueError, match="is no part of the model's adapter"):
        read_adapter(tmp_path, built("vera"))
    with pytest.raises(ValueError, match=r"is \(64, 1\) .* in the model \(128, 1\)"):
        read_adapter(tmp_path, built("ia3", width=128))
    held, _ = tensors.read(tmp_path / WEIGHTS)
    held[next(iter(held))] *= float("nan")
    tensors.write(tmp_path / "nan.safetensors", held)
    with pytest.raises(ValueError, match="is not finite"):
        read_adapter(tmp_path / "nan.safetensors", model)
    tensors.write(tmp_path / "long.safetensors", {"x": torch.zeros(2**21)})
    with pytest.raises(ValueError, match="the limit is"):
        read_adapter(tmp_path / "long.safetensors", model)


def test_a_folder_of_a_trainer_names_its_checkpoint(tmp_path):
    built("ia3").save_pretrained(tmp_path / "checkpoint-10")
    with pytest.raises(ValueError, match=r"a folder of a trainer; .*checkpoint-10"):
        captured.read_adapter(tmp_path, built("ia3"))
    captured.read_adapter(tmp_path / "checkpoint-10", built("ia3"))
