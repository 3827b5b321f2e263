"""Adapters of every kind that PEFT saves: adds to docs/results/language_models.json.

Nothing is downloaded: sentences of Python's help texts train models of random weights.

    python benchmarks/adapter_formats.py [SEEDS]
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from language_models import write
from torch import Tensor, nn

from leakbound import captured, data
from leakbound.domains import TokenDomain

HEADING = "Adapters of every kind"
PLACES, TEXTS, WIDTH = 16, 4, 256
RATES = {"AdamW": 2e-4, "SGD": 0.1}
HEADS = ["model", "adapter", "optimizer", "steps", "texts", "attack", "right", "wrong", "s"]
WORDS = (
    "Clients train PEFT's adapters on sentences of 16 tokens of Python's help texts; models of two "
    f"layers and width {WIDTH} have random weights (`benchmarks/adapter_formats.py`). PEFT saves "
    "what is sent and what comes back, and `attack_update` reads these files, with PEFT's own "
    "model for other kinds than LoRA, rsLoRA and DoRA. In *a later round* B is not 0 but random, "
    "of deviation 0.02. A line says which share is right (mean, 95 % interval over clients). It is "
    "of a client's different tokens for `adapter_words`, and of all places for the others, of "
    "which the last of 16 has no gradient. *Wrong* counts clients of whom a wrong word is stated; "
    "the others state none here. Seconds (median) are of one thread of a busy processor without "
    "AVX-512."
)
QUERIES = {"target_modules": ["q_proj", "v_proj"]}


@dataclass(frozen=True)
class Case:
    """One line: a model, an adapter with its settings, and how a client trains.

    `later`: in a later round B is no longer zero; here it is random, of deviation 0.02.
    """

    family: str
    adapter: str
    config: str
    settings: dict[str, Any]
    attack: str = "adapter_words"
    optimizer: str = "AdamW"
    steps: int = 10
    texts: int = TEXTS
    later: bool = False

    @property
    def rank(self) -> int | None:
        """Of each adapter."""
        return self.settings.get("r", self.settings.get("init_r"))

    @property
    def plain(self) -> bool:
        """Whether the base alone is enough to read the files."""
        return self.adapter in ("LoRA", "rsLoRA", "DoRA")


def by_span(rank: int, steps: int, texts: int, *, later: bool = True) -> Case:
    """Whole sequences from LoRA after SGD."""
    settings = {"r": rank, **QUERIES}
    return Case("Llama", "LoRA", "LoraConfig", settings, "token_span", "SGD", steps, texts, later)


def by_search(adapter: str, config: str, **settings: Any) -> Case:
    """A kind that only the search attacks: one step of SGD on one sentence."""
    return Case("Llama", adapter, config, settings, "token_matching", "SGD", 1, 1)


CASES = [
    Case("Llama", "LoRA", "LoraConfig", {"r": 8, **QUERIES}),
    Case("Llama", "rsLoRA", "LoraConfig", {"r": 8, "use_rslora": True, **QUERIES}),
    Case("Llama", "DoRA", "LoraConfig", {"r": 8, "use_dora": True, **QUERIES}),
    Case("Llama", "PiSSA", "LoraConfig", {"r": 8, "init_lora_weights": "pissa", **QUERIES}),
    Case("Llama", "AdaLoRA", "AdaLoraConfig", {"init_r": 8, "total_step": 100, **QUERIES}),
    Case("GPT-2", "LoRA", "LoraConfig", {"r": 8, "target_modules": ["c_attn"]}),
    Case("BERT", "LoRA", "LoraConfig", {"r": 8, "target_modules": ["query", "value"]}),
    by_span(64, 10, 4, later=False),
    by_span(16, 10, 1),
    by_span(64, 1, 4),
    by_span(64, 10, 4),
    by_search("IA3", "IA3Config", task_type="CAUSAL_LM"),
    by_search("LoHa", "LoHaConfig", r=8, **QUERIES),
    by_search("LoKr", "LoKrConfig", r=8, **QUERIES),
    by_search("VeRA", "VeraConfig", r=64, **QUERIES),
]


@cache
def texts() -> data.Dataset:
    """The sentences."""
    return data.load("topics", size=PLACES)


def base_of(family: str, seed: int) -> nn.Module:
    """A model of random weights."""
    import transformers as hf

    count = len(texts().words)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        shared = {"num_hidden_layers": 2, "num_attention_heads": 4}
        if family == "BERT":
            settings = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "vocab_size": count}
            bert = hf.BertConfig(max_position_embeddings=PLACES, num_labels=4, **settings, **shared)
            return hf.BertForSequenceClassification(bert).eval()
        if family == "GPT-2":
            settings = {"n_positions": PLACES, "n_embd": WIDTH, "n_layer": 2, "n_head": 4}
            marks = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}
            return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=count, **settings, **marks)).eval()
        settings = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "vocab_size": count}
        llama = hf.LlamaConfig(tie_word_embeddings=False, **settings, **shared)
        return hf.LlamaForCausalLM(llama).eval()


def adapted(case: Case, seed: int) -> Any:
    """PEFT's model, the same on both sides."""
    import peft

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = getattr(peft, case.config)(**case.settings)
        model = peft.get_peft_model(base_of(case.family, seed), config).eval()
        for name, weight in model.named_parameters():
            if case.later and "lora_B" in name:
                nn.init.normal_(weight, std=0.02)
        return model


def client(case: Case, seed: int, place: Path) -> Tensor:
    """PEFT's folders before and after the client's training; returns its sentences."""
    source = torch.Generator().manual_seed(40_000 + seed)
    chosen = torch.randperm(len(texts().inputs), generator=source)[: case.texts]
    ids = texts().inputs[chosen]
    labels = ids if case.family != "BERT" else torch.randint(4, (case.texts,), generator=source)
    model = adapted(case, seed)
    model.save_pretrained(place / "server")
    rule = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}[case.optimizer]
    steps = rule([p for p in model.parameters() if p.requires_grad], lr=RATES[case.optimizer])
    for _ in range(case.steps):
        steps.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        steps.step()
    model.save_pretrained(place / "client")
    return ids


def measured(case: Case, seed: int) -> tuple[float, bool, float]:
    """The share that is right, whether a word is wrong, and the seconds from the files on."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        ids = client(case, seed, place)
        base = base_of(case.family, seed) if case.plain else adapted(case, seed)
        began = time.perf_counter()
        model = captured.read_adapter(place / "server", base)
        update = captured.load(
            captured.sent_tensors(place / "client", base),
            model.state_dict(),
        )
        told = captured.TrainingInfo(
            examples=case.texts,
            learning_rate=RATES[case.optimizer],
            steps=case.steps,
            optimizer=case.optimizer.lower(),
            weight_decay=0.01 if case.optimizer == "AdamW" else 0.0,
        )
        settings = captured.Settings(
            domain=TokenDomain(len(texts().words), PLACES),
            attacks=case.attack,
            loss="cross_entropy" if case.family == "BERT" else "next_token",
            classes=4 if case.family == "BERT" else None,
            seconds=20.0,
        )
        result = captured.attack_update(update, model, settings, told)
        took = time.perf_counter() - began
    if case.attack != "adapter_words":
        (answer,) = result.answers
        each = (answer.inputs[:, None] == ids).double().mean(2).amax(0)
        return float(each.mean()), False, took
    truth = set(ids.flatten().tolist())
    named = {int(item) for fact in result.records[0].facts for item in fact.items}
    return len(named & truth) / len(truth), bool(named - truth), took


def main(seeds: str = "6") -> None:
    """Measure all lines."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)
    rows = []
    for case in CASES:
        each = [measured(case, seed) for seed in range(int(seeds))]
        shares, wrong, seconds = (list(part) for part in zip(*each, strict=True))
        spread = 1.96 * np.std(shares, ddof=1) / len(shares) ** 0.5
        rows.append(
            [
                case.family,
                ", ".join(
                    [
                        case.adapter,
                        *([f"rank {case.rank}"] if case.rank else []),
                        *(["a later round"] if case.later else []),
                    ]
                ),
                case.optimizer,
                str(case.steps),
                str(case.texts),
                f"`{case.attack}`",
                f"{np.mean(shares):.2f}\u00a0±\u00a0{spread:.2f}",
                f"{sum(wrong)} of {len(each)}" if case.attack == "adapter_words" else "–",
                f"{np.median(seconds):.1f}",
            ]
        )
        print(" | ".join(rows[-1]), flush=True)
    write(HEADING, [WORDS, {"columns": HEADS, "align": "lllrrlrrr", "rows": rows}])


if __name__ == "__main__":
    main(*sys.argv[1:])
