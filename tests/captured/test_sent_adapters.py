"""Adapters that a client sent as PEFT's files, from the command line and from Python."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from leakbound import captured, models, tensors
from leakbound.attacks.labels import infer_labels
from leakbound.attacks.tokens.adapters import AdapterPursuit
from leakbound.attacks.tokens.rows import TokenRows
from leakbound.captured.adapters import CONFIG, WEIGHTS
from leakbound.cli import main
from leakbound.cli.captured import EXPOSED_CODE
from leakbound.client import local_update
from leakbound.core import LocalPlan, Task
from leakbound.domains import TokenDomain
from leakbound.randomness import normal, stream

from .flat import attack_update

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
V, N, WIDTH, RANK, RATE = 60, 8, 32, 4, 0.1
WORDS = ["--vocabulary", str(V), "--input-shape", str(N), "--model", "own_base:build"]
TOLD = ["--batch-size", "1", "--learning-rate", str(RATE), "--local-steps", "1"]
LAYERS = [f"blocks.{k}.{name}" for k in range(2) for name in ("query", "value")]


def attack(capsys, *words):
    """The exit code, and what was printed."""
    with pytest.raises(SystemExit) as ended:
        main(["attack", *map(str, words)])
    shown = capsys.readouterr()
    return ended.value.code, shown.out, shown.err


def build(**settings):
    given = {"vocabulary": V, "width": WIDTH, "positions": "rotary", **settings}
    return models.decoder(
        input_shape=(N,), classes=given.pop("classes", V), generator=stream(0, "base"), **given
    ).eval()


class Classifier(nn.Module):
    """The decoder's mean output as classes."""

    def __init__(self):
        super().__init__()
        self.body, self.score = build(), nn.Linear(V, 4)

    def forward(self, tokens):
        return self.score(self.body(tokens).mean(1))


def written(place, named, saved=()):
    """A folder as PEFT writes it."""
    place.mkdir(exist_ok=True)
    tensors.write(place / WEIGHTS, {f"base_model.model.{k}": v for k, v in named.items()})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "modules_to_save": list(saved)}
    config["target_modules"] = ["query", "value"]
    (place / CONFIG).write_text(json.dumps(config))
    return place


def server(place, base, saved=(), start=0.05):
    """The adapter that the server sent, with copies of the base's own modules."""
    prefix = "body." if isinstance(base, Classifier) else ""
    named = {}
    for k, name in enumerate(LAYERS):
        a, b = (RANK, WIDTH), (WIDTH, RANK)
        named[f"{prefix}{name}.lora_A.weight"] = normal(a, stream(k, "A")) / WIDTH**0.5
        named[f"{prefix}{name}.lora_B.weight"] = normal(b, stream(k, "B")) * start
    named |= {k: v for k, v in base.state_dict().items() if any(f"{s}." in k for s in saved)}
    return written(place, named, saved)


def client(place, base, adapter, inputs, labels, saved=(), loss="next_token"):
    """What the client sends back after a step."""
    model = captured.read_adapter(adapter, base)
    plan = LocalPlan(1, RATE)
    task = Task.of(model, domain=TokenDomain(V, N), loss=loss, classes=4, plan=plan)
    row = local_update(task, inputs, labels)
    return written(place, task.unflatten(task.parameters - RATE * row), saved)


@pytest.fixture
def ids():
    return torch.randperm(V, generator=torch.Generator().manual_seed(3))[:N][None]


@pytest.fixture
def own_base(monkeypatch):
    base = build()
    monkeypatch.setitem(sys.modules, "own_base", SimpleNamespace(build=lambda **_: base))
    return base


def found_in(text):
    """The tokens of the one answer in a JSON record."""
    return {int(token) for token in json.loads(text)[0]["sequences"][0]["reconstruction"]}


def test_a_sent_adapter_gives_its_tokens_on_the_command_line(tmp_path, capsys, own_base, ids):
    sent = server(tmp_path / "server", own_base)
    back = client(tmp_path / "client", own_base, sent, ids, ids)
    for update, adapter in ((back, sent), (back / WEIGHTS, sent / WEIGHTS)):
        words = ("--update", update, "--adapter", adapter, *WORDS, *TOLD)
        code, out, _ = attack(capsys, *words, "--attack", "adapter_pursuit", "--json")
        assert code == EXPOSED_CODE
        assert found_in(out) == set(ids[0, :-1].tolist())  # nothing attends to the last one
        assert "certain" not in json.loads(out)[0]["problem"]
    tensors.write(tmp_path / "truth.safetensors", {"inputs": ids, "labels": ids})
    code, out, _ = attack(capsys, *words, "--truth", tmp_path / "truth.safetensors")
    assert code == EXPOSED_CODE
    assert "adapter_pursuit" in out
    assert "client" in out


def test_a_tokenizer_gives_words_in_place_of_numbers(tmp_path, capsys, own_base, ids):
    tokenizers = pytest.importorskip("tokenizers")
    sent = server(tmp_path / "server", own_base)
    back = client(tmp_path / "client", own_base, sent, ids, ids)
    texts = {f"zq{token}zq": token for token in range(V)}
    held = tokenizers.Tokenizer(tokenizers.models.WordLevel(texts, unk_token="zq0zq"))
    held.save(str(tmp_path / "tokenizer.json"))
    words = ["--update", back, "--adapter", sent, "--model", "own_base:build", *TOLD]
    words += ["--input-shape", str(N), "--tokenizer", tmp_path / "tokenizer.json"]
    code, out, _ = attack(capsys, *words, "--attack", "adapter_pursuit", "--json")
    assert code == EXPOSED_CODE
    (fact,) = json.loads(out)[0]["facts"]
    assert set(fact["items"]) == {f"zq{token}zq" for token in ids[0, :-1].tolist()}
    # Files that may be shared hold none of them.
    for where, options in (("open", []), ("shared", ["--no-examples"])):
        out = tmp_path / where
        attack(capsys, *words, "--attack", "adapter_pursuit", "--out", out, *options)
        for name in ("records.jsonl", "report.html"):
            text = (out / name).read_text("utf-8")
            held = any(f"zq{token}zq" in text for token in ids[0, :-1].tolist())
            assert held == (where == "open"), (where, name)
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "open"), "--no-examples"])
    text = (tmp_path / "open" / "report.html").read_text("utf-8")
    assert not any(f"zq{token}zq" in text for token in ids[0, :-1].tolist())
    assert "words occur: (withheld)" in text
    code, _, err = attack(capsys, *words, "--vocabulary", 8)
    assert code == 2
    assert f"has {V} tokens, and the model 8" in err.replace("\n", " ")


def test_peft_to_tokens_on_the_command_line(tmp_path, capsys, monkeypatch, ids):
    """PEFT trains and saves; what the server holds is attacked without PEFT."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    settings = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(settings)
        base = transformers.LlamaForCausalLM(settings).eval()
        base.load_state_dict(model.state_dict())
        lora = peft.LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"])
        trained = peft.get_peft_model(model, lora).eval()
        for name, p in trained.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.05)
    trained.save_pretrained(tmp_path / "server")
    steps = torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], RATE)
    trained(input_ids=ids, labels=ids).loss.backward()
    steps.step()
    trained.save_pretrained(tmp_path / "client")
    monkeypatch.setitem(sys.modules, "own_base", SimpleNamespace(build=lambda **_: base))
    words = ("--update", tmp_path / "client", "--adapter", tmp_path / "server", *WORDS, *TOLD)
    code, out, _ = attack(capsys, *words, "--attack", "adapter_pursuit", "--json")
    assert code == EXPOSED_CODE
    assert found_in(out) == set(ids[0, :-1].tolist())


def test_errors_of_adapters_are_one_line(tmp_path, capsys, monkeypatch, own_base, ids):
    sent = server(tmp_path / "server", own_base)
    back = client(tmp_path / "client", own_base, sent, ids, ids)
    bare = tmp_path / "bare.safetensors"
    bare.write_bytes((back / WEIGHTS).read_bytes())
    pickled, alone = tmp_path / "pickled", tmp_path / "alone"
    for place in (pickled, alone):
        place.mkdir()
    (pickled / "adapter_model.bin").write_bytes(b"x")
    (alone / WEIGHTS).write_bytes((back / WEIGHTS).read_bytes())
    for words, said in (
        (("--update", back), "give the adapter that the server sent (--adapter PATH)"),
        (("--update", back / WEIGHTS), "give the adapter that the server sent (--adapter PATH)"),
        (("--update", bare, "--kind", "weights"), "it is an adapter: give the one that was sent"),
        (("--update", alone, "--adapter", sent), "adapter_config.json' cannot be read"),
        (("--update", pickled, "--adapter", sent), "a pickle that can run code"),
        (("--update", back, "--adapter", pickled / "adapter_model.bin"), "a pickle that can run"),
        (("--update", back, "--adapter", sent, "--before", bare), "leave before out"),
        (("--update", back, "--adapter", sent, "--round", 1), "leave round out"),
        (("--adapter", sent), "give --update FILE too"),
        (("--update", sent, "--adapter", sent), "are identical in every tensor"),
    ):
        code, _, err = attack(capsys, *words, *WORDS)
        assert code == 2
        assert said in err.replace("\n", " ")
    other = SimpleNamespace(build=lambda **_: nn.Linear(3, 3))
    wider = SimpleNamespace(build=lambda **_: build(width=64))
    for module, said in ((other, "'query', which the base does not have"), (wider, "the base ask")):
        monkeypatch.setitem(sys.modules, "own_base", module)
        code, _, err = attack(capsys, "--update", back, "--adapter", sent, *WORDS)
        assert code == 2
        assert said in err.replace("\n", " ")


def test_places_and_vocabulary_are_the_models(tmp_path, capsys, monkeypatch):
    base = build(positions="learned")
    monkeypatch.setitem(sys.modules, "own_base", SimpleNamespace(build=lambda **_: base))
    before = base.state_dict()
    start, after = tmp_path / "before.safetensors", tmp_path / "after.safetensors"
    tensors.write(start, before)
    tensors.write(after, {k: v * 1.01 for k, v in before.items()})
    words = ("--update", after, "--before", start)
    for length, tokens, said in (
        (N + 1, V, "more tokens or places than it has"),
        (N, V + 1, f"has {V} tokens; give --vocabulary {V}"),
        (N, V - 1, f"has {V} tokens; give --vocabulary {V}"),
    ):
        for more in ((), ("--classes", V)):
            shape = ("--input-shape", length, "--vocabulary", tokens, "--model", "own_base:build")
            code, _, err = attack(capsys, *words, *shape, *more)
            assert code == 2
            assert said in " ".join(err.split())


def test_a_fixed_table_of_places_is_one_line(tmp_path):
    """Positions that are added as a parameter raise another error than a lookup."""

    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(V, 8), nn.Linear(8, V)
            self.places = nn.Parameter(torch.zeros(N, 8))

        def forward(self, tokens):
            return self.head(self.words(tokens) + self.places)

    before = {k: v + 0.01 for k, v in Fixed().state_dict().items()}
    after = {k: v * 1.01 for k, v in before.items()}
    capture = captured.load(after, before, kind="weights")
    settings = {"loss": "next_token", "examples": 1}
    with pytest.raises(ValueError, match="the model cannot take inputs of") as error:
        attack_update(capture, Fixed(), domain=TokenDomain(V, N + 1), **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("examples", [1, 4])
def test_a_saved_head_shows_labels(tmp_path, examples):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = Classifier().eval()
    right = 0
    for seed in range(5):
        source = torch.Generator().manual_seed(seed)
        ids = torch.randint(V, (examples, N), generator=source)
        labels = torch.randint(4, (examples,), generator=source)
        sent = server(tmp_path / "server", base, ["score"])
        back = client(tmp_path / "client", base, sent, ids, labels, ["score"], "cross_entropy")
        model = captured.read_adapter(sent, base, update=back)
        capture = captured.load(captured.sent_tensors(back, base), model.state_dict())
        task = Task.of(model, domain=TokenDomain(V, N), classes=4)
        seen = captured.observe(
            capture,
            task,
            input_shape=(N,),
            training=captured.TrainingInfo(examples=examples, learning_rate=RATE, steps=1),
        )
        right += infer_labels(seen, stream(seed)).tolist() == sorted(labels.tolist())
        assert set(AdapterPursuit().tokens(seen)) <= set(ids.flatten().tolist())
    assert right == 5


def test_a_saved_word_table_shows_tokens(tmp_path, ids):
    base = build()
    sent = server(tmp_path / "server", base, ["tokens"])
    back = client(tmp_path / "client", base, sent, ids, ids, ["tokens"])
    model = captured.read_adapter(sent, base, update=back)
    capture = captured.load(captured.sent_tensors(back, base), model.state_dict())
    found = attack_update(
        *(capture, model),
        domain=TokenDomain(V, N),
        loss="next_token",
        examples=1,
        learning_rate=RATE,
        steps=1,
    )
    assert found.records[0].attack.name == "token_rows"
    assert found.records[0].status == "ok"
    task = Task.of(model, domain=TokenDomain(V, N), loss="next_token")
    seen = captured.observe(
        capture,
        task,
        input_shape=(N,),
        training=captured.TrainingInfo(examples=1, learning_rate=RATE, steps=1),
    )
    assert TokenRows().tokens(seen) == tuple(sorted(ids[0, :-1].tolist()))
