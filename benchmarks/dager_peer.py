"""DAGER's own code beside ours, on the same gradients: sequences, tokens, claims, and seconds.

`python benchmarks/dager_peer.py CLONE`, with a clone of
github.com/insait-institute/dager-gradient-inversion (Petrov et al. 2024, commit 4383e25). Nothing
of it is copied. It needs transformers and peft. Both tools get one model, one batch and one
gradient, and run one after the other on one thread. DAGER is made for GPUs. A tool is stopped
after `--limit` seconds on a batch (600), which the table says; then its sequences do not count.

Models: random weights, 6 layers, width 384, 30,522 tokens; tokens follow Zipf's law. DAGER draws
the head of a GPT-2 classifier anew, with standard deviation 0.001; both tools get that head. A
BERT sequence starts with token 101 and ends with 102, as DAGER requires. DAGER knows these two
tokens, ours does not.

What is DAGER's: `reconstruct` of its attack.py with all that it calls, for ranks, spans, filters,
and the choice of sentences. What this file replaces at run time, as it needs transformers 4:

- the forward pass up to the second layer, by a hook that stops the model there;
- the download of models and of tokenizers, by our models and by a tokenizer of numbers;
- the gradient, by that of our update (checked against its own first);
- the list of layers, cut to those that the model has;
- its `rouge` metric, which only sorts sentences by the truth at the end. They are taken before.

Its parameters are those of its scripts gpt2.sh and bert.sh: `l1_filter` all (BERT: maxB),
`l2_filter` non-overlap, `l1_span_thresh` 1e-5, `l2_span_thresh` 1e-3, `distinct_thresh` 0.7,
`parallel` 1000, `rank_cutoff` 20. `rank_tol` is its default, 1e-7, or 1e-8: the last two are its
advice for batches of up to 16. They are tried in turn until one finds everything. The best result
counts, and only its seconds.

Columns hold ours / DAGER's. "claimed" counts the sequences that a tool calls right: ours all of a
batch without a problem, DAGER's those below its threshold. "wrong" counts false claims. A claim
about next tokens leaves out the last token if the tool does not give it: DAGER never does, as no
gradient of a span depends on it. Set scores and "all but last" leave it out too.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.machinery
import io
import logging
import os
import signal
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import token_quality
import torch
from scipy.optimize import linear_sum_assignment
from token_quality import HEADS, LAYERS, VOCABULARY, WIDTH
from torch import Tensor

from leakbound.attacks.tokens.rows import TokenRows
from leakbound.attacks.tokens.span import TokenSpan
from leakbound.core import Batch, NotApplicable, Observation, Task
from leakbound.defenses import NoDefense
from leakbound.domains import TokenDomain
from leakbound.protocol import play
from leakbound.randomness import stream

KINDS = ("GPT-2 classes", "GPT-2 next token", "GPT-2 next token, tied", "BERT classes")
SIZES, LENGTHS = (1, 2, 4, 8), (16, 32)
TOLERANCES = (None, 1e-7, 1e-8)
START, END, UNUSED = 101, 102, VOCABULARY - 1  # BERT's marks; GPT-2's end, which is not drawn

Rows = list[tuple[int, ...]]


@dataclass(frozen=True)
class Scene:
    """One batch: its tokens, its model, its update, and the number of tokens a loss reaches."""

    kind: str
    ids: Tensor
    wrapper: Any
    seen: Observation
    reached: int

    @property
    def truth(self) -> Rows:
        return rows_of(self.ids)

    @property
    def tokens(self) -> set[int]:
        return set(self.ids[:, : self.reached].flatten().tolist())


@dataclass(frozen=True)
class Found:
    """What a tool found: sequences, those it claims, tokens, seconds, and the tolerance."""

    sequences: Rows
    claimed: Rows
    tokens: set[int]
    seconds: float
    tolerance: float | None = None
    stopped: bool = False


# --- scenes ------------------------------------------------------------------------------------


def model_of(kind: str) -> Any:
    import transformers

    if kind.startswith("BERT"):
        return token_quality.model_of("encoder")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        tie_word_embeddings=kind.endswith("tied"),
        bos_token_id=UNUSED,
        eos_token_id=UNUSED,
        pad_token_id=UNUSED,
        num_labels=2,
    )
    if kind.endswith("classes"):
        return transformers.GPT2ForSequenceClassification(config).eval()
    return transformers.GPT2LMHeadModel(config).eval()


def draw(kind: str, size: int, length: int, seed: int) -> Tensor:
    """Sequences of tokens by Zipf's law (exponent 1), with BERT's marks at both ends."""
    ids = token_quality.draw(size, length, seed)
    if not kind.startswith("BERT"):
        return ids.clamp(max=UNUSED - 1)
    ids = torch.where(ids <= END, ids + END + 1, ids)
    ids[:, 0], ids[:, -1] = START, END
    return ids


def scene_of(peer: Peer, kind: str, size: int, length: int, seed: int) -> Scene:
    ids = draw(kind, size, length, seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_of(kind)
    wrapper = peer.wrapped(kind, model, ids)  # draws the head anew
    words = "next token" in kind
    task = Task.of(
        model,
        domain=TokenDomain(VOCABULARY, length),
        loss="next_token" if words else "cross_entropy",
        classes=VOCABULARY if words else 2,
    )
    labels = torch.arange(size) % 2
    batch = Batch(ids, ids if words else labels)
    seen = play(task, [batch], NoDefense(), [stream(0, "client"), stream(0, "all")]).observation
    theirs = wrapper.compute_grads(peer.tokenizer(peer.texts(ids)), labels[None])
    parts = seen.update.rows[0].split([own.numel() for own in model.parameters()])
    same = [own.view_as(like) for own, like in zip(parts, model.parameters(), strict=True)]
    for own, other in zip(same, theirs, strict=True):
        scale = float(own.abs().max())
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4 * scale)
    wrapper.compute_grads = lambda *_: [own.clone() for own in same]
    return Scene(kind, ids, wrapper, seen, length - words)


# --- DAGER's side ------------------------------------------------------------------------------


class Log:
    """Stands for a Neptune run, and keeps the values that DAGER logs."""

    def __init__(self) -> None:
        self.values: dict[str, list[Any]] = {}

    def __getitem__(self, name: str) -> Any:
        return types.SimpleNamespace(log=self.values.setdefault(name, []).append)


class Numbers:
    """A tokenizer whose words are the numbers of tokens. It keeps the lists that it decodes."""

    bos_token = eos_token = None
    padding_side = "right"

    def __init__(self) -> None:
        self.pad_token_id, self.model_max_length = UNUSED, 512
        self.decoded: Rows = []

    def add_special_tokens(self, _: dict[str, Any]) -> None:
        """Nothing: the padding is set."""

    def __call__(self, texts: Sequence[str], **_: Any) -> Any:
        import transformers

        rows = [[int(word) for word in text.split()] for text in texts]
        longest = max(map(len, rows))
        full = [row + [self.pad_token_id] * (longest - len(row)) for row in rows]
        mask = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
        found = {"input_ids": torch.tensor(full), "attention_mask": torch.tensor(mask)}
        if self.pad_token_id != UNUSED:
            found["token_type_ids"] = torch.zeros_like(found["input_ids"])
        return transformers.BatchEncoding(found)

    def decode(self, ids: Any) -> str:
        if isinstance(ids, list):  # predictions are lists, the truth is a tensor
            self.decoded.append(tuple(ids))
        return " ".join(str(int(token)) for token in ids)


class Stop(Exception):
    """Ends a forward pass."""


def partial(model: Any, layers: Any, module: Callable[[Any], Any]) -> None:
    """Give a model the method by which DAGER asks for inputs of its first layers."""

    def get_hidden_states(
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        n_layers: int = 1,
    ) -> list[Tensor]:
        found: list[Tensor] = []

        def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(args[0] if args else kwargs["hidden_states"])
            if len(found) == n_layers:
                raise Stop

        watched = [module(layer) for layer in layers[1 : 1 + n_layers]]
        hooks = [own.register_forward_pre_hook(note, with_kwargs=True) for own in watched]
        # Masks without padding change nothing, and no mask lets attention take its fast path.
        whole = attention_mask is None or bool(attention_mask.all())
        mask = {} if whole else {"attention_mask": attention_mask}
        kinds = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        with contextlib.suppress(Stop):
            model(input_ids=input_ids, use_cache=False, **mask, **kinds)
        for hook in hooks:
            hook.remove()
        return [own.clone() for own in found]

    model.get_hidden_states = get_hidden_states


def stand_in(name: str, **content: Any) -> None:
    """Put a module in the place of one that DAGER imports."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(content)
    sys.modules[name] = module


class Peer:
    """DAGER's modules, with stand-ins for what today's transformers lacks."""

    def __init__(self, clone: str) -> None:
        import peft  # noqa: F401  # before the stand-in for datasets, which it looks for

        sys.path.insert(0, clone)
        stand_in("datasets", load_metric=None, load_dataset=None)
        stand_in(
            "utils.partial_models",
            add_partial_forward_gpt2=lambda own: partial(own, own.h, lambda x: x.attn.c_attn),
            add_partial_forward_bert=lambda own: partial(own, own.encoder.layer, lambda x: x),
            add_partial_forward_llama=None,
        )
        os.environ.setdefault("HF_TOKEN", "none")
        kept, sys.argv = sys.argv, ["attack.py", *self.words(KINDS[0], 1)]
        self.attack: Any = importlib.import_module("attack")
        sys.argv = kept
        self.models: Any = importlib.import_module("utils.models")
        self.factory: Any = importlib.import_module("args_factory")
        self.tokenizer = Numbers()

    @staticmethod
    def words(kind: str, size: int) -> list[str]:
        """The command line of DAGER's scripts gpt2.sh and bert.sh, on the CPU."""
        encoder = kind.startswith("BERT")
        task = "next_token_pred" if "next token" in kind else "seq_class"
        given = {
            "dataset": "cola",
            "split": "val",
            "n_inputs": 100,
            "batch_size": size,
            "l1_filter": "maxB" if encoder else "all",
            "l2_filter": "non-overlap",
            "model_path": "bert-base-uncased" if encoder else "gpt2",
            "device": "cpu",
            "task": task,
        }
        return [word for name, value in given.items() for word in (f"--{name}", str(value))]

    @staticmethod
    def texts(ids: Tensor) -> list[str]:
        return [" ".join(map(str, row)) for row in ids.tolist()]

    def wrapped(self, kind: str, model: Any, ids: Tensor) -> Any:
        """DAGER's wrapper of a model."""
        self.tokenizer = Numbers()
        self.tokenizer.pad_token_id = 0 if kind.startswith("BERT") else UNUSED
        given = types.SimpleNamespace(from_pretrained=lambda *_, **__: model)
        self.models.AutoModelForSequenceClassification = given
        self.models.AutoModelForCausalLM = given
        named = types.SimpleNamespace(from_pretrained=lambda *_, **__: self.tokenizer)
        self.models.AutoTokenizer = named
        wrapper = self.models.ModelWrapper(self.factory.get_args(self.words(kind, len(ids))))
        wrapper.layer_ids = wrapper.layer_ids[:LAYERS]
        return wrapper

    def ranks(self, scene: Scene) -> list[float | None]:
        """The tolerances whose ranks differ: the others would give the same result."""
        grads, found = scene.wrapper.compute_grads(), dict[int, float | None]()
        for tolerance in TOLERANCES:
            rank, _ = scene.wrapper.get_matrices_expansions(grads, B=None, tol=tolerance)
            found.setdefault(int(rank), tolerance)
        return [*found.values()]

    def run(self, scene: Scene, tolerance: float | None, limit: float) -> Found:
        """One call of DAGER's `reconstruct`, stopped after `limit` seconds."""
        log, wrapper, tokens = Log(), scene.wrapper, set[int]()
        args = self.factory.get_args(self.words(scene.kind, len(scene.ids)))
        args.rank_tol, args.neptune = tolerance, log
        wrapper.args, self.tokenizer.decoded = args, []
        level_one = self.attack.filter_l1

        def noted(*given: Any) -> Any:
            answer = level_one(*given)
            tokens.update(token for own in answer[1] for token in own)
            tokens.update([END] if answer[3] else [])
            return answer

        score = types.SimpleNamespace(mid=types.SimpleNamespace(fmeasure=0.0))
        metric = types.SimpleNamespace(compute=lambda **_: {"rouge1": score})
        sample = self.texts(scene.ids), torch.arange(len(scene.ids))[None] % 2
        torch.manual_seed(args.rng_seed)
        self.attack.filter_l1, stopped = noted, False
        start = time.perf_counter()
        try:
            with quiet(), timed(limit):
                self.attack.reconstruct(args, torch.device("cpu"), sample, metric, wrapper)
        except TimeoutError:
            stopped = True
        finally:
            self.attack.filter_l1 = level_one
        spent = time.perf_counter() - start
        rows = self.tokenizer.decoded  # those that it claims come first
        claims = int(sum(log.values.get("logs/num_pred", [0])))
        return Found(rows[: len(scene.ids)], rows[:claims], tokens, spent, tolerance, stopped)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without output: DAGER prints much."""
    hole = io.StringIO()
    with contextlib.redirect_stdout(hole), contextlib.redirect_stderr(hole):
        yield


@contextlib.contextmanager
def timed(limit: float) -> Iterator[None]:
    """Raise TimeoutError after so many seconds."""

    def ring(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- our side ----------------------------------------------------------------------------------


def ours(scene: Scene, seed: int, limit: float) -> Found:
    start = time.perf_counter()
    try:
        with timed(limit):
            answer = TokenSpan()(scene.seen, stream(seed, "span"))
    except TimeoutError:
        return Found([], [], set(), time.perf_counter() - start, None, True)
    spent = time.perf_counter() - start
    rows = rows_of(answer.inputs)
    tokens = set(TokenSpan().tokens(scene.seen))
    return Found(rows, rows if answer.problem is None else [], tokens, spent)


def words_of(scene: Scene) -> Found:
    """What `TokenRows` finds: tokens only."""
    start = time.perf_counter()
    try:
        tokens = set(TokenRows().tokens(scene.seen))
    except NotApplicable:
        tokens = set()
    return Found([], [], tokens, time.perf_counter() - start)


# --- scores ------------------------------------------------------------------------------------


def rows_of(ids: Tensor) -> Rows:
    return [tuple(row) for row in ids.tolist()]


def matched(truth: Rows, found: Rows) -> int:
    """How many sequences are found, one for one."""
    return sum((Counter(truth) & Counter(found)).values())


def cut(rows: Rows, length: int) -> Rows:
    return [row[:length] for row in rows]


def rouge(truth: tuple[int, ...], found: tuple[int, ...], n: int) -> float:
    """The F1 score of runs of n tokens."""
    runs = [zip(*(row[k:] for k in range(n)), strict=False) for row in (truth, found)]
    left, right = map(Counter, runs)
    both = sum((left & right).values())
    return 2 * both / max(1, sum(left.values()) + sum(right.values()))


def rouges(truth: Rows, found: Rows) -> tuple[float, float]:
    """Mean ROUGE-1 and ROUGE-2, one for one; a sequence that is not found counts 0."""
    if not found:
        return 0.0, 0.0
    each = [np.array([[rouge(a, b, n) for b in found] for a in truth]) for n in (1, 2)]
    at = linear_sum_assignment(-each[0] - 1e-3 * each[1])
    return tuple(float(own[at].sum()) / len(truth) for own in each)  # type: ignore[return-value]


def scores(scene: Scene, found: Found) -> dict[str, float]:
    truth, most = scene.truth, scene.reached
    right = len(scene.tokens & found.tokens)
    one, two = rouges(truth, found.sequences)
    begun = matched(cut(truth, most), cut(found.sequences, most))
    full = all(len(row) == scene.ids.shape[1] for row in found.claimed)
    claimed = found.claimed if full else cut(found.claimed, most)
    wrong = len(claimed) - matched(truth if full else cut(truth, most), claimed)
    return {
        "exact": matched(truth, found.sequences),
        "begun": begun,
        "precision": right / max(1, len(found.tokens)),
        "recall": right / len(scene.tokens),
        "rouge1": one,
        "rouge2": two,
        "claimed": len(claimed),
        "wrong": wrong,
        "seconds": found.seconds,
    }


def best(scene: Scene, every: Sequence[Found]) -> Found:
    """DAGER's best result: most sequences, then the best tokens, then the fewest seconds."""

    def key(found: Found) -> tuple[float, ...]:
        own = scores(scene, found)
        order = ("exact", "begun", "rouge1", "recall", "precision")
        return (*(own[name] for name in order), -own["seconds"])

    return max(every, key=key)


def line(kind: str, size: int, length: int, every: Sequence[tuple[Scene, list[Found]]]) -> str:
    """One line of the table: sums of sequences, means of the rest."""
    each = [[scores(scene, found[k]) for scene, found in every] for k in range(3)]

    def total(tool: int, name: str) -> str:
        return f"{sum(own[name] for own in each[tool]):.0f}"

    def mean(tool: int, name: str) -> float:
        return sum(own[name] for own in each[tool]) / len(each[tool])

    def pair(tool: int, *names: str) -> str:
        return ", ".join(f"{mean(tool, name):.3g}" for name in names)

    stops = [sum(found[k].stopped for _, found in every) for k in range(2)]
    said = [f" (stopped: {n})" if n else "" for n in stops]
    used = [found[1].tolerance for _, found in every]
    cells = [
        kind,
        f"{size} × {length}",
        str(size * len(every)),
        " / ".join(total(k, "exact") for k in (0, 1)),
        " / ".join(total(k, "begun") for k in (0, 1)),
        " / ".join(pair(k, "precision", "recall") for k in (2, 0, 1)),
        " / ".join(pair(k, "rouge1", "rouge2") for k in (0, 1)),
        " / ".join(f"{total(k, 'claimed')} ({total(k, 'wrong')})" for k in (0, 1)),
        " / ".join(f"{mean(k, 'seconds'):.3g}{said[k]}" for k in (0, 1)),
        f"{mean(0, 'seconds') / mean(1, 'seconds'):.2g}",
        ", ".join("default" if own is None else f"{own:.0e}" for own in dict.fromkeys(used)),
    ]
    return "| " + " | ".join(cells) + " |"


def round_of(
    peer: Peer, kind: str, size: int, length: int, seed: int, limit: float
) -> tuple[Scene, list[Found]]:
    """One batch: what `TokenSpan`, DAGER and `TokenRows` find."""
    scene = scene_of(peer, kind, size, length, seed)
    own = ours(scene, seed, limit)
    left, tries = limit, list[Found]()
    for tolerance in peer.ranks(scene):
        tries.append(peer.run(scene, tolerance, max(1.0, left)))
        left -= tries[-1].seconds
        own_scores = scores(scene, tries[-1])
        if own_scores["begun"] == size and own_scores["recall"] == 1 == own_scores["precision"]:
            break
    return scene, [own, best(scene, tries), words_of(scene)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clone")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--limit", type=float, default=600, help="seconds of a tool on a batch")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    peer = Peer(given.clone)
    print(
        "| model | batch × tokens | sequences | exact | all but last | tokens: P, R (rows / span / "
        "DAGER) | ROUGE-1, -2 | claimed (wrong) | s | ratio | `rank_tol` |"
    )
    print("|---|---|" + "--:|" * 9)
    for kind in given.kinds:
        for length in given.lengths:
            for size in given.sizes:
                every = [
                    round_of(peer, kind, size, length, seed, given.limit)
                    for seed in range(given.seeds)
                ]
                print(line(kind, size, length, every), flush=True)


if __name__ == "__main__":
    main()
