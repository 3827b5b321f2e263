"""Does an attack on a large update keep to its limits? Table of docs/results, captured updates.

    python benchmarks/memory_and_time.py [--only NAME]

Plain PyTorch clients train DenseNet121 (7 million weights, batch norm in training mode) by Adam on
random images. `leakbound attack --update` gets the weights before and after, the number of examples
and the local training, with a limit of time and one of memory. It runs as a process of its own: the
table has that process's seconds and its peak memory, as the operating system counts them (Linux).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from leakbound.assess import Assessment
from leakbound.assess.record import read
from leakbound.captured.budget import COST

sys.path.append(str(Path(__file__).parents[1] / "tools"))
import stored

PAGE, TITLE = "captured_updates_quality", "Captured updates: what to expect"
HEADING = "Large models: time and memory"
RATE = 1e-3


@dataclass(frozen=True)
class Client:
    """Adam's local steps on so many square images, and the limits of the attack."""

    name: str
    examples: int
    side: int
    steps: int
    batch: int
    seconds: int
    gigabytes: int = 8


CLIENTS = (
    Client("small", 64, 96, 8, 64, 60),
    Client("large", 200, 224, 25, 8, 120),
    Client("whole", 200, 224, 25, 200, 120),
)
"""The last one has the same images, and the attacker does not know that they came in minibatches.
"""


class DenseLayer(nn.Module):
    """Two convolutions whose output is put beside their input."""

    def __init__(self, width: int, growth: int = 32) -> None:
        super().__init__()
        self.squeeze = nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 4 * growth, 1, bias=False)
        )
        self.grow = nn.Sequential(
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([inputs, self.grow(self.squeeze(inputs))], 1)


def densenet121(outputs: int = 2) -> nn.Module:
    """The layers of Huang et al. 2017, with 6,955,906 weights for two outputs."""
    width = 64
    parts: list[nn.Module] = [
        *(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        nn.MaxPool2d(3, 2, 1),
    ]
    blocks = (6, 12, 24, 16)
    for block in blocks:
        for _ in range(block):
            parts.append(DenseLayer(width))
            width += 32
        parts += [nn.BatchNorm2d(width), nn.ReLU()]
        if block != blocks[-1]:
            parts += [nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
            width //= 2
    parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, outputs)]
    return nn.Sequential(*parts)


def train(client: Client, folder: Path) -> None:
    """Write the weights before and after."""
    torch.manual_seed(0)
    model = densenet121()
    save_file(model.state_dict(), folder / "before.safetensors")
    # To train on all large images at once takes 26 GB: minibatches give a file of the same form.
    size = min(client.batch, 64 if client.side < 200 else 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    for _ in range(client.steps):
        inputs = torch.rand(size, 3, client.side, client.side)
        labels = torch.randint(0, 2, (size,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    save_file(model.state_dict(), folder / "after.safetensors")


@dataclass(frozen=True)
class Taken:
    """Seconds until the first finding and until the end, bytes at the peak, and what was said."""

    first: float
    seconds: float
    peak: float
    records: list[Assessment]
    page: bool


def attack(client: Client, folder: Path, *more: str) -> Taken:
    """Run the command in a process of its own."""
    out = folder / "report"
    words = [sys.executable, "-m", "leakbound.cli", "attack", *more]
    words += ["--update", str(folder / "after.safetensors"), "--kind", "weights"]
    words += ["--before", str(folder / "before.safetensors"), "--learning-rate", str(RATE)]
    words += ["--model", "memory_and_time:densenet121", "--input-shape"]
    words += [f"3,{client.side},{client.side}", "--batch-size", str(client.examples)]
    words += ["--local-steps", str(client.steps), "--local-batch-size", str(client.batch)]
    words += ["--time", str(client.seconds), "--memory", str(client.gigabytes), "--out", str(out)]
    began = time.monotonic()
    with Popen(words, stdout=PIPE, stderr=STDOUT, text=True, cwd=Path(__file__).parent) as child:
        assert child.stdout is not None
        first = 0.0
        for line in child.stdout:
            print(line, end="", flush=True)
            if not first and "local steps" in line:
                first = time.monotonic() - began
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - began
    lines = read(out / "records.jsonl", Assessment)
    records = [one for one in lines if isinstance(one, Assessment)]
    page = (out / "report.html").is_file()
    return Taken(first, seconds, 1024 * usage.ru_maxrss, records, page)


def row(client: Client, taken: Taken) -> list[str]:
    captures = [one.capture for one in taken.records if one.capture is not None]
    findings = {found.name: found.value for one in captures for found in one.findings}
    facts = dict.fromkeys(fact.kind for r in taken.records for fact in r.facts)
    steps = f"{client.steps} steps of {client.batch}"
    return [
        f"{client.examples} images of {client.side} × {client.side}, {steps}",
        findings.get(COST, "–"),
        f"{client.seconds} s, {client.gigabytes} GB",
        f"{taken.first:.0f} s",
        f"{taken.seconds:.0f} s",
        f"{taken.peak / 1e9:.1f} GB",
        ", ".join(facts),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=[client.name for client in CLIENTS])
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for client in CLIENTS:
            if given.only not in (None, client.name):
                continue
            folder = Path(place) / f"{client.examples}-{client.side}-{client.steps}"
            if not folder.exists():  # the last two are one client
                folder.mkdir()
                train(client, folder)
            rows.append(row(client, attack(client, folder)))
            print(rows[-1], flush=True)
    heads = ["client", "cost of a search step, predicted", "limits", "first finding after"]
    heads += ["ended after", "peak memory", "certain on the page"]
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows)]
    if given.only is None:
        stored.keep(PAGE, "\n\n".join([f"# {TITLE}", f"## {HEADING}", "\n".join(lines)]))


if __name__ == "__main__":
    main()
