"""Sequences of tokens from the spans of layers' gradients."""

import itertools
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import nn

from leakbound.attacks.pace import Pace
from leakbound.attacks.tokens.layers import chosen, readers
from leakbound.attacks.tokens.rows import TokenRows
from leakbound.attacks.tokens.span import CHANCE, TokenSpan, _Search, span_of, stored_span
from leakbound.client import example_gradients
from leakbound.core import Batch, LocalPlan, NotApplicable, Task
from leakbound.defenses import GaussianNoise, NoDefense, TopK
from leakbound.domains import TokenDomain
from leakbound.domains.known import KnownValues, known_parts
from leakbound.losses import UNSCORED
from leakbound.protocol import play
from leakbound.randomness import permutation, stream
from leakbound.testing import check_attack

from .conftest import WIDTH, WORDS, decoder_or_encoder, peer, tokens


class Plain(nn.Module):
    """PyTorch's own encoder layers, whose attention is one module with one matrix."""

    def __init__(self, length, words=WORDS, width=WIDTH, first=False):
        super().__init__()
        self.words, self.places = (
            nn.Embedding(words, width),
            nn.Parameter(torch.randn(length, width)),
        )
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, 0.0, batch_first=True, norm_first=first
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, ids):
        return self.head(self.layers(self.words(ids) + self.places).mean(1))


def built(kind, length, seed=0, words=WORDS, width=WIDTH):
    if kind.startswith("plain"):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return Plain(length, words, width, first="first" in kind)
    return decoder_or_encoder(kind, length, seed, words, width)


def classifies(kind):
    return kind in ("encoder", "bert", "gpt2 classes") or kind.startswith("plain")


def seen(
    kind,
    ids,
    defense=None,
    plan=None,
    padding=None,
    words=WORDS,
    seed=0,
    model=None,
    side="right",
    **more,
):
    domain = TokenDomain(words, ids.shape[1], padding=padding, padding_side=side)
    if classifies(kind):
        labels, loss, classes = torch.arange(len(ids)) % 2, "cross_entropy", 2
    else:
        labels, loss, classes = ids, "next_token", words
        if padding is not None:
            labels = torch.where(ids == padding, UNSCORED, ids)
    model = model or built(kind, ids.shape[1], seed, words, **more)
    task = Task.of(model.eval(), domain=domain, loss=loss, classes=classes, plan=plan)
    sources = [stream(seed, "a"), stream(seed, "b")]
    return play(task, [Batch(ids, labels)], defense or NoDefense(), sources).observation


def rows(inputs):
    return sorted(map(tuple, inputs.tolist()))


def answer(observation, **settings):
    return TokenSpan(**settings)(observation, stream(0, "attack"))


@pytest.mark.parametrize("kind", ["decoder", "rotary"])
@pytest.mark.parametrize(("count", "length"), [(1, 12), (4, 8), (7, 6)])
def test_a_decoder_is_exact_to_the_last_token(kind, count, length):
    for seed in range(2):
        ids = tokens(count, length, seed)
        found = answer(seen(kind, ids, seed=seed))
        assert rows(found.inputs) == rows(ids)
        assert found.problem is None
        assert found.inputs.dtype == torch.int64
        assert found.objective < 1e-4


@pytest.mark.parametrize("kind", ["tied", "rotary tied"])
def test_a_shared_table_hides_last_tokens_that_occur_elsewhere(kind):
    ids = tokens(4, 8, words=WORDS - 4)
    hidden = ids.clone()
    ids[:, -1] = torch.arange(WORDS - 4, WORDS)
    assert rows(answer(seen(kind, ids)).inputs) == rows(ids)
    assert answer(seen(kind, ids)).problem is None
    hidden[:, -1] = hidden[0, 0]
    found = answer(seen(kind, hidden))
    assert rows(found.inputs[:, :-1]) == rows(hidden[:, :-1])
    assert "last token of 4 sequences" in found.problem
    known = replace(seen(kind, hidden), labels=hidden.clone())
    assert rows(answer(known).inputs) == rows(hidden)
    assert answer(known).problem is None


@pytest.mark.parametrize("kind", ["encoder", "plain", "plain first"])
def test_an_encoder_is_exact_for_one_sequence(kind):
    for seed in range(3):
        ids = tokens(1, 10, seed, words=30)
        found = answer(seen(kind, ids, seed=seed))
        assert torch.equal(found.inputs, ids)
        assert found.problem is None


@pytest.mark.parametrize("kind", ["encoder", "plain"])
def test_an_encoder_with_two_sequences(kind):
    right = 0
    for seed in range(4):
        ids = tokens(2, 6, seed)
        found = answer(seen(kind, ids, seed=seed))
        same = rows(found.inputs) == rows(ids)
        right += same and found.problem is None
        assert same or "undecided" in found.problem
    assert right >= 3


def test_marks_whose_gradients_cancel_hide_no_sequence():
    """Opposite labels and shared marks: rounding exceeds what the sum of gradients suggests."""
    transformers = pytest.importorskip("transformers")
    for seed in range(3):
        ids = tokens(2, 8, seed, lowest=3)
        ids[:, 0], ids[:, -1] = 1, 2
        found = answer(seen("bert", ids, model=peer(transformers, "bert", seed)))
        assert rows(found.inputs) == rows(ids)
        assert found.problem is None


def test_a_span_has_no_more_directions_than_tokens():
    """Beyond the edge of rounding, the last gap before as many counts; else all of them."""
    sizes = torch.tensor([1.0, 0.5, 1e-6, 4e-7, 3e-7], dtype=torch.float64)
    gradient = torch.diag(sizes)
    assert span_of(gradient, None, 1e-10).rank == 2  # all above the edge: the largest gap
    wide = torch.zeros(7, 8, dtype=torch.float64)
    wide[:5, :5] = gradient
    ranks = [span_of(wide, None, 1e-10, most).rank for most in (9, 4, 3, 1)]
    assert ranks == [5, 2, 2, 1]


def test_tokens_are_those_of_the_batch():
    for kind, count in itertools.product(("decoder", "rotary", "encoder"), (1, 4)):
        ids = tokens(count, 8)
        truth = {*(ids if kind == "encoder" else ids[:, :-1]).flatten().tolist()}
        assert {*TokenSpan().tokens(seen(kind, ids))} == truth


def test_frozen_words_leave_the_test_of_the_whole_vocabulary():
    ids = tokens(2, 6)
    model = built("decoder", 6)
    model.get_submodule("tokens").requires_grad_(False)
    found = answer(seen("decoder", ids, model=model))
    assert rows(found.inputs) == rows(ids)
    assert found.problem is None
    assert {*TokenSpan().tokens(seen("decoder", ids, model=model))} == {
        *ids[:, :-1].flatten().tolist()
    }


def test_rank_law_on_random_graphs():
    """LN(w_v + p_t) spans U + n - c dimensions, for U tokens, n places and c components."""
    width, words, places = 64, 40, 12
    norm = nn.LayerNorm(width, bias=False)
    for seed in range(100):
        draw = stream(seed, "graph")
        token, place = (
            torch.randn(words, width, generator=draw),
            torch.randn(places, width, generator=draw),
        )
        count = int(torch.randint(1, 30, (1,), generator=draw))
        pairs = torch.stack(
            [torch.randint(k, (count,), generator=draw) for k in (words, places)], 1
        ).unique(dim=0)
        inputs = norm(token[pairs[:, 0]] + place[pairs[:, 1]]).detach()
        mixed = torch.randn(3 * width, len(pairs), generator=draw) @ inputs
        span = span_of(mixed, None, float(torch.finfo(torch.float32).eps))
        assert span.rank == law(pairs.tolist())
        assert float(span.far(inputs)[1].max()) <= 1


def law(pairs):
    """U + n - c by union of sets."""
    sets = []
    for v, t in pairs:
        joined = {("token", v), ("place", t)}
        apart = [s for s in sets if not s & joined]
        sets = [*apart, joined.union(*(s for s in sets if s & joined))]
    return len(set().union(*sets)) - len(sets)


def test_brute_force_agrees():
    """On a tiny vocabulary, the attack finds all and only the sequences whose update this is."""
    words, length = 12, 3
    every = torch.tensor([*itertools.product(range(words), repeat=length)])
    ids = tokens(1, length, 1, words=words)
    observation = seen("decoder", ids, words=words, width=32)
    own = example_gradients(observation.task, every, every)
    error = (own - observation.update.rows).norm(dim=1) / own.norm(dim=1)
    assert rows(every[error < 1e-4]) == rows(answer(observation).inputs) == rows(ids)


@pytest.mark.parametrize("trials", [80, pytest.param(200, marks=pytest.mark.slow)])
def test_no_wrong_certificate_in_small_trials(trials):
    """Many of the batches with repeats, short, or of few tokens."""
    wrong = certain = 0
    for seed in range(trials):
        kind = ("decoder", "rotary", "tied", "encoder")[seed % 4]
        count, length = 1 + seed % 3, 2 + seed % 4
        ids = tokens(count, length, seed, words=8)
        found = answer(seen(kind, ids, words=8, width=32, seed=seed), restarts=2)
        certain += found.problem is None
        wrong += found.problem is None and rows(found.inputs) != rows(ids)
    assert wrong == 0
    assert certain >= 0.4 * trials


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_noise_gives_a_problem_not_a_wrong_certificate(kind):
    shares, exact = (1e-8, 1e-6, 1e-5, 1e-4, 1e-2, 1.0), []
    for share in shares:
        right = 0
        for seed in range(3):
            ids = tokens(1, 6, seed)
            size = float(seen(kind, ids, seed=seed).update.rows.norm()) * share
            found = answer(seen(kind, ids, GaussianNoise(size), seed=seed))
            same = torch.equal(found.inputs, ids)
            assert same or found.problem
            right += same and found.problem is None
        exact.append(right)
    assert exact[0] >= 2
    assert exact[-1] == exact[-2] == 0


def test_distances_of_noise_are_chi_square():
    """Of 1,000 points in a noisy span, as many lie too far as the level says (99 %)."""
    width, outputs, rank, noise = 48, 144, 8, 1e-4
    false = 0
    for seed in range(100):
        draw = stream(seed, "chi")
        points = torch.randn(rank, width, generator=draw, dtype=torch.float64)
        weights = torch.randn(outputs, rank, generator=draw, dtype=torch.float64)
        error = torch.randn(outputs, width, generator=draw, dtype=torch.float64)
        span = span_of(weights @ points + noise * error, noise, 1e-16)
        assert span.rank == rank
        chosen_points = torch.randn(10, rank, generator=draw, dtype=torch.float64) @ points
        away, _ = span.far(chosen_points)
        inside = chosen_points @ span.basis
        part = (inside / span.sizes).square().sum(1)
        size = (away * chosen_points.norm(dim=1)).square() / (noise**2 * part)
        false += int((size > stats.chi2.isf(CHANCE, width - rank)).sum())
    assert false <= stats.binom.isf(0.01, 1000, CHANCE)


def test_rounded_updates_are_exact_or_a_problem():
    ids = tokens(1, 8)
    observation = seen("decoder", ids)
    for kind in (torch.float16, torch.bfloat16):
        held = observation.update.rows.to(kind).to(torch.float32)
        found = answer(replace(observation, update=replace(observation.update, rows=held)))
        assert torch.equal(found.inputs, ids) or found.problem


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_padding_ends_a_sequence(kind):
    for count in (1, 2) if kind == "decoder" else (1,):
        ids = tokens(count, 8, count, lowest=1)
        ids[0, 5:] = 0
        found = answer(seen(kind, ids, padding=0))
        assert rows(found.inputs) == rows(ids)
        assert found.problem is None


def padded_before(count, seed=0):
    ids = tokens(count, 8, seed, lowest=1)
    for row, pads in enumerate((3, 0, 1, 5)[:count]):
        ids[row, :pads] = 0
    return ids


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("count", [1, 4])
def test_padding_before_sequences(kind, count):
    """As tokenizers of transformers place it: the label of the last padding is the first token."""
    transformers = pytest.importorskip("transformers")
    for seed in range(2):
        ids = padded_before(count, seed)
        model = peer(transformers, kind, seed)
        found = answer(seen(kind, ids, padding=0, side="left", model=model))
        assert rows(found.inputs) == rows(ids)
        assert found.problem is None


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_on_the_other_side_is_a_problem(kind, side):
    transformers = pytest.importorskip("transformers")
    ids = padded_before(4)
    for row in range(4) if side == "left" else ():
        ids[row] = ids[row].roll(-int((ids[row] == 0).sum()))
    found = answer(seen(kind, ids, padding=0, side=side, model=peer(transformers, kind)))
    assert found.problem
    if kind == "llama":
        which = "before" if side == "right" else "behind"
        assert f"it may stand {which} sequences" in found.problem


def test_known_tokens_behind_padding():
    """Starts at every place are searched; the first tokens of a sequence pass at later places."""
    transformers = pytest.importorskip("transformers")
    ids = padded_before(2)
    ids[1, 0], ids[0, -1] = 0, 7
    ids[1, -1] = 7
    observation = seen("llama", ids, padding=0, side="left", model=peer(transformers, "llama"))
    parts = known_parts(observation.task.domain, "places:7")
    found = answer(replace(observation, known=KnownValues(parts, parts.values(ids))))
    assert rows(found.inputs) == rows(ids)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_masked_language_models_show_sequences_as_masked(tied, count):
    """With a shared table, some words are missing, but nothing false is stated."""
    transformers = pytest.importorskip("transformers")
    mark = 1
    for seed in range(2):
        model = peer(transformers, "masked tied" if tied else "masked", seed)
        text = tokens(count, 10, seed, lowest=2)
        hidden = torch.zeros_like(text, dtype=torch.bool)
        hidden[:, 3] = hidden[0, 7] = True
        ids = text.masked_fill(hidden, mark)
        task = Task.of(
            model,
            domain=TokenDomain(WORDS, 10),
            loss="token_cross_entropy",
            classes=WORDS,
        )
        batch = Batch(ids, text.masked_fill(~hidden, UNSCORED))
        sources = [stream(seed, "a"), stream(seed, "b")]
        observation = play(task, [batch], NoDefense(), sources).observation
        found = answer(observation)
        assert found.problem is not None or rows(found.inputs) == rows(ids)
        assert tied or count > 1 or found.problem is None
        shown = TokenRows()(observation, stream(0)).facts
        words = {str(word) for word in [mark, *text.flatten().tolist()]}
        assert {word for fact in shown for word in fact.items} <= words


def test_repeated_tokens_and_sequences():
    same = torch.tensor([[3, 3, 3, 3, 3, 9], [3, 4, 5, 6, 7, 8]])
    assert rows(answer(seen("decoder", same)).inputs) == rows(same)
    found = answer(seen("rotary", same))  # a token repeated from the start has one input
    assert "1 distinct sequences are found for 2" in found.problem
    alone = answer(seen("rotary", same[:1]))
    assert torch.equal(alone.inputs, same[:1])
    found = answer(seen("decoder", same[[1, 1]]))
    assert "1 distinct sequences are found for 2" in found.problem


def test_too_many_tokens_are_a_problem():
    ids = tokens(8, 12)
    found = answer(seen("decoder", ids, width=32))
    assert found.problem
    assert answer(seen("decoder", ids), prefixes=2).problem


def test_several_steps_are_never_certain():
    ids = tokens(1, 6)
    found = answer(seen("encoder", ids, plan=LocalPlan(3, 0.1)))
    assert "several local steps" in found.problem


def test_what_it_does_not_apply_to():
    ids = tokens(1, 6)
    with pytest.raises(NotApplicable, match="no sum of gradients"):
        answer(seen("decoder", ids, plan=LocalPlan(1, 0.1, optimizer="adam")))
    with pytest.raises(NotApplicable, match="withholds entries"):
        answer(seen("decoder", ids, TopK(0.2)))
    task = Task.of(nn.Linear(4, 2))
    sources = [stream(0, "a"), stream(0, "b")]
    images = play(task, [Batch(torch.rand(1, 4), torch.tensor([1]))], NoDefense(), sources)
    with pytest.raises(NotApplicable, match="not sequences of tokens"):
        answer(images.observation)
    model = built("decoder", 6).requires_grad_(False)
    model.get_submodule("head").requires_grad_(True)
    with pytest.raises(NotApplicable, match="before places mix"):
        answer(seen("decoder", ids, model=model))
    with pytest.raises(ValueError, match="prefixes"):
        TokenSpan(prefixes=0)
    still = seen("decoder", ids)
    zero = replace(still, update=replace(still.update, rows=still.update.rows * 0))
    assert "vanished" in answer(zero).problem


def test_contract():
    model = built("encoder", 4, words=20, width=32)
    task = Task.of(model.eval(), domain=TokenDomain(20, 4), classes=2)
    for count in (1, 2):
        batch = Batch(tokens(count, 4, words=20), torch.arange(count))
        check_attack(TokenSpan(restarts=1), task=task, batch=batch)


@pytest.mark.parametrize("kind", ["gpt2", "gpt2 classes", "llama", "bert"])
def test_models_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    for count in (1, 4) if kind != "bert" else (1, 2):
        ids = tokens(count, 8, count, lowest=1)
        observation = seen(kind, ids, model=peer(transformers, kind))
        first, later = chosen(readers(observation.task))
        assert not first.mixes
        assert all(group.causal == (kind != "bert") for group in later)
        found = answer(observation)
        assert rows(found.inputs) == rows(ids)
        assert found.problem is None


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize(("rank", "count", "length"), [(8, 1, 8), (24, 3, 10)])
def test_adapters_that_get_one_input_count_together(rank, count, length, steps):
    """A first query has no gradient, and fewer rows than tokens span no sequence."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    for seed in range(2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            lora = peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj"])
            model = peft.get_peft_model(peer(transformers, "llama", seed), lora).eval()
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(p, std=0.02)
        ids = torch.stack([permutation(WORDS, stream(seed, k))[:length] for k in range(count)])
        result = answer(seen("rotary", ids, plan=LocalPlan(steps, 0.02), model=model))
        found = {tuple(row) for row in result.inputs[:, :-1].tolist()}
        assert found == {tuple(row) for row in ids[:, :-1].tolist()}
        assert result.problem  # nothing shows the last token
        assert ("several local steps" in result.problem) == (steps > 1)


@pytest.mark.parametrize("kind", ["gpt2", "encoder"])
def test_a_limit_on_time_ends_the_search(kind):
    """It ran without a look at the clock until it had tried every token and prefix."""
    observation = seen(kind, tokens(2, 5))
    with Pace(1e-9), pytest.raises(NotApplicable, match="the time is over"):
        answer(observation)


def knowing(observation, ids, text):
    parts = known_parts(observation.task.domain, text)
    return replace(observation, known=KnownValues(parts, parts.values(ids)))


def test_known_tokens_decide_the_order_of_an_encoder():
    """Of who knows half of two sequences; without it, the same search finds fewer."""
    found = {"": 0, "prefix:7": 0}
    for seed in range(1):
        ids = tokens(3, 10, seed)
        observation = seen("encoder", ids, seed=seed)
        for known in found:
            one = knowing(observation, ids, known) if known else observation
            found_rows = answer(one, restarts=1)
            right = rows(found_rows.inputs) == rows(ids)
            assert right or found_rows.problem is not None
            found[known] += right
    assert found["prefix:7"] > found[""], found


@pytest.mark.parametrize("text", ["prefix:3", "places:1,5", "places:5"])
def test_known_tokens_of_a_decoder_are_the_only_candidates(text, monkeypatch):
    ids = tokens(3, 6)
    ids[1, :3] = ids[0, :3]
    observation = knowing(seen("decoder", ids), ids, text)
    parts = observation.known.parts
    tested = []
    plain = _Search._tested

    def watched(self, sequences, **more):
        tested.append(sequences)
        return plain(self, sequences, **more)

    monkeypatch.setattr(_Search, "_tested", watched)
    found = answer(observation)
    assert found.problem is None
    assert rows(found.inputs) == rows(ids)
    given = parts.domain.blind(None).repeat(len(ids), 1).long()
    whole = parts.joined(parts.values(ids), parts.unknown(given))
    for part in tested:
        # The last token has no gradient, and is not searched.
        held = parts.places[: min(part.shape[1], 5)]
        wanted = {tuple(row) for row in whole[:, : len(held)][:, held].tolist()}
        assert {tuple(row) for row in part[:, : len(held)][:, held].tolist()} <= wanted
    # What is known from the start on is not searched.
    assert min(part.shape[1] for part in tested) == (4 if text == "prefix:3" else 1)


def stored(observation, rate, kind):
    """As if the client had stored its weights before and after in a type."""
    task = observation.task
    before = task.parameters.to(kind).float()
    after = (before - rate * observation.update.rows[0]).to(kind).float()
    task = replace(task, parameters=before, plan=LocalPlan(1, rate))
    update = replace(observation.update, rows=((before - after) / rate)[None])
    return replace(observation, task=task, update=update, sent=after[None])


def rounded_model(kind, length, seed, dtype):
    model = built(kind, length, seed)
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(value.to(dtype))
    return model


@pytest.mark.parametrize("kind", ["decoder", "rotary"])
@pytest.mark.parametrize(
    ("dtype", "rate"), [(torch.float32, 1e-2), (torch.float32, 1e-5), (torch.bfloat16, 1.0)]
)
def test_stored_weights_hide_no_sequence(kind, dtype, rate):
    """A fixed tolerance found 0 of 24 sequences at the last two rates."""
    exact = 0
    for seed in range(2):
        ids = tokens(4, 8, seed)
        model = rounded_model(kind, 8, seed, dtype)
        found = answer(stored(seen(kind, ids, seed=seed, model=model), rate, dtype))
        right = {*rows(found.inputs[:, :-1])} & {*rows(ids[:, :-1])}
        exact += len(right)
        if found.problem is None:
            assert rows(found.inputs) == rows(ids)
    assert exact >= 7


def test_rounding_without_a_gradient_is_no_answer():
    """Chance: the rounding alone, and a gradient of the wrong rows."""
    ids = tokens(4, 8)
    observation = stored(seen("decoder", ids), 1e-5, torch.float32)
    values = observation.update.rows[0]
    for turned in (
        values[torch.randperm(len(values), generator=stream(0, "turn"))],
        -values.flip(0),
    ):
        update = replace(observation.update, rows=turned[None])
        try:
            assert answer(replace(observation, update=update)).problem is not None
        except NotApplicable:
            continue


@pytest.mark.parametrize("rank", [1, 5, 12])
def test_directions_three_times_above_the_edge_are_counted(rank):
    """Rows of different rounding: a rank as by the rows' own noise, against exact products."""
    source = stream(rank, "edge")
    for _ in range(10):
        left, _ = torch.linalg.qr(torch.randn(96, rank, generator=source, dtype=torch.float64))
        right, _ = torch.linalg.qr(torch.randn(64, rank, generator=source, dtype=torch.float64))
        unit = torch.rand(96, 1, generator=source, dtype=torch.float64) + 0.01
        exact = 3 * (96**0.5 + 64**0.5) * unit * (left @ right.T)
        noise = unit * (torch.rand(96, 64, generator=source, dtype=torch.float64) - 0.5) * 12**0.5
        span = stored_span(exact + noise, unit.expand(96, 64), 1e-7, 40)
        assert span.rank == rank
        away, allowed = span.far(right.T)
        assert (away <= allowed).all()
