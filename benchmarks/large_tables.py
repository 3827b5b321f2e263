"""Words from adapters of large bases: adds to docs/results/language_models.json.

    python benchmarks/large_tables.py [SEEDS]

Weights are random, for time and memory do not depend on them. The base is written to a temporary
folder (up to 5 GB) and read from there, as a user's is; the attack runs in a process of its own.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from language_models import write

HEADING = "Large bases"
SIZES = (150_000, 2_048), (128_256, 4_096)
TEXTS, LENGTH, STEPS, RATE = 4, 32, 5, 2e-4
HEADS = ["words × width", "weights", "tokens", "found", "wrong", "s", "attack s", "GB"]
WORDS = (
    "A client trains LoRA of rank 16 on queries and values of a Llama-like model of two layers and "
    "random weights. It takes 5 steps of AdamW on 4 texts of 32 tokens, drawn by Zipf's law "
    "(`benchmarks/large_tables.py`). Columns *s* and *GB* are of the attack in a process of its "
    "own, from start to end. Column *attack s* is without transformers' import and the reading of "
    "the base. They are of one thread of an idle machine without AVX-512. Memory is the largest "
    "that the operating system counts, with the base's file. One client a line."
)


def build(count: int, width: int, place: Path) -> Any:
    """The base from its folder; without one, at random and written there."""
    import transformers as hf

    if place.exists():
        return hf.AutoModelForCausalLM.from_pretrained(place)
    sizes = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 2}
    heads = {"num_attention_heads": width // 128, "num_key_value_heads": width // 512}
    config = hf.LlamaConfig(vocab_size=count, tie_word_embeddings=False, **sizes, **heads)
    model = hf.LlamaForCausalLM(config)
    model.save_pretrained(place)
    return model


def trained(count: int, width: int, seed: int, folder: Path) -> set[int]:
    """Write the base and both adapters; return the client's tokens."""
    import peft

    torch.manual_seed(seed)
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(build(count, width, folder / "base"), lora)
    model.save_pretrained(folder / "server")
    law = 1 / (torch.arange(count) + 10.0)
    ids = torch.multinomial(law, TEXTS * LENGTH, replacement=True).view(TEXTS, LENGTH)
    steps = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    for _ in range(STEPS):
        steps.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        steps.step()
    model.save_pretrained(folder / "client")
    return {*ids.flatten().tolist()}


def attacked(count: int, width: int, folder: Path) -> None:
    """Attack the files, and print the words, the seconds and the bytes."""
    from leakbound import captured
    from leakbound.domains import TokenDomain

    began = time.perf_counter()
    base = build(count, width, folder / "base")
    model = captured.read_adapter(folder / "server", base)
    sent = captured.sent_tensors(folder / "client", base)
    told = captured.TrainingInfo(
        examples=TEXTS,
        learning_rate=RATE,
        steps=STEPS,
        optimizer="adamw",
    )
    settings = captured.Settings(
        domain=TokenDomain(count, LENGTH),
        attacks="adapter_words",
        loss="next_token",
    )
    update = captured.load(sent, model.state_dict())
    read = time.perf_counter()
    result = captured.attack_update(update, model, settings, told)
    facts = [fact for fact in result.records[0].facts if fact.kind == "words"]
    found = {
        "items": [int(item) for fact in facts for item in fact.items],
        "seconds": time.perf_counter() - began,
        "attack": time.perf_counter() - read,
        "bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "weights": sum(weight.numel() for weight in base.parameters()),
    }
    print(json.dumps(found))


def measured(count: int, width: int, seed: int) -> list[str]:
    """One line of the page."""
    with tempfile.TemporaryDirectory() as place:
        words = trained(count, width, seed, Path(place))
        run = [sys.executable, __file__, "attack", str(count), str(width), place]
        shown = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    found = json.loads(shown.splitlines()[-1])
    named = {*found["items"]}
    return [
        f"{count:,} × {width:,}",
        f"{found['weights'] / 1e9:.2f} billion",
        str(len(words)),
        str(len(named & words)),
        str(len(named - words)),
        f"{found['seconds']:.0f}",
        f"{found['attack']:.0f}",
        f"{found['bytes'] / 1e9:.1f}",
    ]


def main(seeds: str = "1", *given: str) -> None:
    """Measure all lines; with `attack` and a folder, attack what is there."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(2)
    if seeds == "attack":
        count, width, place = given
        attacked(int(count), int(width), Path(place))
        return
    rows = []
    for count, width in SIZES:
        for seed in range(int(seeds)):
            rows.append(measured(count, width, seed))
            print(" | ".join(rows[-1]), flush=True)
    write(HEADING, [WORDS, {"columns": HEADS, "align": "lrrrrrrr", "rows": rows}])


if __name__ == "__main__":
    main(*sys.argv[1:])
