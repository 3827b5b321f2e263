"""Text through all layers: losses, models, sources, rounds, bounds and audits of tokens."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import leakbound as lb
from leakbound import data, models
from leakbound.assess.criterion import Criterion, distance_of
from leakbound.assess.measure import measure
from leakbound.client import example_gradients, forward, gradient
from leakbound.core import Batch, NotApplicable, Reconstruction, Task, ThreatModel
from leakbound.defenses import NoDefense
from leakbound.domains import TokenDomain
from leakbound.losses import LOSSES, UNSCORED, named
from leakbound.protocol import play
from leakbound.randomness import stream

V, N = 40, 6


def drawn(count, seed=0, vocabulary=V):
    return torch.randint(vocabulary, (count, N), generator=torch.Generator().manual_seed(seed))


def causal(**more):
    given = {"width": 16, "generator": stream(0, "model"), **more}
    return models.decoder(input_shape=(N,), classes=V, **given)


def task(model=None, domain=None, loss="next_token", **more):
    return Task.of(model or causal(), domain=domain or TokenDomain(V, N), loss=loss, **more)


def test_the_next_token_is_what_each_place_is_scored_on():
    outputs, labels = torch.randn(3, N, V), drawn(3)
    labels[1, 3:] = UNSCORED
    terms = [
        functional.cross_entropy(outputs[b, t][None], labels[b, t + 1][None])
        for b in range(3)
        for t in range(N - 1)
        if labels[b, t + 1] != UNSCORED
    ]
    assert LOSSES["next_token"](outputs, labels) == pytest.approx(float(torch.stack(terms).mean()))
    own = LOSSES["token_cross_entropy"](outputs[:, :-1], labels[:, 1:])
    assert torch.equal(own, LOSSES["next_token"](outputs, labels))
    outputs = functional.one_hot(labels.clamp_min(0), V).float()
    predicted, true = LOSSES["next_token"].classified(outputs, labels)
    hits = predicted == true
    assert len(hits) == sum(labels[:, 1:].ne(UNSCORED).flatten().tolist())


@pytest.mark.parametrize(
    "labels",
    [torch.full((2, N), UNSCORED), torch.zeros(2, N), torch.full((2, N), V), torch.zeros(2).long()],
)
def test_labels_that_are_no_tokens(labels):
    with pytest.raises(ValueError, match="labels"):
        named("next_token").check(labels, V)


def test_a_causal_model_sees_no_later_place_and_an_encoder_all():
    tokens, changed = drawn(2), drawn(2, seed=1)
    changed[:, :4] = tokens[:, :4]
    model = causal()
    assert torch.allclose(model(tokens)[:, :4], model(changed)[:, :4], atol=1e-6)
    both = models.encoder(input_shape=(N,), classes=V, width=16, generator=stream(0))
    assert not torch.allclose(both(tokens)[:, :4], both(changed)[:, :4], atol=1e-6)


def test_rotary_positions_depend_on_differences_alone():
    """Tokens moved by two places, behind padding that nothing sees, have the same scores."""
    model = causal(positions="rotary")
    tokens, moved = drawn(1), torch.zeros(1, N, dtype=torch.long)
    moved[:, 2:] = tokens[:, :4]
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    found = model(moved, attention_mask=mask)[:, 2:]
    assert torch.allclose(found, model(tokens)[:, :4], atol=1e-5)


def test_tied_weights_have_one_gradient():
    own = task(causal(tied=True))
    assert "head.weight" not in own.names
    tokens = drawn(2)
    row = gradient(own, tokens, tokens)
    model = causal(tied=True)
    LOSSES["next_token"](model(tokens), tokens).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.allclose(row, expected, atol=1e-7)


def test_padding_is_masked():
    padded = task(domain=TokenDomain(V, N, padding=0))
    tokens = drawn(1).clamp_min(1)
    short = tokens.clone()
    short[:, 4:] = 0
    full = task().model(tokens[:, :4])
    assert torch.allclose(forward(padded, short)[:, :4], full, atol=1e-6)


def test_models_of_transformers_are_taken_as_they_are():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=V, n_positions=N, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).eval()
    tokens = drawn(3)
    row = gradient(task(model), tokens, tokens)
    model(input_ids=tokens, labels=tokens).loss.backward()
    own = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.allclose(row, own, atol=1e-7)


def test_labels_that_are_the_tokens_are_not_known():
    own, tokens = task(), drawn(2)
    sources = [stream(0, "a"), stream(0, "b")]
    seen = play(own, [Batch(tokens, tokens)], NoDefense(), sources).observation
    assert seen.labels is None
    threat = ThreatModel(labels_known=True)
    with pytest.raises(ValueError, match="labels_known is True"):
        play(own, [Batch(tokens, tokens)], NoDefense(), sources, threat=threat)


def test_searches_among_numbers_do_not_apply():
    tokens = drawn(1)
    with pytest.raises(NotApplicable, match="the inputs are tokens"):
        lb.simulate(
            causal(),
            (tokens, tokens),
            attack="inverting_gradients,steps=2",
            domain=TokenDomain(V, N),
            loss="next_token",
        )


def test_words_belong_to_the_vocabulary():
    with pytest.raises(ValueError, match="tokenizer and model do not belong together"):
        TokenDomain(5, 3, words=("a", "b"))
    with pytest.raises(ValueError, match="padding is 5"):
        TokenDomain(5, 3, padding=5)
    with pytest.raises(ValueError, match="padding_side is 'Left'"):
        TokenDomain(5, 3, padding=0, padding_side="Left")


def test_bounds_count_tokens_that_differ():
    """The distance of bounds is the domain's, also at twice the tolerance, and by hand."""
    domain, rows = TokenDomain(V, N), drawn(30, vocabulary=3)
    distance = distance_of(domain)
    flat = rows.double().numpy()
    by_hand = [[sum(int(a != b) for a, b in zip(x, y, strict=True)) for y in flat] for x in flat]
    assert distance.apart(flat, flat).tolist() == by_hand
    coded = distance.coded(flat)
    wide = [row.tolist() for part in distance.among(coded) for row in part]
    assert wide == by_hand
    assert Criterion.of(domain, share=0.8).within == 1


@pytest.mark.parametrize(("share", "largest"), [(1.0, 3), (0.6, 9)])
def test_private_sequences_are_protected_by_counts(share, largest):
    """The largest ball of public sequences, by brute force over all of them."""
    public = drawn(300, vocabulary=4)
    level = Criterion.of(TokenDomain(V, N), share=share).within
    apart = (public[:, None] != public).sum(-1)
    assert int((apart <= 2 * level).sum(1).max()) >= largest
    tokens = drawn(2)
    found = lb.simulate(
        causal(),
        (tokens, tokens),
        attack="mean_image",
        defense="dp_sgd,noise_multiplier=8.0",
        public=Batch(public, public),
        domain=TokenDomain(V, N),
        loss="next_token",
        share=share,
        probability=0.1,
    )
    assert (found.verdict == "protected from strangers") == (share == 1.0)


def test_text_becomes_sequences(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("The cat sat.\n\nA DOG, and a cat\nlonely\nthe <b>cat</b> & co\n", "utf-8")
    found = data.load(f"text:{path}", size=5)
    assert found.inputs.shape == (3, 5)
    assert found.domain.text(found.inputs[0]) == ("the", "cat", "sat", ".", "<pad>")
    assert found.labels[0].tolist()[-1] == UNSCORED
    assert found.classes == len(found.words)
    for text, words in (("one\n", "no line with two words"), ("", "no line")):
        path.write_text(text, "utf-8")
        with pytest.raises(ValueError, match=words):
            data.load(f"text:{path}")
    path.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(ValueError, match="byte 3 is not UTF-8"):
        data.load(f"text:{path}")


def test_an_audit_of_text():
    found = lb.run_audit(
        "decoder,width=16",
        {"source": "topics", "size": 8},
        attacks=["mean_image"],
        defenses=["none", "dp_sgd,noise_multiplier=8.0"],
        seeds=[0],
    )
    first = found.assessments[0]
    assert (first.criterion.goal, first.threat.labels_known) == ("8 of 8 tokens", False)
    assert first.sequences[0].truth
    private = found.assessments[1]
    model = next(bound for bound in private.bounds if bound.basis == "fitted model")
    assert model.prior.startswith("bigram model of the public text, no rarer than seen")
    sample = next(bound for bound in private.bounds if bound.basis == "sample")
    assert 0 < sample.probability < 1
    assert 0 < model.probability < 1


def test_a_plain_module_takes_tokens_alone():
    model = nn.Sequential(nn.Embedding(V, 4), nn.Flatten(), nn.Linear(4 * N, 3))
    own = task(model, loss="cross_entropy", classes=3)
    assert gradient(own, drawn(2), torch.tensor([0, 1])).shape == own.parameters.shape


def test_without_examples_no_text_is_kept(tmp_path):
    """Neither the records nor the page hold a word of the data."""
    from leakbound.audit import Plan, audit, parse
    from leakbound.report import write

    plan: Plan = parse(
        {
            "models": [{"name": "decoder", "width": 16}],
            "data": {"source": "topics", "size": 8},
            "attacks": [{"name": "token_rows"}],
            "defenses": [{"name": "none"}],
        }
    )
    audit(plan, tmp_path / "with", workers=1)
    audit(plan, tmp_path / "without", workers=1, pictures=False)
    words = {}
    for name in ("with", "without"):
        write(tmp_path / name)
        text = (tmp_path / name / "records.jsonl").read_text("utf-8")
        page = (tmp_path / name / "report.html").read_text("utf-8")
        words[name] = bool(re.search(r'"sequences": ?\[', text)), 'class="row"' in page
    assert words == {"with": (True, True), "without": (False, False)}


def test_a_public_sequence_is_no_reconstruction():
    """Texts repeat sentences: the most frequent one matches victims without any update."""
    domain = TokenDomain(V, N)
    common, rare = drawn(3, seed=5), drawn(200, seed=6)
    public = Batch(torch.cat([common.repeat(20, 1), rare]), torch.cat([common.repeat(20, 1), rare]))
    criterion = Criterion.of(domain, share=0.8)
    for victim in (*common, rare[3]):
        truth = Batch(victim[None], victim[None])
        for guess in (*common, *rare[:10]):
            assert not any(measure(truth, Reconstruction(guess[None]), criterion, public).matched)
    own = drawn(1, seed=7)
    unseen = Batch(rare, rare)
    assert measure(
        Batch(own, own), Reconstruction(own), criterion, public, decoys=unseen
    ).matched == (True,)


def test_a_vocabulary_that_is_not_the_models_own():
    tokens = drawn(1)
    with pytest.raises(NotApplicable, match="more tokens or places than it has"):
        forward(task(domain=TokenDomain(2 * V, N)), tokens + V)


def test_gradients_of_examples_where_a_model_branches_on_padding():
    """Such models cannot be vectorized over examples."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=V,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=N,
        num_labels=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.BertForSequenceClassification(config).eval()
    own = task(model, TokenDomain(V, N, padding=0), loss="cross_entropy", classes=2)
    tokens, labels = drawn(3).clamp_min(1), torch.tensor([0, 1, 1])
    tokens[0, 4:] = 0
    found = example_gradients(own, tokens, labels)
    assert torch.allclose(found.mean(0), gradient(own, tokens, labels), atol=1e-7)
    sources = [stream(0, "client"), stream(0, "cohort")]
    private = lb.defenses.DpSgd(noise_multiplier=1.0)
    seen = play(own, [Batch(tokens, labels)], private, sources).observation
    assert seen.update.rows.shape == (1, len(own.parameters))
