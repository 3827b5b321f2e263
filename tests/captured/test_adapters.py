"""PEFT's files of adapters: read as PEFT writes them, and refused with a reason otherwise."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from leakbound import captured, tensors
from leakbound.attacks.tokens.adapters import AdapterPursuit, FirstLayer, pairs_of
from leakbound.attacks.tokens.layers import dictionary
from leakbound.captured.adapters import (
    CONFIG,
    MOST_JSON,
    WEIGHTS,
    AdapterLayer,
    read_adapter,
    read_config,
    sent_tensors,
)
from leakbound.core import Batch, LocalPlan, Observation, Task, Unit, Update
from leakbound.defenses import NoDefense
from leakbound.domains import TokenDomain
from leakbound.protocol import play
from leakbound.randomness import normal, stream

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


class Conv1D(nn.Module):
    """As transformers' layer of this name: the weight is (inputs, outputs)."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(inputs, outputs)), None

    def forward(self, x):
        return x @ self.weight


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 16)
        self.query = nn.Linear(16, 16)
        self.mix = Conv1D(12, 16)
        self.head = nn.Linear(12, 3)
        for k, p in enumerate(self.parameters()):
            p.data = normal(p.shape, stream(k, "base"), like=p.data) / 4

    def forward(self, ids):
        return self.head(self.mix(self.query(self.words(ids)).tanh()).mean(1))


SETTINGS = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 6,
    "target_modules": ["query", "mix"],
    "modules_to_save": ["head"],
    "use_dora": False,
    "use_rslora": False,
    "init_lora_weights": True,
    "bias": "none",
}
SHAPES = {
    "query.lora_A": (2, 16),
    "query.lora_B": (16, 2),
    "mix.lora_A": (2, 16),
    "mix.lora_B": (12, 2),
    "head": (3, 12),
}


def values(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The tensors of a whole file; `shapes` replaces some, or leaves them out (None)."""
    wanted = {**SHAPES, **{k.replace("__", "."): v for k, v in shapes.items()}}
    return {
        f"base_model.model.{name}.weight": normal(shape, stream(k, "file"))
        for k, (name, shape) in enumerate(wanted.items())
        if shape is not None
    }


def written(place: Path, named=None, **settings) -> Path:
    place.mkdir(exist_ok=True)
    tensors.write(place / WEIGHTS, values() if named is None else named)
    (place / CONFIG).write_text(json.dumps({**SETTINGS, **settings}))
    return place


def observed(sent, task: Task, length: int) -> Observation:
    """What a server sees that gets these weights of one sequence."""
    capture = captured.load(sent, task.unflatten(task.parameters), kind="weights")
    after = tensors.flat(task, capture.update, what="update")
    rows = (task.parameters - after)[None] / task.plan.learning_rate
    return Observation(Update(rows, Unit.CLIENT, (1,)), task, (1,), (length,), sent=after[None])


@pytest.mark.parametrize("root", [False, True])
def test_file_becomes_the_adapted_model(tmp_path, root):
    """y = W x + s B A x at both kinds of layers, computed by hand."""
    base, ids = Base(), torch.arange(6).view(2, 3)
    before = {k: v.clone() for k, v in base.state_dict().items()}
    model = read_adapter(written(tmp_path / "a", use_rslora=root), base)
    file = {k.removeprefix("base_model.model."): v for k, v in values().items()}
    scale = 6 / 2**0.5 if root else 3.0
    x = base.words(ids)
    for name, weight in (("query", base.query.weight), ("mix", base.mix.weight.T)):
        up, down = file[f"{name}.lora_B.weight"], file[f"{name}.lora_A.weight"]
        x = x @ (weight + scale * up @ down).T
        x = (x + base.query.bias).tanh() if name == "query" else x
    wanted = x.mean(1) @ file["head.weight"].T + base.head.bias
    assert torch.allclose(model(ids), wanted, atol=1e-5)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == set(file)
    assert not model.training
    assert all(torch.equal(v, before[k]) for k, v in base.state_dict().items())


def test_ranks_and_factors_of_single_modules(tmp_path):
    named = values(mix__lora_A=(3, 16), mix__lora_B=(12, 3))
    model = read_adapter(
        written(tmp_path / "a", named, rank_pattern={"mix": 3}, alpha_pattern={"mix": 12}), Base()
    )
    assert (model.query.scale, model.mix.scale) == (3.0, 4.0)


def test_missing_tensors_were_not_sent(tmp_path):
    """The client sends B of one layer alone; this is what the task trains, and what is loaded."""
    whole = written(tmp_path / "server")
    some = {k: v + 1 for k, v in values().items() if "query.lora_B" in k}
    part = written(tmp_path / "client", some)
    base = Base()
    model = read_adapter(whole, base, update=part)
    task = Task.of(model, domain=TokenDomain(40, 3))
    assert [name for name, *_ in task.layout] == ["query.lora_B.weight"]
    sent = sent_tensors(part, base)
    seen = observed(sent, task, 3)
    assert torch.allclose(seen.update.rows, torch.tensor(-1.0))
    without = {k: v for k, v in values().items() if "mix" not in k}
    assert not isinstance(read_adapter(written(tmp_path / "b", without), base).mix, AdapterLayer)
    with pytest.raises(ValueError, match=r"lacks lora_A of query"):
        read_adapter(part, base)


@pytest.mark.parametrize("dora", [False, True])
def test_adapter_of_a_file_is_attacked(tmp_path, dora):
    """From the server's file and the client's, without PEFT, to the tokens."""
    base = Base()
    named = values()
    if dora:
        for name, size in (("query", 16), ("mix", 12)):
            named[f"base_model.model.{name}.lora_magnitude_vector"] = torch.ones(size)
    server = written(tmp_path / "server", named, use_dora=dora)
    model = read_adapter(server, base)
    task = Task.of(model, domain=TokenDomain(40, 4), plan=LocalPlan(1, 0.1))
    ids = torch.tensor([[3, 9, 11, 30]])
    sources = [stream(0, "play", k) for k in range(2)]
    row = play(task, [Batch(ids, torch.tensor([1]))], NoDefense(), sources).observation.update.rows
    after = task.unflatten(task.parameters - 0.1 * row[0])
    back = {f"base_model.model.{k}": v for k, v in after.items()}
    client = written(tmp_path / "client", back, use_dora=dora)
    seen = observed(sent_tensors(client, base), task, 4)
    found = AdapterPursuit().found(seen)
    assert set(found.tokens) == {3, 9, 11, 30}


REFUSED = {
    "DoRA": ({"use_dora": 2}, "use_dora is 2; give true or false"),
    "type": ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    "no type": ({"peft_type": None}, "peft_type is None"),
    "bias": ({"bias": "all"}, "bias is 'all'"),
    "PiSSA": ({"init_lora_weights": "pissa"}, "changes the base"),
    "rank": ({"r": 0}, "r is 0"),
    "rank of text": ({"r": "2"}, "r is '2'"),
    "no bool": ({"r": True}, "r is True"),
    "huge rank": ({"r": 10**9}, "give a rank from 1"),
    "alpha": ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
    "other rank": ({"r": 3}, "rank 3 and the base ask"),
    "base": ({"target_modules": ["query", "elsewhere"]}, "names 'elsewhere'"),
    "targets": ({"target_modules": [1]}, "target_modules is"),
    "not a target": ({"target_modules": ["query"]}, "is not among target_modules"),
    "pattern": ({"rank_pattern": {"(a+)+$": 3}}, "without regular expressions"),
    "not saved": ({"modules_to_save": None}, "neither a LoRA weight nor in modules_to_save"),
    "tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices is set"),
    "repeated": ({"layer_replication": [[0, 1]]}, "layer_replication is set"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_are_refused(tmp_path, name):
    settings, words = REFUSED[name]
    with pytest.raises(ValueError, match=words.replace("(", r"\(")) as error:
        read_adapter(written(tmp_path / "a", **settings), Base())
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


NAMED = {
    "no module": ({"base_model.model.gone.lora_A.weight": (2, 16)}, "the base does not have"),
    "no layer": ({"base_model.model.words.lora_A.weight": (2, 16)}, "adapts a Embedding"),
    "embedding": ({"base_model.model.words.lora_embedding_A": (2, 40)}, "no weight of a linear"),
    "magnitude": ({"base_model.model.query.lora_magnitude_vector": (16,)}, "no weight of a linear"),
    "unknown": ({"base_model.model.query.weight": (16, 16)}, "neither a LoRA weight"),
    "shape": ({"base_model.model.head.weight": (4, 12)}, r"in the base \(3, 12\)"),
    "width": ({"base_model.model.query.lora_A.weight": (2, 15)}, r"ask \(2, 16\)"),
}


@pytest.mark.parametrize("name", NAMED)
def test_tensors_that_are_refused(tmp_path, name):
    shapes, words = NAMED[name]
    named = {**values(), **{k: torch.ones(shape) for k, shape in shapes.items()}}
    with pytest.raises(ValueError, match=words):
        read_adapter(written(tmp_path / "a", named), Base())


def test_dora_without_a_magnitude_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"lacks lora_magnitude_vector of (mix|query)"):
        read_adapter(written(tmp_path / "a", use_dora=True), Base())


def test_values_that_are_refused(tmp_path):
    named = values()
    named["base_model.model.head.weight"][0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"head.weight is not finite"):
        read_adapter(written(tmp_path / "a", named), Base())
    whole = {**values(), "base_model.model.query.lora_A.weight": torch.ones(2, 16).long()}
    with pytest.raises(ValueError, match=r"of torch.int64; rank 2"):
        read_adapter(written(tmp_path / "b", whole), Base())


def test_sizes_are_checked_before_tensors_are_read(tmp_path, monkeypatch):
    big = {**values(), "base_model.model.head.weight": torch.zeros(2**21)}
    place = written(tmp_path / "a", big)
    opened = []
    monkeypatch.setattr(tensors.files, "safe_open", lambda *a, **k: opened.append(a))
    with pytest.raises(ValueError, match=r"the limit is 0\.\d\d GiB"):
        read_adapter(place, Base())
    assert not opened


def test_files_that_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        read_adapter(tmp_path / "none", Base())
    place = written(tmp_path / "a")
    (place / CONFIG).unlink()
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_adapter(place, Base())
    for text, words in (
        ("{", "not valid JSON"),
        ("[" * 10**5, "not valid JSON"),
        ("[1]", "holds a list"),
        (" " * (MOST_JSON + 1), "is over"),
    ):
        (place / CONFIG).write_text(text)
        with pytest.raises(ValueError, match=words):
            read_config(place / CONFIG)
    (place / WEIGHTS).write_bytes(b"\xff" * 64)
    (place / CONFIG).write_text(json.dumps(SETTINGS))
    with pytest.raises(ValueError, match="not a valid safetensors file"):
        read_adapter(place, Base())
    (place / WEIGHTS).rename(place / "adapter_model.bin")
    with pytest.raises(ValueError, match="a pickle"):
        read_adapter(place, Base())
    other = (place / "adapter_model.bin").rename(place / "adapter.npz")
    with pytest.raises(ValueError, match=r"give a folder or a .safetensors file"):
        read_adapter(other, Base())


def test_quantized_bases_are_refused(tmp_path):
    place = written(tmp_path / "a")
    base = Base()
    base.query = type("Linear4bit", (nn.Linear,), {})(16, 16)
    with pytest.raises(ValueError, match="base is quantized"):
        read_adapter(place, base)
    base = Base()
    base.query.weight = nn.Parameter(torch.ones(16, 16, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"query.weight is of torch.int8"):
        read_adapter(place, base)
    base = Base()
    base.config = type("Config", (), {"quantization_config": {"bits": 4}})()
    with pytest.raises(ValueError, match="its config says so"):
        read_adapter(place, base)


def made(kind: str, **settings):
    """A base of transformers and PEFT's model of it, with random B."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "gpt2":
            config = transformers.GPT2Config(
                vocab_size=100,
                n_positions=16,
                n_embd=32,
                n_layer=2,
                n_head=2,
                bos_token_id=0,
                eos_token_id=0,
            )
            base = transformers.GPT2LMHeadModel(config)
            settings = {"target_modules": ["c_attn"], "fan_in_fan_out": True, **settings}
        else:
            config = transformers.LlamaConfig(
                vocab_size=100,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=16,
                tie_word_embeddings=settings.pop("tied", False),
            )
            base = transformers.LlamaForCausalLM(config)
            settings = {"target_modules": ["q_proj", "v_proj"], **settings}
        held = {k: v.clone() for k, v in base.state_dict().items()}
        fresh = type(base)(config)
        fresh.load_state_dict(held)
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=6, **settings)).eval()
        for p in model.parameters():
            if p.requires_grad:
                nn.init.normal_(p, std=0.1)
    return fresh.eval(), model


CASES = {
    "gpt2": ("gpt2", {}),
    "llama": ("llama", {}),
    "rslora": ("llama", {"use_rslora": True}),
    "dora": ("llama", {"use_dora": True}),
    "dora of gpt2": ("gpt2", {"use_dora": True, "use_rslora": True}),
    "patterns": ("llama", {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 3}}),
    "all": ("llama", {"target_modules": "all-linear"}),
    "head": ("llama", {"modules_to_save": ["lm_head"]}),
    "words": ("llama", {"modules_to_save": ["embed_tokens"]}),
}


@pytest.mark.parametrize("name", CASES)
def test_files_of_peft_give_its_outputs_and_gradients(tmp_path, name):
    """Ours against PEFT's own model: logits, and the gradient of every tensor that is sent."""
    base, theirs = made(CASES[name][0], **CASES[name][1])
    theirs.save_pretrained(tmp_path)
    ours = read_adapter(tmp_path, base)
    ids = torch.arange(12).view(2, 6)
    grads = []
    for model in (ours, theirs):
        logits = model(ids).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        grads.append(
            {
                k.removeprefix("base_model.model.")
                .replace(".default", "")
                .replace("magnitude_vector.weight", "magnitude_vector")
                .replace(".modules_to_save", ""): p.grad
                for k, p in model.named_parameters()
                if p.grad is not None
            }
        )
        with torch.no_grad():
            grads[-1]["logits"] = logits.detach()
    assert grads[0].keys() == grads[1].keys()
    for key, value in grads[0].items():
        assert float((value - grads[1][key]).norm()) <= 1e-6 * float(value.norm()), key
    assert sent_tensors(tmp_path, base).keys() == grads[0].keys() - {"logits"}


def test_frozen_weights_are_shared_and_never_written(tmp_path):
    """Those of a language model take gigabytes: neither the reader nor the task copies them."""
    base = Base()
    kept = {name: value.clone() for name, value in base.state_dict().items()}
    tensors.write(tmp_path / WEIGHTS, values())
    (tmp_path / CONFIG).write_text(json.dumps(SETTINGS))
    model = read_adapter(tmp_path, base)
    task = Task.of(model, domain=TokenDomain(40, 4), loss="cross_entropy", classes=3)
    words = base.words.weight
    assert task.frozen["words.weight"].data_ptr() == words.data_ptr()
    assert words.requires_grad
    trained = torch.arange(4)[None]
    play(
        task,
        [Batch(trained, torch.tensor([1]))],
        NoDefense(),
        [stream(0, "client"), stream(0, "cohort")],
    )
    for name, value in base.state_dict().items():
        assert torch.equal(value, kept[name])
    assert base.head.weight.data_ptr() != model.head.weight.data_ptr()


def test_inputs_of_an_adapter_do_not_take_the_frozen_layer(monkeypatch, tmp_path):
    base = Base()
    tensors.write(tmp_path / WEIGHTS, values())
    (tmp_path / CONFIG).write_text(json.dumps(SETTINGS))
    task = Task.of(read_adapter(tmp_path, base), domain=TokenDomain(40, 4), classes=3)
    pairs = pairs_of(task)
    (layer,) = FirstLayer.each(task, pairs)
    assert layer.hook == "query"
    called = []
    forward = AdapterLayer.forward
    monkeypatch.setattr(AdapterLayer, "forward", lambda own, x: called.append(1) or forward(own, x))
    assert len(list(dictionary(task, layer.hook, 1))) == 1
    assert not called
