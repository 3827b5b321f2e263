"""Draws docs/images/how_to: for each how-to a picture of what its reader will see.

    python benchmarks/how_to_pictures.py [NAME ...]

Screens are the output of real commands. Code of a page runs as the page has it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image

import leakbound as lb
from leakbound.cli.captured import EXPOSED_CODE

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FOLDER = DOCS / "images" / "how_to"
COLORS = 64
"""Of a drawn picture, so that its file stays small."""
COLUMNS = 80
"""Of the terminal that is shown."""


def code_of(page: str, word: str) -> str:
    """The first Python block of a page that holds a word."""
    text = (DOCS / page).read_text("utf-8")
    for indent, code in re.findall(r"^( *)```python\n(.*?)^ *```", text, re.M | re.S):
        if word in code:
            return re.sub(rf"^{indent}", "", code, flags=re.M)
    raise ValueError(f"{page}: no Python block holds {word!r}")


def run_code(page: str, word: str) -> dict[str, Any]:
    """What the names of that block mean after it has run."""
    made: dict[str, Any] = {"__name__": "how_to"}
    sys.modules["how_to"] = type(sys)("how_to")  # dataclasses look their module up by name
    exec(compile(code_of(page, word), page, "exec"), made)
    return made


@contextmanager
def elsewhere() -> Iterator[Path]:
    """An empty folder to work in."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


def output(*words: str) -> str:
    """What a command prints, on a terminal of COLUMNS columns without colors."""
    environment = os.environ | {"COLUMNS": str(COLUMNS), "FLWR_TELEMETRY_ENABLED": "0"}
    path = [str(Path(sys.executable).parent), environment.get("PATH", "")]
    environment["PATH"] = os.pathsep.join(path)
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode not in (0, EXPOSED_CODE):
        raise SystemExit(done.stdout.decode())
    return done.stdout.decode().rstrip("\n")


def without_progress(text: str) -> str:
    """The output of a command with the last line of its progress alone."""
    lines = text.split("\n")
    old = [line for line in lines if re.match(r"\d+ of \d+ done after", line)][:-1]
    return "\n".join(line for line in lines if line not in old)


def screen(name: str, text: str) -> None:
    """A terminal that shows a text, as SVG."""
    from rich.console import Console
    from rich.terminal_theme import DEFAULT_TERMINAL_THEME
    from rich.text import Text

    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere)
        for line in text.split("\n"):
            console.print(Text(line, style="bold" if line.startswith("$ ") else ""))
        drawn = console.export_svg(title="", theme=DEFAULT_TERMINAL_THEME, unique_id=name)
    drawn = re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.S)  # fetched from elsewhere
    drawn = drawn.replace("Fira Code", "ui-monospace")
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.svg").write_text(drawn + "\n", "utf-8")


def save(name: str, figure: Figure) -> None:
    """A figure as a small PNG."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.png"
    figure.savefig(path, dpi=120)
    Image.open(path).convert("RGB").quantize(COLORS).save(path, optimize=True)


Line = tuple[str, Sequence[tuple[torch.Tensor, str]]]


def grid(name: str, lines: Sequence[Line], side: float = 1.0) -> None:
    """Lines of images, each with a label in front and a note below every image."""
    columns = max(len(line) for _, line in lines)
    figure = Figure(figsize=(1.7 + side * columns, (side + 0.28) * len(lines)), facecolor="white")
    axes = figure.subplots(len(lines), columns, squeeze=False)
    for (label, line), row in zip(lines, axes, strict=True):
        for axis, (image, note) in zip(row, line, strict=True):
            shown = np.asarray(image.detach().clamp(0, 1).permute(1, 2, 0))
            axis.imshow(shown.squeeze(), cmap="gray", vmin=0, vmax=1)
            axis.set_xlabel(note, fontsize=8, labelpad=2)
            axis.set_xticks([])
            axis.set_yticks([])
        row[0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=9)
    left = 1.6 / figure.get_figwidth()
    figure.subplots_adjust(left=left, right=0.99, top=0.98, bottom=0.09, hspace=0.25, wspace=0.06)
    save(name, figure)


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    """In dB, for values between 0 and 1."""
    return float(-10 * (a - b).square().mean().log10())


def calibrate() -> None:
    """The answer to a target."""
    target = "psnr>=30 with probability<=0.01"
    words = ["leakbound", "calibrate", "--target", target, "--data", "mnist5k", "--steps", "3"]
    shown = f'$ leakbound calibrate --target "{target}" \\\n      --data mnist5k --steps 3\n'
    screen("calibrate", shown + output(*words))


def plans() -> None:
    """The end of an audit."""
    with elsewhere():
        shown = without_progress(output("leakbound", "audit", "--quick"))
        screen("plans", f"$ leakbound audit --quick\n{shown}")


TRAINING = """
name = "costs"
seeds = [0, 1]
[data]
source = "mnist5k"
[[models]]
name = "mlp"
[[attacks]]
name = "inverting_gradients"
[[defenses]]
name = "none"
[[defenses]]
name = "gaussian_noise"
noise_std = [0.001, 0.01]
[[defenses]]
name = "top_k"
rate = 0.9
[utility]
rounds = 60
clients = 20
batch_size = 64
learning_rate = 0.002
repeats = 2
"""


def train() -> None:
    """What defenses cost, as a table."""
    with elsewhere():
        Path("costs.toml").write_text(TRAINING, "utf-8")
        words = ["leakbound", "train", "costs.toml", "--out", "runs/costs"]
        screen("train", f"$ {' '.join(words)}\n{without_progress(output(*words))}")


def captured_updates() -> None:
    """What a captured update leaks, on the screen."""
    from safetensors.torch import save_file

    images = lb.data.load("mnist5k").batch(torch.tensor([7]))
    made = lb.models.mlp(input_shape=(1, 28, 28), classes=10, generator=lb.stream(0, "model"))
    with elsewhere():
        save_file(made.state_dict(), "before.safetensors")
        loss = torch.nn.functional.cross_entropy(made(images.inputs), images.labels)
        loss.backward()
        torch.optim.SGD(made.parameters(), lr=0.1).step()
        save_file(made.state_dict(), "after.safetensors")
        words = ["leakbound", "attack", "--update", "after.safetensors", "--before"]
        words += ["before.safetensors", "--model", "mlp", "--input-shape", "1,28,28"]
        words += ["--attack", "linear_inversion", "--out", "report"]
        shown = (
            "$ leakbound attack --update after.safetensors \\\n"
            "      --before before.safetensors --model mlp --input-shape 1,28,28 \\\n"
            "      --attack linear_inversion --out report\n"
        )
        screen("captured_updates", shown + output(*words))


METER = """
import logging
logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stdout)
logging.getLogger("leakbound.meter").setLevel(logging.INFO)
logging.getLogger("flwr").setLevel(logging.CRITICAL)
"""


def leak_meter() -> None:
    """The log of a client, with little and with much noise."""
    page = code_of("reference/leak_meter_details.md", "LeakMeter")
    client = page.partition("\nassert ")[0]
    said = []
    for noise in (1e-3, 1.0):
        code = f"import sys\n{METER}\n{client}\nanswer({noise})\n"
        lines = output(sys.executable, "-c", code).splitlines()
        said += [f"# with GaussianNoise({noise:g})"]
        for line in lines:
            said += textwrap.wrap(line, COLUMNS, subsequent_indent="  ")
    screen("leak_meter", "\n".join(said))


def flower() -> None:
    """What a server sees of four clients, without and with a defense mod."""
    made = run_code("reference/flower_details.md", "Watched, run, tap")
    noise = made["GaussianNoise"](0.5)
    mods = {"no defense": [], "noise 0.5": [made["DefenseMod"](noise, made["Setup"](made["Net"]))]}
    truth = made["DIGITS"].inputs[:4]
    lines: list[Line] = [("true", [(image, "") for image in truth])]
    for label, mod in mods.items():
        made["strategy"].captures.clear()
        made["run"](made["server"], made["app_with"](*mod), len(truth))
        shown: list[Any] = [None] * len(truth)
        for capture in made["strategy"].captures:
            place = int(capture.about["client"]) - 2  # Flower numbers nodes from 2 here
            found = made["attack_update"](
                capture,
                made["Net"](),
                input_shape=(1, 8, 8),
                attacks=["linear_inversion"],
                defense=noise if mod else None,
            )
            image = found.answers[0].inputs[0]
            shown[place] = (image, f"{min(psnr(image, truth[place]), 150):.0f} dB")
        lines.append((label, shown))
    grid("flower", lines)


def from_flower() -> None:
    """What two clients of the quickstart app leak in round 1."""
    from leakbound.captured import Settings, attack_update, load_all
    from leakbound.flower import capture_app

    config = {"images-per-client": 1, "batch-size": 1}
    torch.manual_seed(0)
    with elsewhere() as folder:
        capture_app(ROOT / "examples" / "quickstart", folder, clients=2, run_config=config)
        found = sorted(load_all(folder), key=lambda capture: int(capture.about["client"]))
    sys.path.insert(0, str(ROOT / "examples" / "quickstart"))
    from quickstart.task import Net, load_images

    (images, _), _ = load_images()
    true, answers = [], []
    for capture in found:
        truth = images[int(capture.about["client"]) - 2]
        outcome = attack_update(
            capture, Net(), Settings((1, 28, 28), attacks="inverting_gradients_large_steps")
        )
        image = outcome.answers[0].inputs[0]
        true.append((truth, ""))
        answers.append((image, f"{psnr(image, truth):.0f} dB"))
    grid("from_flower", [("true", true), ("reconstructed", answers)], side=1.4)


def opacus() -> None:
    """The risk of one training, by noise."""
    from leakbound.bounds import record_priors
    from leakbound.opacus import risk

    digits = lb.data.load("mnist5k")
    prior = record_priors.from_images(digits.inputs[600:1600])
    norm = float(digits.inputs[:600].flatten(1).norm(dim=1).min())
    noise = np.geomspace(0.001, 0.3, 24)
    found = [risk([(float(s), 0.1, 20)], dim=784, norm=norm, psnr=30, prior=prior) for s in noise]
    least = 1e-6
    figure = Figure(figsize=(6.4, 3.2), facecolor="white", layout="constrained")
    axis = figure.subplots()
    axis.loglog(noise, [max(f.bound, least) for f in found], "o-", color="#00507a")
    axis.loglog(noise, [max(f.attained, least) for f in found], "s-", color="#b34700")
    axis.axhline(0.001, color="#555555", linestyle=":")
    axis.text(0.3, 0.0013, "target 0.001", ha="right", fontsize=9)
    axis.text(0.3, 0.15, "no attacker exceeds", ha="right", color="#00507a", fontsize=9)
    axis.text(0.003, 1e-5, "one attack attains", color="#b34700", fontsize=9)
    axis.text(0.3, least * 1.5, "1e-6 or less", ha="right", fontsize=8)
    axis.set_ylim(least / 1.3, 1.6)
    axis.set_xticks([0.001, 0.003, 0.01, 0.03, 0.1, 0.3])
    axis.set_xticklabels(["0.001", "0.003", "0.01", "0.03", "0.1", "0.3"])
    axis.xaxis.minorticks_off()
    axis.set_xlabel("noise multiplier (20 steps, sampling rate 0.1)")
    axis.set_ylabel("probability, 30 dB or better")
    axis.grid(alpha=0.3)
    save("opacus", figure)


def lpips() -> None:
    """Two changes of one photograph that have the same PSNR."""
    from skimage.data import astronaut
    from skimage.filters import gaussian

    photo = torch.from_numpy(astronaut()[:256, 96:352] / 255.0).permute(2, 0, 1).float()
    draw = torch.randn(photo.shape, generator=torch.Generator().manual_seed(0))
    noisy = found_at(20.0, photo, lambda size: (photo + size * draw).clamp(0, 1))

    def blurred(size: float) -> torch.Tensor:
        return torch.from_numpy(gaussian(photo.numpy(), size, channel_axis=0)).float()

    blur = found_at(20.0, photo, blurred, most=40.0)
    notes = [(photo, "true"), *((i, f"{psnr(i, photo):.1f} dB") for i in (noisy, blur))]
    grid("lpips", [("", notes)], side=1.9)


def found_at(
    goal: float, truth: torch.Tensor, make: Callable[[float], torch.Tensor], most: float = 1.0
) -> torch.Tensor:
    """The image of the size of change at which the PSNR is the goal, by bisection."""
    low, high = 1e-3, most
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if psnr(make(middle), truth) > goal else (low, middle)
    return make(high)


def add_a_defense() -> None:
    """What an attack reconstructs behind the page's defense."""
    quantize = run_code("how_to/add_a_defense.md", "class Quantize")["Quantize"]
    batch = lb.data.load("mnist5k").batch(torch.tensor([7]))
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(784, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    row = [(batch.inputs[0], "true")]
    for step in (0.001, 0.01, 0.1):
        found = lb.simulate(model, batch, defense=quantize(step), attack="linear_inversion")
        image = found.reconstruction[0]
        row.append((image, f"step {step:g}: {psnr(image, batch.inputs[0]):.0f} dB"))
    grid("add_a_defense", [("", row)], side=1.4)


def add_a_command() -> None:
    """The help of the page's command."""
    code = code_of("how_to/add_a_command.md", "class Greet")
    with elsewhere() as folder:
        (folder / "greeting.py").write_text(code, "utf-8")
        shown = (
            "from greeting import Greet; from leakbound.cli import usage; "
            "print(usage.help_of('greet', Greet, all_options=True))"
        )
        screen("add_a_command", "$ leakbound greet --help\n" + output(sys.executable, "-c", shown))


def audit_epsilon() -> None:
    """The audit of a client with a bug."""
    with elsewhere() as folder:
        code = code_of("how_to/audit_epsilon.md", "def update")
        (folder / "my_client.py").write_text(code, "utf-8")
        words = ["my_client:half", "--model", "my_client:model", "--noise-multiplier", "1"]
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"COLUMNS": str(COLUMNS), "PYTHONPATH": path}
        command = [sys.executable, "-m", "leakbound.cli", "audit-epsilon", *words]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE)
        shown = f"$ leakbound audit-epsilon {' '.join(words[:3])} \\\n      {' '.join(words[3:])}\n"
        screen("audit_epsilon", shown + done.stdout.decode().rstrip("\n"))


def audit_my_table() -> None:
    """The draft of a schema."""
    levels, draw = ("north", "south", "west"), np.random.default_rng(0)
    rows = [
        f"p{k:04},{draw.integers(18, 90)},{draw.normal(75, 12):.1f},{draw.integers(0, 4)},"
        f"{levels[draw.integers(3)]},2024-0{draw.integers(1, 9)}-12,{('no', 'yes')[k % 2]}"
        for k in range(200)
    ]
    head = "id,age,weight,visits,region,admitted,diagnosis"
    with elsewhere():
        Path("patients.csv").write_text("\n".join([head, *rows]), "utf-8")
        words = ["leakbound", "schema", "patients.csv", "--target", "diagnosis"]
        shown = without_progress(output(*words)).replace("100 of 100 % done after 0 s\n", "")
        screen("audit_my_table", f"$ {' '.join(words)}\n{shown}")


def audit_my_text() -> None:
    """The sequence that a decoder's update reveals."""
    words = ("--data", "topics", "--model", "decoder", "--attack", "token_span")
    shown = without_progress(output("leakbound", "attack", *words))
    screen("audit_my_text", f"$ leakbound attack {' '.join(words)}\n{shown}")


def gate() -> None:
    """A gate that turns red: the example's client with half of its noise."""
    with elsewhere() as folder:
        shutil.copytree(ROOT / "examples" / "ci-gate", folder, dirs_exist_ok=True)
        client = folder / "client.py"
        text = client.read_text("utf-8").replace("NOISE * CLIP *", "NOISE / 2 * CLIP *")
        client.write_text(text, "utf-8")
        command = "PYTHONPATH=. leakbound check policy.toml"
        shown = output("sh", "-c", f"{command} 2>/dev/null || echo exit code $?")
        screen("gate", f"$ {command}\n{shown}")


def keep_a_budget() -> None:
    """A node's ledger after the round that cost too much: noise 2.4, as in MediSwarm."""
    from leakbound.ledger import Budget, Ledger
    from leakbound.risk.deployment import parse

    facts = {
        "unit": "client",
        "clip": {"norm": 1.0, "kind": "l2", "at": "client"},
        "noise": {"multiplier": 2.4, "at": "client", "seeded": False},
        "participation": {"law": "all"},
        "correlation": "none",
    }
    with elsewhere():
        ledger = Ledger("node.jsonl")
        number = 1
        budget = Budget(max_epsilon=8.0)
        while not (charge := ledger.charge(parse(facts), budget, round=str(number))).refused:
            number += 1
        command = "leakbound ledger node.jsonl --last 2"
        shown = [f"withheld: {charge.reasons[0]}", f"$ {command}", output(*command.split())]
        screen("keep_a_budget", "\n".join(shown))


def log() -> None:
    """What a gate logs, and what MLflow then says."""
    policy = "[[deployment]]\nfile = 'deployment.toml'\nunit = ['client']\nepsilon = 6.0\n"
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_TRACKING_URI": ""}
    with elsewhere() as folder, patch.dict(os.environ, quiet):
        shutil.copy(ROOT / "examples" / "ci-gate" / "deployment.toml", folder)
        (folder / "policy.toml").write_text(policy, "utf-8")
        command = "leakbound check policy.toml --log mlflow"
        shown = output("sh", "-c", f"{command} 2>/dev/null")
        read = f"mlflow runs describe --run-id {shown.split()[-1]}"
        some = "grep epsilon/[hvl]"
        found = textwrap.dedent(output("sh", "-c", f"{read} 2>/dev/null | {some}"))
        lines = [f"$ {command}", shown, f"$ {read} \\", f"      | {some}", found]
        screen("log", "\n".join(lines))


def add_an_attack() -> None:
    """What the page's attack answers."""
    attack = run_code("how_to/add_an_attack.md", "class Descent")["Descent"]()
    batch = lb.data.load("mnist5k").batch(torch.tensor([7, 600, 1200, 1700]))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    found = lb.simulate(model, batch, attack=attack).reconstruction
    answers = [
        (image, f"{psnr(image, truth):.0f} dB")
        for image, truth in zip(found, batch.inputs, strict=True)
    ]
    grid("add_an_attack", [("true", [(i, "") for i in batch.inputs]), ("Descent", answers)])


def add_a_domain() -> None:
    """A series and what counts as near to it."""
    domain = run_code("how_to/add_a_domain.md", "class BandDomain")["BandDomain"]((1, 96))
    steps = torch.arange(96)
    true = 0.5 + 0.3 * torch.sin(steps / 9)
    near = true + 0.06 * torch.cos(steps / 2)
    far = true.clone()
    far[60:64] += 0.2
    figure = Figure(figsize=(6.4, 2.6), facecolor="white", layout="constrained")
    axis = figure.subplots()
    axis.fill_between(steps, true - 0.1, true + 0.1, color="#cfe3f1")
    axis.plot(steps, true, color="#00507a", label="true series")
    for other, color, style in ((near, "#00753d", "--"), (far, "#b34700", ":")):
        apart = float(domain.distance(true[None, None], other[None, None]))
        word = "matches" if apart <= 0.1 else "does not match"
        axis.plot(steps, other, style, color=color, label=f"distance {apart:.2f}: {word}")
    axis.set_xlabel("step")
    axis.legend(fontsize=8, loc="lower left")
    save("add_a_domain", figure)


def many_machines() -> None:
    """Which data go from where to where."""
    figure = Figure(figsize=(6.6, 2.4), facecolor="white")
    axis = figure.subplots()
    axis.set(xlim=(0, 100), ylim=(0, 36))
    axis.axis("off")

    def box(x: float, y: float, wide: float, text: str, color: str = "#cfe3f1") -> None:
        axis.add_patch(_rectangle(x, y, wide, 8, color))
        axis.text(x + wide / 2, y + 4, text, ha="center", va="center", fontsize=9)

    box(1, 14, 25, "leakbound audit\n--engine ray")
    box(1, 1, 25, "runs/big: results", "#f6e3d4")
    for y, text in ((26, "node 1: workers"), (14, "node 2: workers"), (2, "node 3: workers")):
        box(52, y, 24, text)
        axis.annotate("", (52, y + 4), (26, 18), arrowprops={"arrowstyle": "<->", "lw": 1})
    axis.annotate("", (13, 9), (13, 14), arrowprops={"arrowstyle": "->", "lw": 1})
    axis.text(39, 33, "plan →\n← records, pictures", ha="center", va="center", fontsize=8)
    axis.text(
        78, 18, "each reads data,\nweights and code\nfrom its own disk", va="center", fontsize=8
    )
    figure.subplots_adjust(left=0.01, right=0.99, top=0.99, bottom=0.01)
    save("many_machines", figure)


def _rectangle(x: float, y: float, wide: float, high: float, color: str) -> Any:
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch((x, y), wide, high, boxstyle="round,pad=0.4", fc=color, ec="#555555")


PICTURES: Mapping[str, Callable[[], None]] = {
    made.__name__: made
    for made in (
        add_a_command,
        add_a_defense,
        add_a_domain,
        add_an_attack,
        audit_epsilon,
        audit_my_table,
        audit_my_text,
        gate,
        calibrate,
        captured_updates,
        flower,
        from_flower,
        keep_a_budget,
        leak_meter,
        log,
        lpips,
        many_machines,
        opacus,
        plans,
        train,
    )
}


def main() -> None:
    """Draw the pictures that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PICTURES)}")
    for name in parser.parse_args().names or PICTURES:
        print(f"drawing {name}", flush=True)
        PICTURES[name]()


if __name__ == "__main__":
    main()
