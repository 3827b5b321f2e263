"""Adapters of models that read tokens twice, or more than tokens: T5, BART and CLIP."""

import pytest
import torch

from leakbound import captured
from leakbound.captured import read_adapter, sent_tensors
from leakbound.domains import TokenDomain
from leakbound.randomness import permutation, stream, uniform

peft = pytest.importorskip("peft")
hf = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
WORDS, WIDTH, LENGTH = 800, 192, 8
RATES = {"adamw": 1e-3, "sgd": 0.1}
START = 2
"""The token with which decoders start; no text holds it."""
QUERIES = {"T5": ["q", "v"]}


class Text(hf.CLIPModel):
    """CLIP as a client's text shows it: tokens alone, and one tensor; names of weights stay."""

    def forward(self, input_ids):
        return self.get_text_features(input_ids).pooler_output


def base(kind):
    both = {"vocab_size": WORDS, "d_model": WIDTH, "decoder_start_token_id": START}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "T5":
            sizes = {"num_layers": 2, "num_heads": 4, "d_kv": 48, "d_ff": WIDTH}
            model = hf.T5ForConditionalGeneration(hf.T5Config(**both, **sizes))
        elif kind == "BART":
            sizes = {
                f"{side}_{what}": size
                for side in ("encoder", "decoder")
                for what, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", WIDTH))
            }
            config = hf.BartConfig(max_position_embeddings=LENGTH, **both, **sizes)
            model = hf.BartForConditionalGeneration(config)
        else:
            shared = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
            text = {"vocab_size": WORDS, "max_position_embeddings": LENGTH, **shared}
            text |= {"eos_token_id": WORDS - 1, "bos_token_id": 0}
            seen = {"image_size": 8, "patch_size": 4, **shared}
            model = Text(hf.CLIPConfig(text_config=text, vision_config=seen, projection_dim=32))
    for name, weight in model.named_parameters():
        if "norm" in name and weight.ndim == 1 and "weight" in name:  # as training leaves them
            weight.data = 0.5 + uniform(weight.shape, stream(0, name))
    return model.eval()


def client(kind, optimizer, place, layers=None):
    """PEFT's folders before and after a client's training; the tokens that each side reads."""
    order = permutation(WORDS - 4, stream(1, kind)) + 3
    source, target = order[: 4 * LENGTH].view(2, 2, LENGTH)
    if kind == "CLIP":
        source[:, -1] = WORDS - 1
    with torch.random.fork_rng():
        torch.manual_seed(1)
        names = QUERIES.get(kind, ["q_proj", "v_proj"])
        if kind == "CLIP":
            names = r".*text_model.*\.(q_proj|v_proj)"
        lora = peft.LoraConfig(
            r=8,
            target_modules=names,
            layers_to_transform=layers,
            init_lora_weights=optimizer == "adamw",
        )
        model = peft.get_peft_model(base(kind), lora).eval()
    model.save_pretrained(place / "server")
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    rule = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]
    steps = rule(trained, lr=RATES[optimizer])
    for _ in range(5 if optimizer == "adamw" else 1):
        steps.zero_grad()
        if kind == "CLIP":
            images = torch.zeros(2, 3, 8, 8)
            images[1] = 1.0
            loss = hf.CLIPModel.forward(
                model.get_base_model(), source, pixel_values=images, return_loss=True
            ).loss
        else:
            loss = model(input_ids=source, labels=target).loss
        loss.backward()
        steps.step()
    model.save_pretrained(place / "client")
    read = set() if kind == "CLIP" else {START, *target[:, :-1].flatten().tolist()}
    return {*source.flatten().tolist()}, read


def attacked(kind, optimizer, place):
    attack = "adapter_words" if optimizer == "adamw" else "adapter_pursuit"
    model = read_adapter(place / "server", base(kind))
    update = captured.load(sent_tensors(place / "client", base(kind)), model.state_dict())
    told = captured.TrainingInfo(
        examples=2,
        learning_rate=RATES[optimizer],
        steps=5 if optimizer == "adamw" else 1,
        optimizer=optimizer,
        weight_decay=0.01 if optimizer == "adamw" else 0.0,
    )
    settings = captured.Settings(
        domain=TokenDomain(WORDS, LENGTH),
        attacks=attack,
        loss="cross_entropy" if kind == "CLIP" else "next_token",
        classes=4 if kind == "CLIP" else None,
    )
    (record,) = captured.attack_update(update, model, settings, told).records
    return record, {int(item) for fact in record.facts for item in fact.items}


@pytest.mark.parametrize("kind", ["T5", "BART", "CLIP"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_words_of_both_sides_are_found(kind, optimizer, tmp_path):
    """Every stated word is read by the encoder or by the decoder."""
    source, target = client(kind, optimizer, tmp_path)
    _, found = attacked(kind, optimizer, tmp_path)
    assert found <= source | target
    if optimizer == "sgd":
        assert found == source | target
    elif kind == "T5":
        assert min(len(found & source), len(found & target)) >= 5
    assert found - {START}


def test_later_layers_alone_state_nothing(tmp_path):
    client("T5", "adamw", tmp_path, layers=[1])
    record, found = attacked("T5", "adamw", tmp_path)
    assert not found
    assert "no adapter gets the first attention layer's inputs" in record.reason


def test_a_model_that_needs_an_image_says_what_to_give(tmp_path):
    client("CLIP", "sgd", tmp_path)
    whole = base("CLIP")
    whole.__class__ = hf.CLIPModel
    model = read_adapter(tmp_path / "server", whole)
    update = captured.load(sent_tensors(tmp_path / "client", whole), model.state_dict())
    settings = captured.Settings(domain=TokenDomain(WORDS, LENGTH), attacks="adapter_words")
    with pytest.raises(ValueError, match="a subclass whose forward takes tokens alone"):
        captured.attack_update(update, model, settings)
