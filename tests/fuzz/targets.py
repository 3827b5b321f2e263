"""The formats: valid examples of each, how it is read, and how examples are damaged."""

from __future__ import annotations

import importlib.util
import io
import json
import random
import re
import signal
import struct
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save

import leakbound as lb
from leakbound import data, tensors
from leakbound.assess.record import encode
from leakbound.attacks.prior.denoiser import train_prior
from leakbound.attacks.prior.files import load_prior, save_prior
from leakbound.audit import plan_file
from leakbound.audit.engine import run
from leakbound.audit_epsilon import finding
from leakbound.captured import adapters, capture
from leakbound.core import Batch, NotApplicable
from leakbound.correlation import Factor
from leakbound.data.schema import Schema
from leakbound.gate import policy
from leakbound.models.custom import load_weights
from leakbound.registry import parse
from leakbound.report import folder as run_folder
from leakbound.risk.deployment import file as deployment_file
from leakbound.risk.deployment import flower_app, nvflare
from leakbound.risk.target import Target
from leakbound.trees import model as trees

DICOM = importlib.util.find_spec("pydicom") is not None
NIFTI = importlib.util.find_spec("nibabel") is not None
SECONDS = 20
"""Longest time of one input."""
EXPECTED = (ValueError, OSError, NotApplicable)
NUMBERS = tuple(
    "0 -1 1e999 -1e999 nan inf 1e308 1e-320 99999999999999999999999 0x10 true null".split()  # noqa: SIM905
)
WORDS = ("", "\x00", "\x1b[2J", "../../etc/passwd", "a" * 5000, "\u202e", "\ud7ff", "{}", "[]", "'")

Read = Callable[[Path], object]


@dataclass(frozen=True)
class Format:
    """Valid files by name, and what reads the folder that holds them; one file is damaged."""

    files: dict[str, bytes]
    read: Read
    damaged: str


@dataclass
class Fault:
    target: str
    number: int
    trace: str


@dataclass
class Found:
    counts: Counter[str] = field(default_factory=Counter)
    read: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)


def one(name: str, content: bytes | str, read: Read) -> Format:
    content = content.encode() if isinstance(content, str) else content
    return Format({name: content}, lambda folder: read(folder / name), name)


PLAN = """
name = "x"
seeds = [0, 1]
batch_sizes = [1, 4]
[data]
source = "digits"
[[models]]
name = "mlp"
hidden = [20]
[[attacks]]
name = "inverting_gradients"
steps = 10
[[defenses]]
name = "dp_sgd"
noise_multiplier = [0.1, 1.0]
[[defenses]]
links = [{ name = "clip", clip_norm = 1.0 }, { name = "gaussian_noise", noise_std = 0.1 }]
[criterion]
psnr = 25.0
[threat]
labels_known = true
[risk]
probability = 0.05
[utility]
rounds = 3
"""
SCHEMA = """
confirmed = true
delimiter = ","
target = "y"
classes = ["no", "yes"]
[[columns]]
name = "age"
kind = "integer"
unit = "years"
low = 0
high = 120
typical = 24
spread = 2.5
[[columns]]
name = "sex"
kind = "categorical"
levels = ["f", "m"]
sensitive = true
"""
DEPLOYMENT = """
clip = {norm = 1.0, kind = "l2", at = "client"}
noise = {multiplier = 1.0, at = "server", on = "mean", seeded = false}
weights = "uniform"
rounds = 50
participation = {law = "fixed-size", cohort = 10, population = 100, replies = 10}
correlation = "none"
record = {dim = 784, norm = 9.2, examples_per_client = 500}
"""
POLICY = """
[[audit]]
folder = "runs/mine"
defenses = ["dp_sgd"]
exposed = 0
accuracy_cost = 2.0
[[epsilon_audit]]
file = "found.json"
epsilon = 3.0
[[client]]
update = "my_app.client:update"
deployment = "deployment.toml"
model = "mlp"
input_shape = [1, 8, 8]
repeats = 64
"""
FLOWER = """
[tool.flwr.app.config]
num-server-rounds = 50
fraction-train = 0.5
sensitivity = 1.0
local-epochs = 2
batch-size = 32
lr = 0.1
"""
NVFLARE = json.dumps(
    {
        "format_version": 2,
        "executors": [{"tasks": ["train"], "executor": {"path": "a.B", "args": {}}}],
        "task_result_filters": [
            {
                "tasks": ["train"],
                "filters": [
                    {"path": "nvflare.app_common.filters.svt_privacy.SVTPrivacy",
                     "args": {"fraction": 0.1, "epsilon": 0.1, "gamma": 1e-05}},
                ],
            }
        ],
    }
)  # fmt: skip
TREES = json.dumps(
    [
        {
            "left_children": [1, -1, -1],
            "right_children": [2, -1, -1],
            "split_indices": [0, 0, 0],
            "split_conditions": [0.5, 0.1, -0.1],
            "base_weights": [0.0, 0.1, -0.1],
            "sum_hessian": [6.0, 3.0, 3.0],
        }
    ]
)
ADAPTER = json.dumps(
    {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["0"], "rank_pattern": {}}
)
_CLAIMS = {"delta": 1e-5, "declared": 4.0, "noise_multiplier": 1.0, "sampling_rate": 0.5}
_LIMIT = {"method": "Gaussian", "epsilon": 5.6, "assumes": "Gaussian noise", "shown": "rates"}
EPSILON = json.dumps(
    {
        "claims": _CLAIMS | {"steps": 2, "rounds": 3, "replace": True},
        "lower": [_LIMIT],
        "confidence": 0.95,
        "runs": 9,
        "power": 9.0,
    }
)
TABLE = "age,sex,y\n" + "".join(
    f"{20 + i},{'fm'[i % 2]},{('no', 'yes')[i % 2]}\n" for i in range(9)
)


ODD_SCHEMA = """
confirmed = true
delimiter = ";"
target = "y"
target_decimal = ","
target_unit = "€"
[[columns]]
name = "born"
kind = "date"
format = "%d.%m.%y"
low = 1950-01-01
high = 2030-12-31
[[columns]]
name = "dose"
decimal = ","
unit = "mg"
censored = "missing"
missing = true
low = 0
high = 9999
"""
DOSES = ("<0,5", "1.234,5 mg", "\u0667,5", "1\u202f234")
ODD_TABLE = "sep=;\n# of a clinic\nborn;dose;y\n" + "".join(
    f"{i + 10}.0{i % 9 + 1}.{60 + i};{DOSES[i % 4]};{i},50 €\n" for i in range(12)
)
TEXT = "one line\nनमस्ते दुनिया\nשָׁלוֹם עֲלֵיכֶם\n我们在北京。\nété déjà\n" * 4


def _array(**named: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, **named)  # type: ignore[arg-type]
    return file.getvalue()


def _npy(value: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, value)
    return file.getvalue()


def _picture(kind: str, seed: int = 0, wide: bool = False) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (8, 8), np.uint8)
    Image.fromarray(pixels.astype(np.uint16) if wide else pixels).save(file, kind)
    return file.getvalue()


def _dicom() -> bytes:
    from pydicom import dcmwrite, uid
    from pydicom.dataset import Dataset, FileMetaDataset

    found, pixels = Dataset(), np.arange(64, dtype=np.uint16).reshape(8, 8)
    found.file_meta = FileMetaDataset()
    found.file_meta.TransferSyntaxUID = uid.ExplicitVRLittleEndian
    found.SOPClassUID = found.file_meta.MediaStorageSOPClassUID = uid.UID("1.2.3")
    found.SOPInstanceUID = found.file_meta.MediaStorageSOPInstanceUID = uid.UID("1.2.4")
    found.Rows, found.Columns, found.SamplesPerPixel = 8, 8, 1
    found.PhotometricInterpretation, found.PixelRepresentation = "MONOCHROME2", 0
    found.BitsAllocated, found.BitsStored, found.HighBit = 16, 12, 11
    found.PixelData = pixels.tobytes()
    file = io.BytesIO()
    dcmwrite(file, found, enforce_file_format=True)
    return file.getvalue()


def _nifti() -> bytes:
    from nibabel import Nifti1Image

    return bytes(Nifti1Image(np.arange(64, dtype=np.int16).reshape(4, 4, 4), np.eye(4)).to_bytes())


def _images(name: str, content: bytes) -> Format:
    """A folder with two classes, whose first image is damaged."""
    ending = name.rpartition(".")[2] if "." in name else ""
    other = f"b/1.{ending}" if ending else "b/1"
    return Format(
        {f"a/{name}": content, other: content}, lambda p: data.load(f"folder:{p}"), f"a/{name}"
    )


def _zip() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for number in range(4):
            archive.writestr(f"{number % 2}/{number}.png", _picture("PNG", number))
    return file.getvalue()


def _idx() -> dict[str, bytes]:
    pixels = np.random.default_rng(0).integers(0, 255, (6, 4, 4), np.uint8)
    images = struct.pack(">IIII", 2051, *pixels.shape) + pixels.tobytes()
    return {
        "t10k-images-idx3-ubyte": images,
        "t10k-labels-idx1-ubyte": struct.pack(">II", 2049, 6) + bytes(range(6)),
    }


def _prior(folder: Path) -> bytes:
    public = Batch(torch.rand(8, 4, generator=lb.stream(0, "fuzz")), torch.arange(8) % 2)
    save_prior(folder / "p.safetensors", train_prior(public, classes=2, steps=2, width=8), {})
    return (folder / "p.safetensors").read_bytes()


def _records() -> dict[str, bytes]:
    plan = plan_file.parse(
        {
            "data": {"source": "digits"},
            "models": [{"name": "mlp", "hidden": [8]}],
            "attacks": [{"name": "linear_inversion"}],
            "defenses": [{"name": "none"}, {"name": "dp_sgd", "noise_multiplier": 1.0}],
        }
    )
    return {"records.jsonl": b"".join(encode(found.record) for found in run(plan, pictures=False))}


def formats(folder: Path) -> dict[str, Format]:
    """Every format, with valid files; they are made anew, so that they are valid now."""
    named = {"0.weight": torch.ones(2, 3), "0.bias": torch.zeros(2)}
    update = save(named, {"leakbound.kind": "gradient", "leakbound.batch_size": "2"})
    images = np.random.default_rng(0).random((6, 1, 4, 4), np.float32)
    npz = _array(inputs=images, labels=np.arange(6) % 3)
    small = torch.nn.Sequential(torch.nn.Linear(3, 2))

    def table(place: Path) -> object:
        return data.load(f"table:{place / 't.csv'}", schema=place / "s.toml")

    rows = {"t.csv": TABLE.encode(), "s.toml": SCHEMA.encode()}
    odd = {"t.csv": ODD_TABLE.encode(), "s.toml": ODD_SCHEMA.encode()}
    more = {"dicom": _images("0.dcm", _dicom())} if DICOM else {}
    if NIFTI:
        more["nifti"] = _images("0.nii", _nifti())
    idx = _idx()
    return {
        "plan": one("p.toml", PLAN, plan_file.load),
        "schema": one("s.toml", SCHEMA, Schema.load),
        "table": Format(rows, table, "t.csv"),
        "schema of a table": Format(rows, table, "s.toml"),
        "odd table": Format(odd, table, "t.csv"),
        "schema of an odd table": Format(odd, table, "s.toml"),
        "draft": one("t.csv", ODD_TABLE, Schema.infer),
        "deployment": one("d.toml", DEPLOYMENT, deployment_file.read),
        "policy": one("p.toml", POLICY, policy.read),
        "flower app": one("pyproject.toml", FLOWER, flower_app.read),
        "nvflare job": one("config_fed_client.json", NVFLARE, nvflare.read),
        "trees": one("x.json", TREES, trees.read),
        "adapter": one("adapter_config.json", ADAPTER, adapters.read_config),
        "safetensors": one("u.safetensors", update, tensors.read),
        "update": one("u.safetensors", update, capture.load),
        "update npz": one(
            "u.npz", _array(a=np.ones(3), b=np.eye(2)), lambda p: capture.load(p, kind="gradient")
        ),
        "weights": one("w.safetensors", save(named), lambda p: load_weights(small, p)),
        "prior": one("p.safetensors", _prior(folder), load_prior),
        "factor": one("c.npy", _npy(np.tril(np.ones((4, 4)))), Factor.of_file),
        "npz": one("d.npz", npz, lambda p: data.load(f"npz:{p}")),
        "idx images": Format(idx, lambda p: data.load(f"idx:{p}"), "t10k-images-idx3-ubyte"),
        "idx labels": Format(idx, lambda p: data.load(f"idx:{p}"), "t10k-labels-idx1-ubyte"),
        "zip": one("z.zip", _zip(), lambda p: data.load(f"zip:{p}")),
        "image": _images("0.png", _picture("PNG")),
        "wide image": _images("0.png", _picture("PNG", wide=True)),
        "gif": _images("0.gif", _picture("GIF")),
        "image without an ending": _images("0", _picture("JPEG")),
        "text": one("t.txt", TEXT, lambda p: data.load(f"text:{p}")),
        **more,
        "epsilon audit": one("a.json", EPSILON, _claimed),
        "records": Format(_records(), _of_run, "records.jsonl"),
        "defense": one("w", "gaussian_noise,noise_std=0.1", _words(lambda t: parse("defense", t))),
        "target": one("w", "psnr>=25 with probability<=0.01", _words(Target.parse)),
        "mechanism": one("w", "blt:0.9,0.5/0.1,0.2", _words(lambda t: Factor.parse(t, 8))),
    }


def _gradient(path: Path) -> object:
    return capture.load(path, kind="gradient")


def _words(read: Callable[[str], object]) -> Read:
    return lambda path: read(path.read_bytes().decode("utf-8", "replace"))


def _claimed(path: Path) -> object:
    found = finding.read(path)
    return found.sentence, list(found.lines)


def _of_run(folder: Path) -> object:
    return run_folder._lines(folder / "records.jsonl", run_folder.Assessment)


TARGETS = (
    *(
        "plan",
        "schema",
        "table",
        "schema of a table",
        "odd table",
        "schema of an odd table",
        "draft",
        "deployment",
        "policy",
        "flower app",
        "nvflare job",
    ),
    *("trees", "adapter", "safetensors", "update", "update npz", "weights", "prior"),
    *("factor", "npz", "idx images", "idx labels", "zip", "image", "text", "records"),
    *("wide image", "gif", "image without an ending", *["dicom"] * DICOM, *["nifti"] * NIFTI),
    *("defense", "target", "mechanism", "epsilon audit"),
)


def damage(content: bytes, draw: random.Random) -> bytes:
    """One to four mutations: of bytes, of numbers, of words, of lines."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        content = draw.choice(MUTATIONS)(content, draw)
    return content


Mutation = Callable[[bytes, random.Random], bytes]


def _flip(content: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(content) or 1)
    return content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :]


def _head(content: bytes, draw: random.Random) -> bytes:
    """Near the start, where lengths and magic numbers are."""
    at = draw.randrange(min(16, len(content)) or 1)
    return content[:at] + bytes([draw.choice((0, 1, 127, 128, 255))]) + content[at + 1 :]


def _cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content) + 1)]


def _remove(content: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(content) or 1)
    return content[:at] + content[at + draw.randrange(1, 40) :]


def _repeat(content: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(content) or 1)
    part = content[at : at + draw.randrange(1, 60)]
    return content[:at] + part * draw.choice((2, 3, 50)) + content[at:]


def _swap(pattern: bytes, others: tuple[str, ...], quote: bool = False) -> Mutation:
    def swap(content: bytes, draw: random.Random) -> bytes:
        places = list(re.finditer(pattern, content))
        if not places:
            return _flip(content, draw)
        place, new = draw.choice(places), draw.choice(others).encode("utf-8", "surrogatepass")
        new = b'"' + new + b'"' if quote else new
        return content[: place.start()] + new + content[place.end() :]

    return swap


def _lines(content: bytes, draw: random.Random) -> bytes:
    lines = content.split(b"\n")
    at = draw.randrange(len(lines))
    draw.choice((lambda: lines.pop(at), lambda: lines.insert(at, lines[-1]), lines.reverse))()
    return b"\n".join(lines)


MUTATIONS = (
    *(_flip, _head, _cut, _remove, _repeat, _lines),
    _swap(rb"-?\d+(\.\d+)?(e-?\d+)?", NUMBERS),
    _swap(rb'"[^"\n]*"', WORDS, quote=True),
    _swap(rb'"[^"\n]*"', NUMBERS),
    _swap(rb"\[[^\[\]\n]*\]", ("[]", "[[]]", "{}", "0", '"x"', "[1, [2, [3]]]", "[" * 2000)),
    _swap(rb"\w+(?= = )", ("name", "x", "__class__", "a.b", '"a b"')),
)


@contextmanager
def _limited() -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"it took more than {SECONDS} s")  # no OSError of a file: see below

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def attempt(form: Format, folder: Path, content: bytes) -> tuple[bool, str]:
    """Whether the damaged file was read, and the traceback of a fault."""
    for name, own in form.files.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_bytes(content if name == form.damaged else own)
    try:
        with _limited(), warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "data source")  # what is left out
            form.read(folder)
    except TimeoutError:
        return False, traceback.format_exc()
    except EXPECTED as error:
        lines = str(error).strip()
        return False, "" if lines else f"{type(error).__name__} without a message"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return False, traceback.format_exc()
    return True, ""


def fuzz(
    folder: Path, seconds: float, seed: int, only: str | None = None, keep: Path | None = None
) -> Found:
    """Damage every format in turn, until the time is over; the seed names the inputs."""
    found, known = Found(), formats(folder)
    assert set(known) == set(TARGETS)
    torch.set_num_threads(1)
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        for name in TARGETS if only is None else (only,):
            form, place = known[name], folder / "inputs" / name.replace(" ", "-")
            draw = random.Random(f"{seed}/{name}/{number}")
            content = damage(form.files[form.damaged], draw)
            read, trace = attempt(form, place, content)
            found.counts[name] += 1
            found.read[name] += read
            if trace:
                found.faults.append(Fault(name, number, trace))
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    (keep / f"{name.replace(' ', '-')}-{seed}-{number}").write_bytes(content)
        number += 1
    return found
