"""Tokens from adapters: the algebra against autograd, exact sets, brute force, certificates."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from leakbound.attacks.base import SentRow
from leakbound.attacks.span import Span, Tolerance
from leakbound.attacks.tokens.adapters import (
    AdapterPursuit,
    FirstLayer,
    gradient_rows,
    in_span,
    pairs_of,
    shared_space,
)
from leakbound.attacks.tokens.layers import dictionary
from leakbound.attacks.tokens.pursuit import Atoms, edge, pruned, pursue
from leakbound.captured import Capture, Settings, TrainingInfo, attack_all
from leakbound.core import Batch, LocalPlan, NotApplicable, Observation, Task
from leakbound.defenses import Clip, GaussianNoise, NoDefense, SecureAggregation
from leakbound.domains import TokenDomain
from leakbound.protocol import play
from leakbound.randomness import normal, permutation, stream

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


class Low(nn.Module):
    """A frozen layer with a low-rank change; `across` holds its factors the other way round."""

    def __init__(self, width: int, rank: int, *, across: bool = False, scale: float = 2.0) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=False)
        self.across, self.scale = across, scale
        shape = (width, rank) if across else (rank, width)
        self.first = nn.Parameter(torch.empty(shape))
        self.second = nn.Parameter(torch.empty(shape[::-1]))

    def forward(self, x: Tensor) -> Tensor:
        if self.across:
            return self.base(x) + self.scale * (x @ self.first @ self.second)
        return self.base(x) + self.scale * (x @ self.first.T @ self.second.T)


class Tiny(nn.Module):
    """One layer of attention with adapters on queries and values, and classes behind it."""

    def __init__(
        self, words: int, width: int, rank: int, *, places: int = 0, across: bool = False
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(places, width) if places else None
        self.norm = nn.LayerNorm(width) if places else nn.RMSNorm(width)
        self.query, self.value = (Low(width, rank, across=across) for _ in range(2))
        self.key, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.deep = Low(width, rank)
        self.head = nn.Linear(width, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        if self.places is not None:
            x = x + self.places(torch.arange(ids.shape[1], device=ids.device))
        seen = self.norm(x)
        scores = self.query(seen) @ self.key(seen).transpose(1, 2) / seen.shape[-1] ** 0.5
        x = x + self.out(scores.softmax(-1) @ self.value(seen))
        return self.head((x + self.deep(x.tanh()).tanh()).mean(1))


def tiny(
    seed: int,
    *,
    words: int = 60,
    width: int = 32,
    rank: int = 2,
    places: int = 0,
    across: bool = False,
    start: float = 0.3,
    dtype: torch.dtype = torch.float32,
    table: bool = False,
) -> Tiny:
    """The model with all but its adapters frozen; `start` is the size of B."""
    model = Tiny(words, width, rank, places=places, across=across)
    source = stream(seed, "tiny")
    for name, p in model.named_parameters():
        size = 1.0 if p.ndim == 1 or "words" in name else p.shape[-1] ** -0.5
        size = start if name.endswith("second") else size
        p.data = normal(p.shape, source, like=p.data) * size
        p.requires_grad_(name.endswith(("first", "second")) or (table and name == "words.weight"))
    return model.to(dtype).eval()


def seen(
    model: nn.Module,
    ids: Tensor,
    *,
    labels: Tensor | None = None,
    plan: LocalPlan | None = None,
    words: int = 60,
    defense=None,
) -> Observation:
    loss = "cross_entropy" if labels is None else "next_token"
    labels = torch.arange(len(ids)) % 3 if labels is None else labels
    domain = TokenDomain(words, ids.shape[1])
    task = Task.of(model, domain=domain, loss=loss, classes=words, plan=plan or LocalPlan())
    sources = [stream(0, "adapters", i) for i in range(2)]
    return play(task, [Batch(ids, labels)], defense or NoDefense(), sources).observation


def drawn(seed: int, batch: int, length: int, words: int = 60) -> Tensor:
    source = stream(seed, "ids")
    rows = [permutation(words, source)[torch.arange(length) % words] for _ in range(batch)]
    return torch.stack(rows)


def rounded(observation: Observation, kind: torch.dtype = torch.float32) -> Observation:
    """The update as a server finds it that gets weights and subtracts them."""
    task, rows = observation.task, observation.update.rows
    after = (task.parameters - task.plan.learning_rate * rows).to(kind).to(rows)
    change = (task.parameters - after) / task.plan.learning_rate
    return replace(observation, sent=after, update=replace(observation.update, rows=change))


def test_experiment_finds_adapters_of_own_code_in_both_forms():
    for across in (False, True):
        task = Task.of(tiny(0, across=across), domain=TokenDomain(60, 4))
        found = {(p.a, p.b, p.hook) for p in pairs_of(task)}
        assert found == {(f"{k}.first", f"{k}.second", k) for k in ("query", "value", "deep")}
        layer = FirstLayer.each(task, pairs_of(task))[0]
        assert {pair.hook for pair in layer.pairs} == {"query", "value"}
        assert not layer.by_place


def test_no_adapter_is_not_applicable():
    plain = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 3))
    with pytest.raises(NotApplicable, match="no low-rank adapter"):
        AdapterPursuit().tokens(seen(plain, drawn(0, 1, 3, 9), words=9))


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("places", [0, 5])
def test_tiny_transformer_gives_its_tokens(across, places):
    ids = drawn(1, 2, 5)
    model = tiny(1, across=across, places=places, width=48)
    observation = seen(model, ids)
    found = AdapterPursuit().found(observation)
    assert set(found.tokens) == set(ids.flatten().tolist())
    assert found.certain, found.why
    answer = AdapterPursuit()(observation, stream(0, "attack"))
    assert answer.inputs.shape == ids.shape
    assert answer.inputs.dtype == torch.int64
    assert set(answer.inputs.flatten().tolist()) == set(found.tokens)
    assert "order" in answer.problem


def test_one_sequence_with_positions_is_found_in_order():
    ids = drawn(2, 1, 6)
    ids[0, 4] = ids[0, 1]  # a repeated token
    answer = AdapterPursuit()(seen(tiny(2, places=6, width=48), ids), stream(0, "attack"))
    assert torch.equal(answer.inputs, ids)
    assert answer.problem is None


def test_places_that_add_are_one_space():
    """P x is parallel for all places of a token, also for tokens that did not measure the space."""
    task = Task.of(tiny(3, places=6, dtype=torch.float64), domain=TokenDomain(60, 6))
    layer = FirstLayer.each(task, pairs_of(task))[0]
    assert layer.by_place
    space = shared_space(task, layer, 6)
    assert space is not None
    for _, values in dictionary(task, layer.hook, 6):
        left = values - (values @ space) @ space.T
        s = torch.linalg.svdvals(left)
        assert float((s[:, 1] / s[:, 0]).max()) < 1e-8
        assert float((s[:, 0] / torch.linalg.svdvals(values)[:, 0]).min()) > 1e-2


def test_pursuit_agrees_with_brute_force():
    """The smallest sets of 12 tokens that explain a gradient, by trying all of up to five."""
    for seed in range(12):
        ids = drawn(seed, 1, 2 + seed % 4, words=12)
        model = tiny(seed, words=12, width=10, rank=1, dtype=torch.float64)
        observation = seen(model, ids, words=12)
        task, layer = (
            observation.task,
            FirstLayer.each(observation.task, pairs_of(observation.task))[0],
        )
        row = SentRow(observation, task, 0, 1)
        rows = torch.cat([gradient_rows(row, p, p.a) for p in layer.pairs])
        atoms = torch.cat([values[:, 0] for _, values in dictionary(task, layer.hook, 1)])
        fits: list[set[int]] = []
        for size in range(1, 6):
            for some in combinations(range(12), size):
                q = torch.linalg.qr(atoms[list(some)].T)[0]
                left = rows.T - q @ (q.T @ rows.T)
                if float(torch.linalg.matrix_norm(left, 2)) <= edge(len(rows), 10 - size):
                    fits.append(set(some))
            if fits:
                break
        assert fits == [set(AdapterPursuit().found(observation).tokens)]


def test_pruning_drops_what_is_not_needed():
    ids = drawn(4, 1, 4)
    observation = seen(tiny(4), ids)
    task, layer = observation.task, FirstLayer.each(observation.task, pairs_of(observation.task))[0]
    row = SentRow(observation, task, 0, 1)
    rows = torch.cat([gradient_rows(row, p, p.a) for p in layer.pairs])
    atoms = Atoms(dictionary(task, layer.hook, 1), by_place=False)
    none = torch.zeros(32, 0, dtype=torch.float64)
    chosen = pursue(atoms, rows, none, 10)
    more = chosen.where + [(0, k) for k in range(60) if (0, k) not in chosen.where][:9]
    again = pruned(atoms, rows, none, more, True)
    assert sorted(again.where) == sorted(chosen.where)


def test_first_step_shows_tokens_below_the_rank_alone():
    ids = drawn(5, 1, 5)
    few = seen(tiny(5, rank=8, start=0.0), ids)
    assert AdapterPursuit().found(few).certain
    assert AdapterPursuit().tokens(few) == tuple(sorted(ids[0].tolist()))
    with pytest.raises(NotApplicable, match="does not protect later rounds"):
        AdapterPursuit().tokens(seen(tiny(5, rank=4, start=0.0), ids))


def test_frozen_down_projection_keeps_the_span_test():
    ids = drawn(6, 1, 5)
    model = tiny(6, rank=8)
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("second"))
    observation = seen(model, ids, plan=LocalPlan(steps=3, learning_rate=0.01))
    assert AdapterPursuit().tokens(observation) == tuple(sorted(ids[0].tolist()))


def test_a_trained_word_table_leaves_few_candidates():
    """The table is trained, so tokens without a gradient cannot be chosen: twins are separated."""
    ids = drawn(7, 1, 5)
    for table in (False, True):
        model = tiny(7, table=table)
        twin = int(next(k for k in range(60) if k not in ids))
        model.words.weight.data[twin] = model.words.weight.data[ids[0, 0]]
        found = AdapterPursuit().found(seen(model, ids))
        assert found.certain == table
        if table:
            assert found.tokens == tuple(sorted(ids[0].tolist()))
        else:
            assert "another token" in found.why


def test_other_optimizers_are_undecided():
    """Also if a server takes the update for one of SGD, with weight decay as in AdamW."""
    observation = seen(tiny(8), drawn(8, 1, 4), plan=LocalPlan(2, 0.01, optimizer="adam"))
    with pytest.raises(NotApplicable, match=r"Adam, .* undecided, not protected"):
        AdapterPursuit().tokens(observation)
    task = replace(observation.task, plan=LocalPlan(2, 0.01))
    rows = observation.update.rows + 0.01 * task.parameters
    taken = replace(observation, task=task, update=replace(observation.update, rows=rows))
    answer = AdapterPursuit()(taken, stream(0, "attack"))
    assert "Adam" in answer.problem
    assert "undecided, not protected" in answer.problem


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("table", [False, True])
def test_earlier_rounds_of_a_client_separate_a_crowded_batch(same, table):
    """22 tokens in 32 dimensions with rank 4: too many for one round, not for six. A word table
    that is trained changes the layer's inputs, so earlier rounds do not count.
    """
    certain = 0
    for seed in range(5):
        rounds, source = [], stream(seed, "rounds")
        for k in range(6):
            ids = drawn(seed, 3, 8)
            model = tiny(seed, table=table)
            for p in model.parameters():
                if p.requires_grad:
                    p.data += 0.1 * normal(p.shape, source, like=p.data)
            if not same:  # each round holds 19 of the same 21 tokens
                ids = drawn(seed, 1, 21)[:, permutation(21, stream(k, "part"))[:19]]
            rounds.append(seen(model, ids))
        alone, last = (
            AdapterPursuit().found(rounds[-1]),
            replace(rounds[-1], history=tuple(rounds[:-1])),
        )
        found = AdapterPursuit().found(last)
        assert not alone.certain or table
        if found.certain:
            assert set(found.tokens) == set(ids.flatten().tolist())
        certain += found.certain
        assert not table or found.tokens == alone.tokens
    assert certain == 5


@pytest.mark.parametrize("other", [False, True])
def test_captured_rounds_of_one_client_are_attacked_together(other):
    """As above, from updates whose metadata name client and round; those of others do not count."""
    certain = 0
    for seed in range(4):
        captures, source = [], stream(seed, "rounds")
        ids = drawn(seed, 3, 8)
        for number in range(6):
            model = tiny(seed)
            for p in model.parameters():
                if p.requires_grad:
                    p.data += 0.1 * normal(p.shape, source, like=p.data)
            observation = seen(model, ids)
            sent = observation.task.unflatten(observation.update.rows[0])
            about = {"client": str(number if other else 7), "round": str(number)}
            before = {name: value.clone() for name, value in model.state_dict().items()}
            captures.append(Capture(f"round {number}", "gradient", sent, before, about))
        settings = Settings((8,), attacks="adapter_pursuit", domain=TokenDomain(60, 8))
        found = attack_all(captures, tiny(seed), settings, TrainingInfo(examples=3))
        facts = [fact for fact in found.records[-1].facts if fact.kind == "words"]
        assert not found.records[0].facts
        certain += bool(facts)
        if facts:
            tokens = {*AdapterPursuit().tokens(found.inferred[-1].observation)}
            assert tokens == set(ids.flatten().tolist())
            assert facts[0].count == len(tokens)
    assert certain == (0 if other else 4)


def test_an_update_of_zeros_and_a_hidden_one_give_a_problem():
    observation = seen(tiny(9), drawn(9, 2, 4))
    zero = replace(observation.update, rows=torch.zeros_like(observation.update.rows))
    answer = AdapterPursuit()(replace(observation, update=zero), stream(0, "attack"))
    assert "zero" in answer.problem
    rows = normal(observation.update.rows.shape, stream(0, "noise"))
    noise = replace(observation.update, rows=rows)
    found = AdapterPursuit().found(replace(observation, update=noise))
    assert not found.certain
    assert "rounding" in found.why or "half" in found.why


def test_clipping_and_a_sum_over_clients_keep_the_span():
    ids = [drawn(10, 1, 4), drawn(11, 1, 4)]
    model = tiny(10, width=48)
    task = Task.of(model, domain=TokenDomain(60, 4))
    clients = [Batch(one, torch.tensor([k])) for k, one in enumerate(ids)]
    sources = [stream(0, "sum", i) for i in range(3)]
    observation = play(task, clients, SecureAggregation(2), sources).observation
    assert AdapterPursuit().tokens(observation) == tuple(
        sorted(set(torch.cat(ids).flatten().tolist()))
    )
    clipped = seen(model, ids[0], defense=Clip(0.1))
    assert AdapterPursuit().tokens(clipped) == tuple(sorted(ids[0][0].tolist()))


def test_rows_that_a_mask_cuts_are_left_out():
    ids = drawn(13, 1, 4)
    observation = seen(tiny(13), ids)
    mask = torch.ones_like(observation.update.rows, dtype=torch.bool)
    start = next(a for name, _, a, _ in observation.task.layout if name == "query.first")
    mask[0, start + 3] = False
    cut = replace(observation.update, rows=observation.update.rows * mask, mask=mask)
    found = AdapterPursuit().found(replace(observation, update=cut))
    assert found.tokens == tuple(sorted(ids[0].tolist()))
    hidden = replace(cut, mask=None)
    assert not AdapterPursuit().found(replace(observation, update=hidden)).certain


def test_known_noise_is_rounding():
    """Far below the gradient it leaves the strongest tokens; above it, nothing certain is said."""
    ids = drawn(12, 1, 4)
    model = tiny(12)
    size = float(seen(model, ids).update.rows.norm())
    weak = AdapterPursuit().found(seen(model, ids, defense=GaussianNoise(1e-6 * size)))
    assert set(weak.tokens) == set(ids[0].tolist())
    strong = AdapterPursuit().found(seen(model, ids, defense=GaussianNoise(size)))
    assert not strong.certain


def test_no_certain_answer_holds_a_wrong_token():
    """200 small rounds: crowded batches, twins, local steps, rounded weights, half precision."""
    certain = wrong = 0
    for seed in range(200):
        words, width = (12, 40, 90)[seed % 3], (8, 12, 24)[seed // 3 % 3]
        batch, length = 1 + seed % 4, 2 + seed % 5
        half = seed % 11 == 0
        model = tiny(
            seed,
            words=words,
            width=width,
            rank=1 + seed % 3,
            places=length if seed % 2 else 0,
            start=0.0 if seed % 5 == 0 else 0.3,
            dtype=torch.bfloat16 if half else torch.float32,
        )
        if seed % 7 == 0:
            model.words.weight.data[1] = model.words.weight.data[0] * (1 + 1e-4)
        plan = LocalPlan(1 + seed % 3, (0.3, 0.03, 0.003)[seed % 3])
        ids = drawn(seed, batch, length, words)
        observation = seen(model, ids, plan=plan, words=words)
        if seed % 4 == 0 and not half:
            kind = torch.float32 if seed % 8 else torch.bfloat16
            observation = rounded(observation, kind)
        try:
            found = AdapterPursuit().found(observation)
        except NotApplicable:
            continue
        certain += found.certain
        wrong += found.certain and not set(found.tokens) <= set(ids.flatten().tolist())
    assert wrong == 0
    assert certain >= 50


def llama(
    seed: int,
    rank: int,
    *,
    start: float = 0.02,
    dtype: torch.dtype = torch.float32,
    kind: str = "lora",
):
    """A small Llama-like model with PEFT's adapters on queries and values."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        given = {"lora_alpha": 2 * rank, "target_modules": ["q_proj", "v_proj"]}
        if kind == "adalora":
            adapter = peft.AdaLoraConfig(init_r=rank, total_step=100, **given)
        else:
            adapter = peft.LoraConfig(r=rank, use_dora=kind == "dora", **given)
        model = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapter)
        for name, p in model.named_parameters():
            if ("lora_B" in name or "lora_E" in name) and start:
                nn.init.normal_(p, std=start)
    return model.eval().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_adapters_follow_the_formulas(dtype):
    """dB = s D^T X A^T and dA = s B^T D^T X, with X and D from hooks on PEFT's own layers."""
    model = llama(0, 4, dtype=dtype)
    ids = drawn(0, 2, 8, 300)
    row = seen(model, ids, labels=ids, words=300).update.rows[0]
    kept: dict[str, list[Tensor]] = {}
    layers = {k: m for k, m in model.named_modules() if k.endswith(("q_proj", "v_proj"))}
    for name, layer in layers.items():

        def note(_, given, output, name=name):
            output.retain_grad()
            kept[name] = [given[0].detach(), output]

        layer.register_forward_hook(note)
    logits = model(ids).logits
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    named = Task.of(model, domain=TokenDomain(300, 8)).unflatten(row)
    for name, (x, output) in kept.items():
        flat, back = x.flatten(0, 1), output.grad.flatten(0, 1)
        a, b = (layers[name].get_submodule(f"lora_{k}.default").weight for k in "AB")
        scale = layers[name].scaling["default"]
        wanted = {
            "lora_B": scale * back.T @ flat @ a.T,
            "lora_A": scale * b.T @ back.T @ flat,
        }
        for part, value in wanted.items():
            got = named[f"{name}.{part}.default.weight"]
            assert float(((got - value).norm() / value.norm()).detach()) <= 5e-7


@pytest.mark.parametrize("rank", [2, 4])
@pytest.mark.parametrize("size", [(1, 8), (1, 12), (4, 8), (4, 12)])
def test_llama_gives_its_tokens(rank, size):
    for seed in range(5):
        ids = drawn(seed, *size, 300)
        observation = seen(llama(seed, rank), ids, labels=ids, words=300)
        found = AdapterPursuit().found(observation)
        wanted = set(ids[:, :-1].flatten().tolist())  # nothing attends to the last one
        assert set(found.tokens) == wanted
        assert found.certain == (len(wanted) < (64 + 2 * rank) / 2)


@pytest.mark.parametrize("kind", ["dora", "adalora"])
def test_adapters_that_are_no_layers_of_their_own_give_their_tokens(kind):
    """PEFT calls A of DoRA on the identity, too, and A of AdaLoRA is no module."""
    for seed in range(3):
        ids = drawn(seed, 1, 8, 300)
        observation = seen(llama(seed, 4, kind=kind), ids, labels=ids, words=300)
        found = AdapterPursuit().found(observation)
        assert set(found.tokens) == set(ids[:, :-1].flatten().tolist())
        assert found.certain


class Adapted(nn.Module):
    """Frozen words and one adapter, for layers that use it oddly."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(60, 32).requires_grad_(False)
        self.query = nn.Module()
        self.query.lora_A = nn.Linear(32, 4, bias=False)
        self.query.lora_B = nn.Linear(4, 32, bias=False)


class Uncalled(Adapted):
    """Its weights are used, and its modules are never called."""

    def forward(self, ids):
        change = self.query.lora_B.weight @ self.query.lora_A.weight
        return (self.words(ids) @ change.T).mean(1)


def test_an_adapter_that_nothing_calls_is_named_as_such():
    observation = seen(Uncalled(), drawn(0, 1, 8))
    with pytest.raises(NotApplicable, match=r"calls neither 'query\.lora_A' nor the layer"):
        AdapterPursuit().found(observation)


class Shared(Adapted):
    """One layer with an adapter at two depths, as of ALBERT."""

    def forward(self, ids):
        x = self.words(ids)
        for _ in range(2):
            x = x + self.query.lora_B(self.query.lora_A(x)).tanh()
        return x.mean(1)


def test_an_adapter_at_several_depths_is_refused():
    """Its change also holds inputs of later layers: 6 of 162 lists of words were wrong."""
    with pytest.raises(NotApplicable, match=r"calls 'query\.lora_A' several times"):
        AdapterPursuit().found(seen(Shared(), drawn(0, 1, 8)))


@pytest.mark.parametrize("steps", [2, 8])
def test_llama_gives_its_tokens_after_local_steps_from_zero(steps):
    for seed in range(5):
        ids = drawn(seed, 4, 8, 300)
        plan = LocalPlan(steps, 0.05)
        observation = seen(llama(seed, 4, start=0.0), ids, labels=ids, words=300, plan=plan)
        wanted = set(ids[:, :-1].flatten().tolist())
        for one in (observation, rounded(observation)):
            found = AdapterPursuit().found(one)
            assert set(found.tokens) == wanted
            assert found.certain, found.why


def test_gpt2_with_places():
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.GPT2Config(
        vocab_size=300,
        n_positions=16,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
        model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora).eval()
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.02)
    for batch in (1, 4):
        ids = drawn(batch, batch, 8, 300)
        observation = seen(model, ids, labels=ids, words=300)
        found = AdapterPursuit().found(observation)
        assert set(found.tokens) == set(ids[:, :-1].flatten().tolist())
        assert found.certain, found.why
        if batch == 1:
            answer = AdapterPursuit()(observation, stream(0, "attack"))
            assert torch.equal(answer.inputs[:, :-1], ids[:, :-1])
            assert "1 places" in answer.problem


def test_inputs_of_a_norm_leave_one_dimension_empty():
    """Inputs with mean 0 all fit into the space of mean 0, and their number by chance says so."""
    inputs = normal((30, 8), stream(0, "inputs"), like=torch.zeros((), dtype=torch.float64))
    inputs -= inputs.mean(1, keepdim=True)
    basis = torch.linalg.svd(inputs)[2].T
    tolerance = Tolerance(64e-7, 1.0, lambda free: free**0.5 + 3)
    left = torch.eye(8, dtype=torch.float64)
    sizes = torch.full((7,), 1e6, dtype=torch.float64)
    whole = Span(left[:, :7], sizes, basis[:, :7], 1.0, 1.0, tolerance)
    fits, chance = in_span(whole, inputs)
    assert bool(fits.all())
    assert chance == 30
    less = Span(left[:, :5], sizes[:5], basis[:, :5], 1.0, 1.0, tolerance)
    fits, chance = in_span(less, inputs)
    assert not bool(fits.any())
    assert chance < 1e-6
