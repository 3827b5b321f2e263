"""LoRA of other families and clients: adds to docs/results/language_models.json.

Nothing is downloaded: sentences of Python's help texts train models of random weights.

    pip install bitsandbytes
    python benchmarks/adapter_clients.py [SEEDS [LINES]]

LINES, numbers from 0, prints only some of the lines.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers as hf
from adapter_formats import PLACES, WIDTH, texts
from language_models import write
from torch import Tensor, nn

from leakbound import captured
from leakbound.domains import TokenDomain

HEADING = "LoRA of other families and clients"
HEADS = ["model", "client", "optimizer", "steps", "attack", "right", "wrong"]
WORDS = (
    "Clients train LoRA of rank 8 on queries and values with 4 sentences of 16 tokens of Python's "
    f"help texts; models of two layers and width {WIDTH} have random weights, also in their norms "
    "(`benchmarks/adapter_clients.py`). SGD takes one step of a later round, in which B is random "
    "of deviation 0.02. T5 and BART read a sentence and write another; CLIP (a subclass that takes "
    "tokens alone) compares sentences with random images. *Padded* sentences begin after 0 to 7 "
    "places on the left. *Packed* ones are one sequence of 64 places. *Prompt* has no loss in its "
    "first half. bitsandbytes quantizes layers (*NF4*, *int8*), and the word table where the line "
    "says so; the attack gets the float model. *Merged* clients send weights to which they "
    "added the adapter, whose start nobody else knows; they train at a rate of 0.001. *Right* is "
    "the share of a client's different words that are stated (mean, 95 % interval over clients); "
    "*wrong* counts clients of whom a word is stated that no layer read."
)
ADAPTED = {
    "T5": ["q", "v"],
    "CLIP": r".*text_model.*\.(q_proj|v_proj)",
    "ModernBERT": ["Wqkv"],
    "DeBERTa-v2": ["query_proj", "value_proj"],
}
CLASSIFIED = "ModernBERT", "DeBERTa-v2"
CLASSES = 4
RATES = {"AdamW": 2e-4, "SGD": 0.1}
MERGED_RATE = 1e-3
START = 0
"""The token with which decoders start."""
IMAGE = 8


class Text(hf.CLIPModel):
    """CLIP's text alone; the names of its weights stay."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """Features of texts."""
        return self.get_text_features(input_ids).pooler_output


@dataclass(frozen=True)
class Case:
    """One line: a model, what its client does, and how it trains."""

    family: str
    client: str = "plain"
    optimizer: str = "AdamW"
    steps: int = 10

    @property
    def attack(self) -> str:
        """The one that reads such updates."""
        return "adapter_words" if self.optimizer == "AdamW" else "adapter_pursuit"

    @property
    def rate(self) -> float:
        """The learning rate."""
        return MERGED_RATE if self.client == "merged" else RATES[self.optimizer]


CASES = [
    *(Case(family) for family in ("T5", "BART", "CLIP", *CLASSIFIED, "Llama")),
    *(Case(family, optimizer="SGD", steps=1) for family in ("T5", "BART", "CLIP", *CLASSIFIED)),
    *(Case("Llama", client) for client in ("padded", "packed", "prompt", "dropout of 0.1")),
    *(Case("Llama", client) for client in ("NF4 layers", "NF4 layers and table", "int8 layers")),
    *(Case("Llama", client, "SGD", 1) for client in ("NF4 layers", "NF4 layers and table")),
    *(Case("Llama", "merged", steps=steps) for steps in (30, 100, 300)),
]


@cache
def count() -> int:
    """Words of the vocabulary."""
    return len(texts().words)


def base_of(family: str, seed: int, dropout: float = 0.0) -> Any:
    """A model of random weights."""
    both = {"vocab_size": count(), "d_model": WIDTH, "decoder_start_token_id": START}
    shared = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 2 * WIDTH}
    torch.manual_seed(seed)
    model: Any
    if family == "T5":
        sizes = {"num_layers": 2, "num_heads": 4, "d_kv": 64, "d_ff": 2 * WIDTH}
        model = hf.T5ForConditionalGeneration(hf.T5Config(**both, **sizes))
    elif family == "BART":
        sides = [{f"{k}_layers": 2, f"{k}_attention_heads": 4} for k in ("encoder", "decoder")]
        wide = {f"{k}_ffn_dim": 2 * WIDTH for k in ("encoder", "decoder")}
        config = hf.BartConfig(
            max_position_embeddings=PLACES, **both, **wide, **sides[0], **sides[1]
        )
        model = hf.BartForConditionalGeneration(config)
    elif family in CLASSIFIED:
        own = {"vocab_size": count(), "hidden_size": WIDTH, "num_labels": CLASSES}
        own |= {"max_position_embeddings": PLACES, "pad_token_id": 0}
        if family == "ModernBERT":
            marks = {f"{name}_token_id": 0 for name in ("bos", "eos", "cls", "sep")}
            config = hf.ModernBertConfig(**own, **shared, **marks)
            model = hf.ModernBertForSequenceClassification(config)
        else:
            relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
            config = hf.DebertaV2Config(**own, **shared, **relative)
            model = hf.DebertaV2ForSequenceClassification(config)
    elif family == "CLIP":
        read = {"vocab_size": count(), "max_position_embeddings": PLACES, "hidden_size": WIDTH}
        read |= {"eos_token_id": count() - 1, "bos_token_id": 0}
        seen = {"image_size": IMAGE, "patch_size": IMAGE // 2, "hidden_size": 64}
        model = Text(hf.CLIPConfig(text_config=shared | read, vision_config=shared | seen))
    else:
        own = {"vocab_size": count(), "hidden_size": WIDTH, "tie_word_embeddings": False}
        config = hf.LlamaConfig(pad_token_id=0, attention_dropout=dropout, **own, **shared)
        model = hf.LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            nn.init.uniform_(weight, 0.5, 1.5)
    return model.eval()


def quantized(model: Any, client: str) -> Any:
    """The model with layers, and perhaps the word table, as bitsandbytes quantizes them."""
    from bitsandbytes import functional as quantizer

    kind = client.partition(" ")[0]
    bits = {"NF4": {"load_in_4bit": True}, "int8": {"load_in_8bit": True}}[kind]
    settings = hf.BitsAndBytesConfig(bnb_4bit_quant_type="nf4", **bits)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        read = type(model).from_pretrained(folder, quantization_config=settings, device_map="cpu")
    if "table" in client:  # its values; bitsandbytes cannot save a quantized table
        table = read.get_input_embeddings().weight
        table.data = quantizer.dequantize_4bit(*quantizer.quantize_4bit(table, quant_type="nf4"))
    return read.eval()


def drawn(case: Case, source: torch.Generator) -> tuple[dict[str, Tensor], set[int]]:
    """What the client's model gets, and the words in it."""
    chosen = torch.randperm(len(texts().inputs), generator=source)[:8]
    ids, target = texts().inputs[chosen].view(2, 4, PLACES).clone()
    if case.family == "CLIP":
        ids[:, -1] = count() - 1
        images = torch.randn(4, 3, IMAGE, IMAGE, generator=source)
        return {"input_ids": ids, "pixel_values": images}, {*ids.flatten().tolist()}
    if case.family in CLASSIFIED:
        classes = torch.randint(CLASSES, (len(ids),), generator=source)
        return {"input_ids": ids, "labels": classes}, {*ids.flatten().tolist()}
    if case.family != "Llama":
        return {"input_ids": ids, "labels": target}, {*ids.flatten().tolist()} | {
            START,
            *target[:, :-1].flatten().tolist(),
        }
    labels = ids.clone()
    more = dict[str, Tensor]()
    if case.client == "padded":
        begins = torch.randint(PLACES // 2, (4, 1), generator=source)
        kept = torch.arange(PLACES) >= begins
        ids = ids * kept
        labels = labels.where(kept, -100)
        more = {"attention_mask": kept.long()}
    if case.client == "packed":
        more = {"position_ids": torch.arange(PLACES).repeat(4)[None]}
        ids = ids.view(1, -1)
        labels = ids.clone()
        labels[:, ::PLACES] = -100
    if case.client == "prompt":
        labels[:, : PLACES // 2] = -100
    return {"input_ids": ids, "labels": labels, **more}, {*ids.flatten().tolist()}


def trained(case: Case, seed: int, place: Path) -> tuple[nn.Module, captured.Capture, set[int]]:
    """The model that the attacker has, what the client sent, and its words."""
    dropout = 0.1 if "dropout" in case.client else 0.0
    base = base_of(case.family, seed, dropout)
    if "layers" in case.client:
        base = quantized(base, case.client)
    kept = base.state_dict() if case.client == "merged" else {}
    before = {name: value.clone() for name, value in kept.items()}
    targets = ADAPTED.get(case.family, ["q_proj", "v_proj"])
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules=targets, lora_dropout=dropout)
    model = peft.get_peft_model(base, lora).train(dropout > 0)
    for name, weight in model.named_parameters():
        if case.optimizer == "SGD" and "lora_B" in name:
            nn.init.normal_(weight, std=0.02)
    model.save_pretrained(place / "server")
    given, words = drawn(case, torch.Generator().manual_seed(60_000 + seed))
    rule = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}[case.optimizer]
    steps = rule([p for p in model.parameters() if p.requires_grad], lr=case.rate)
    run = model
    if case.family == "CLIP":
        inner = model.get_base_model()

        def run(**given: Tensor) -> Any:
            return hf.CLIPModel.forward(inner, return_loss=True, **given)

    for _ in range(case.steps):
        steps.zero_grad()
        run(**given).loss.backward()
        steps.step()
    if case.client == "merged":
        update = captured.load(model.merge_and_unload().state_dict(), before)
        attacked = base_of(case.family, seed)
        for name, weight in attacked.named_parameters():
            weight.requires_grad_("q_proj" in name or "v_proj" in name)
        return attacked, update, words
    model.save_pretrained(place / "client")
    whole = base_of(case.family, seed)
    attacked = captured.read_adapter(place / "server", whole)
    sent = captured.sent_tensors(place / "client", whole)
    return attacked, captured.load(sent, attacked.state_dict()), words


def measured(case: Case, seed: int) -> tuple[float, bool]:
    """The share of words that is stated, and whether a wrong one is."""
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
        model, update, words = trained(case, seed, Path(folder))
        told = captured.TrainingInfo(
            examples=4,
            learning_rate=case.rate,
            steps=case.steps,
            optimizer=case.optimizer.lower(),
            weight_decay=0.01 if case.optimizer == "AdamW" else 0.0,
        )
        of_classes = case.family in ("CLIP", *CLASSIFIED)
        padding = 0 if case.client == "padded" else None
        settings = captured.Settings(
            domain=TokenDomain(count(), PLACES, padding=padding),
            attacks=case.attack,
            loss="cross_entropy" if of_classes else "next_token",
            classes=CLASSES if of_classes else None,
            seconds=20.0,
        )
        result = captured.attack_update(update, model, settings, told)
    named = {int(item) for fact in result.records[0].facts for item in fact.items}
    return len(named & words) / len(words), bool(named - words)


def main(seeds: str = "6", *which: str) -> None:
    """Measure all lines."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)
    rows = []
    for case in [CASES[int(k)] for k in which] or CASES:
        each = [measured(case, seed) for seed in range(int(seeds))]
        shares, wrong = (list(part) for part in zip(*each, strict=True))
        spread = 1.96 * np.std(shares, ddof=1) / len(shares) ** 0.5
        rows.append(
            [
                case.family,
                case.client,
                case.optimizer,
                str(case.steps),
                f"`{case.attack}`",
                f"{np.mean(shares):.2f}\u00a0±\u00a0{spread:.2f}",
                f"{sum(wrong)} of {len(each)}",
            ]
        )
        print(" | ".join(rows[-1]), flush=True)
    if not which:
        write(HEADING, [WORDS, {"columns": HEADS, "align": "lllrlrr", "rows": rows}])


if __name__ == "__main__":
    main(*sys.argv[1:])
