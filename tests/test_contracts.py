"""Every built-in keeps its contract, and planted liars and peepers are caught."""

import gc
import inspect
from dataclasses import dataclass, field

import pytest
import torch

from leakbound import attacks, defenses, metrics, registry
from leakbound.attacks import Attack, BestOf, GradientMatching, LinearInversion
from leakbound.attacks.base import boxed, expected_rows, seen_task
from leakbound.attacks.labels import infer_labels
from leakbound.core import Batch, Exact, Gaussian, Guarantee, Reconstruction, Unit, Update
from leakbound.defenses import (
    Clip,
    ClipCoordinates,
    ClipExamples,
    Color,
    CorrelatedNoise,
    Defense,
    DpSgd,
    GaussianMechanism,
    GaussianNoise,
    GradientDropout,
    HiddenDropout,
    LaplaceNoise,
    LocalAggregation,
    LocalOptimalNoise,
    LocalOptimalPruning,
    MagnitudePruning,
    Mean,
    Mixup,
    NoDefense,
    NoisyCopy,
    OptimalDpSgd,
    OptimalNoise,
    OptimalPruning,
    PriPrune,
    Quantization,
    SecureAggregation,
    Sign,
    Soteria,
    TopK,
    Whiten,
    WhitenedDpSgd,
    Withhold,
    chain,
)
from leakbound.metrics import METRICS, Metric
from leakbound.randomness import normal
from leakbound.testing import ContractError, check_attack, check_defense
from leakbound.testing.common import small_batch, small_task

from .metric_contract import check_metric

DEFENSES = {
    "clip": [Clip(0.1), Clip(100.0)],
    "clip_coordinates": [
        ClipCoordinates(0.05),
        chain(ClipCoordinates(0.05), GaussianNoise(0.1)),
        chain(ClipCoordinates(0.05), GaussianMechanism(0.5)),
        chain(ClipCoordinates(0.05), Mean(), GaussianMechanism(0.5)),
    ],
    "clip_examples": [ClipExamples(0.1)],
    "correlated_noise": [
        chain(ClipExamples(1.0), Mean(), CorrelatedNoise(0.5)),
        chain(ClipExamples(0.1), Mean(), CorrelatedNoise(2.0, "tree", rounds=5)),
        CorrelatedNoise(2.0, "bisr:3"),
    ],
    "dp_sgd": [DpSgd(1.0, 0.5), DpSgd(0.01, 3.0)],
    "gaussian_mechanism": [GaussianMechanism(2.0)],
    "gaussian_noise": [GaussianNoise(0.01), GaussianNoise(10.0)],
    "gradient_dropout": [GradientDropout(0.0), GradientDropout(0.5)],
    "hidden_dropout": [HiddenDropout(0.5)],
    "laplace_noise": [LaplaceNoise(0.1)],
    "color": [Color(), Color(correlation="low_rank", rank=2)],
    "local_aggregation": [LocalAggregation(3, 0.1)],
    "local_optimal_noise": [
        LocalOptimalNoise(0.1),
        LocalOptimalNoise(utility_std=0.1, rule="energy"),
        LocalOptimalNoise(0.1, layers=True, clamp=0.05),
        LocalOptimalNoise(0.1, rounding=True),
    ],
    "local_optimal_pruning": [LocalOptimalPruning(0.7), LocalOptimalPruning(utility_share=0.9)],
    "magnitude_pruning": [MagnitudePruning(0.7), MagnitudePruning(0.99, scope="global")],
    "mean": [Mean()],
    "mixup": [Mixup(), Mixup(share=0.7)],
    "none": [NoDefense()],
    "noisy_copy": [NoisyCopy(0.1), NoisyCopy(5.0)],
    "optimal_dp_sgd": [OptimalDpSgd(0.05, 0.1)],
    "optimal_noise": [
        OptimalNoise(0.1),
        OptimalNoise(utility_std=0.1, rule="energy"),
        OptimalNoise(error_floor=0.02, layers=True),
        OptimalNoise(0.1, clamp=0.05, rule="algorithm_1"),
        OptimalNoise(0.01, rounding=True),
        OptimalNoise(0.1, rule="energy", correlation="low_rank", rank=3),
        OptimalNoise(0.1, rule="energy", correlation="layers"),
    ],
    "quantization": [Quantization(8), Quantization(2), Quantization(4, stochastic=True)],
    "soteria": [Soteria(0.4), Soteria(0.5, "1")],
    "pri_prune": [PriPrune(), PriPrune(start=0.6, compose="last", form="linear")],
    "top_k": [TopK(0.9), TopK(0.5, False)],
    "optimal_pruning": [
        OptimalPruning(0.5),
        OptimalPruning(utility_share=0.9),
        OptimalPruning(threshold=0.5),
    ],
    "secure_aggregation": [SecureAggregation(1), SecureAggregation(3)],
    "sign": [Sign()],
    "withhold": [
        Withhold(),
        Withhold("random", 0.5, pseudo=False),
        Withhold("mix", 0.5),
        Withhold(scope="global", pseudo=False),
    ],
    "whiten": [
        chain(Whiten(), Color()),
        chain(Whiten(correlation="layers"), Color(correlation="layers")),
    ],
    "whitened_dp_sgd": [WhitenedDpSgd(1.0, 0.5), WhitenedDpSgd(0.1, 1.0, correlation="layers")],
}
CHAINS = [
    NoDefense(),
    chain(GaussianNoise(0.1), GaussianNoise(0.2)),
    chain(GaussianNoise(0.1), LaplaceNoise(0.1)),
    chain(GaussianNoise(0.1), SecureAggregation(3)),
    chain(LaplaceNoise(0.1), SecureAggregation(3)),
    chain(SecureAggregation(2), GaussianNoise(0.1)),
    chain(MagnitudePruning(0.7), GaussianNoise(0.1)),
    chain(GaussianNoise(0.1), MagnitudePruning(0.7)),
    chain(GaussianNoise(0.1), GradientDropout(0.5), SecureAggregation(2)),
    chain(GradientDropout(0.5), GaussianNoise(0.1)),
    chain(HiddenDropout(0.5), GaussianNoise(0.1)),
    chain(GaussianNoise(0.1), Clip(1.0)),
    chain(DpSgd(1.0, 0.5), Sign()),
    chain(ClipExamples(1.0), Mean(), CorrelatedNoise(1.0, "root"), SecureAggregation(2)),
    chain(DpSgd(1.0, 0.5), MagnitudePruning(0.5), SecureAggregation(2)),
    chain(LocalAggregation(2, 0.1), Clip(0.1), GaussianNoise(0.01)),
    chain(ClipExamples(1.0), Mean(), SecureAggregation(2), GaussianMechanism(1.0)),
    chain(OptimalPruning(0.5), OptimalNoise(0.1)),
    chain(OptimalPruning(utility_share=0.8), OptimalNoise(0.1), SecureAggregation(2)),
    chain(LocalOptimalPruning(0.5), LocalOptimalNoise(0.1)),
    chain(OptimalPruning(0.5), GaussianNoise(0.1)),
    chain(LocalOptimalPruning(utility_share=0.9), GaussianNoise(0.1)),
    chain(OptimalNoise(0.1), SecureAggregation(3)),
    chain(LocalOptimalNoise(0.1), SecureAggregation(2)),
    chain(SecureAggregation(2), OptimalNoise(0.1)),
    chain(WhitenedDpSgd(1.0, 0.5, correlation="low_rank", rank=3), SecureAggregation(2)),
    chain(WhitenedDpSgd(1.0, 0.5), OptimalPruning(0.5)),
    chain(OptimalNoise(0.1), Color()),
    chain(LaplaceNoise(0.1), Color()),
    chain(GaussianNoise(0.1), Color(), Color()),
    chain(GaussianNoise(0.1), Color(), GaussianNoise(0.1)),
    chain(OptimalNoise(0.1, rule="energy", correlation="layers"), GaussianNoise(0.1)),
    chain(
        OptimalPruning(utility_share=0.8),
        OptimalNoise(0.1, rule="energy", correlation="layers"),
    ),
    chain(GaussianNoise(0.1), OptimalPruning(0.5), Color(correlation="layers")),
    chain(GaussianNoise(0.1), Color(), SecureAggregation(2)),
    chain(GaussianNoise(0.1), Color(correlation="layers"), SecureAggregation(2)),
    chain(WhitenedDpSgd(1.0, 0.5, correlation="layers"), SecureAggregation(3)),
    chain(MagnitudePruning(0.5), OptimalNoise(0.1)),
    chain(GaussianNoise(0.1), OptimalNoise(0.1)),
    chain(MagnitudePruning(0.5), GaussianNoise(0.1), Color()),
    chain(NoisyCopy(0.1), DpSgd(1.0, 0.5)),
    chain(NoisyCopy(0.1), MagnitudePruning(0.5), GaussianNoise(0.1), SecureAggregation(2)),
    chain(LocalAggregation(2, 0.1), NoisyCopy(0.1)),
    chain(HiddenDropout(0.5), NoisyCopy(0.1), Clip(0.1)),
]
FEW = {
    "sparse_gradient_inversion": attacks.sparse_gradient_inversion(steps=10),
    "sparse_gradient_inversion_paper": attacks.sparse_gradient_inversion_paper(steps=5),
    "across_rounds": attacks.AcrossRounds(steps=5),
    "attribute_filter": attacks.AttributeFilter(replays=2, tests=19, tried=1),
    "candidate_likelihood": attacks.CandidateLikelihood(),
    "correlated_trap": attacks.CorrelatedTrap(),
    "cocktail_party_images": attacks.CocktailPartyImages(),
    "codebook": attacks.Codebook(),
    "constant_image": attacks.ConstantImage(),
    "dlg": attacks.dlg(steps=1, restarts=1),
    "gradient_matching": GradientMatching(distance="cosine_layers", steps=10),
    "fed_avg_matching": attacks.FedAvgMatching(candidates=(1, 2), trial=1, steps=2, deals=2),
    "fishing": attacks.Fishing("linear_inversion", "class"),
    "gauss_newton": attacks.GaussNewton(steps=3, directions=5, restarts=2, matching=3),
    "gias": attacks.Gias(latent_steps=3, weight_steps=3, restarts=1, latent=4),
    "grad_inversion": attacks.GradInversion(steps=4, seeds=2, batch_norm=0.0),
    "idlg": attacks.idlg(steps=1, restarts=2),
    "inverting_gradients": attacks.inverting_gradients(steps=10),
    "inverting_gradients_large_steps": attacks.inverting_gradients_large_steps(steps=10),
    "matching_over_rounds": attacks.matching_over_rounds(steps=5),
    "law_evolution": attacks.LawEvolution(population=4, generations=2),
    "law_matching": attacks.LawMatching(steps=5),
    "learned_prior": attacks.LearnedPrior(steps=8, restarts=1, levels=2, training=3),
    "linear_inversion": LinearInversion(),
    "sign_inversion": attacks.SignInversion(),
    "tab_leak": attacks.TabLeak(steps=1, restarts=1),
    "token_matching": attacks.TokenMatching(steps=10, restarts=1, moves=2),
    "token_rows": attacks.TokenRows(),
    "token_span": attacks.TokenSpan(),
    "adapter_pursuit": attacks.AdapterPursuit(),
    "adapter_words": attacks.AdapterWords(),
    "linear_trap": attacks.LinearTrap(),
    "loki": attacks.Loki(bins=32),
    "mean_image": attacks.MeanImage(),
    "mixed_start": attacks.MixedStart(steps=5, stages=1),
    "published_inverting_gradients": attacks.published_inverting_gradients(steps=10),
    "patch_inversion": attacks.PatchInversion(),
    "patch_span": attacks.PatchSpan(),
    "robbing_the_fed": attacks.RobbingTheFed(bins=32),
    "span_decoding": attacks.SpanDecoding(),
    "sparse_recovery": attacks.SparseRecovery(samples=2048),
    "strong_matching": attacks.strong_matching(steps=5),
    "touched_rows": attacks.TouchedRows(),
    "trap_weights": attacks.TrapWeights(rows=32),
    "variance_readout": attacks.VarianceReadout(),
}


def named(values):
    return [pytest.param(v, id=f"{v!r}"[:60]) for v in values]


@pytest.mark.parametrize("defense", named([d for row in DEFENSES.values() for d in row] + CHAINS))
def test_defense(defense):
    check_defense(defense)


@pytest.mark.parametrize("attack", FEW.values(), ids=FEW)
def test_attack(attack):
    check_attack(attack)


@pytest.mark.parametrize(
    "attack",
    [
        BestOf(GradientMatching(distance="manhattan", steps=5), 2),
        GradientMatching(distance="euclidean", labels="joint", schedule="cosine", steps=10),
        GradientMatching(labels="inferred", initialization="uniform", box=False, steps=10),
        GradientMatching(image="deep_prior", width=8, signed=False, steps=3, size=0.1),
        GradientMatching(distance="cosine_weighted", steps=10),
        attacks.LinearTrap("unbiased", inside=True, scale=10.0),
        attacks.LinearTrap("shrinkage", bias=True, norm=3.0),
        attacks.LinearTrap("gamma", eta=0.01, rows=1),
        attacks.LinearTrap("division", inside=True),
        attacks.Codebook(psnr=5.0, codewords=3, scale=0.1),
        attacks.ConstantImage(2.0),
    ],
    ids=[
        "manhattan",
        "joint",
        "inferred",
        "deep prior",
        "weighted",
        "unbiased trap",
        "shrinkage trap",
        "gamma trap",
        "division trap",
        "few codewords",
        "constant",
    ],
)
def test_attack_variants(attack):
    check_attack(attack)


@pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.name)
def test_metric(metric):
    check_metric(metric)


def built_in(kind):
    known = registry.entries(kind).values()
    return {entry.name for entry in known if entry.build.__module__.startswith("leakbound.")}


def test_every_built_in_has_a_row():
    assert built_in("defense") == set(DEFENSES)
    assert built_in("attack") == set(FEW)
    assert metrics.METRICS is METRICS
    assert defenses.__all__ == sorted(defenses.__all__)


# Liars: each breaks one clause, and only that one.


@dataclass(frozen=True, repr=False)
class Liar(Defense):
    """Adds Gaussian noise and declares `declared` times its standard deviation."""

    declared: float = 1.0

    @property
    def guarantee(self):
        return Guarantee.KNOWN_NOISE

    def transform(self, update, state, context, source):
        noise = normal(update.rows.shape, source, like=update.rows)
        law = Gaussian((0.1 * self.declared) ** 2)
        return Update(update.rows + 0.1 * noise, update.unit, update.examples, law), state


@dataclass(frozen=True, repr=False)
class SameNoise(Liar):
    """The same noise in every layer."""

    def transform(self, update, state, context, source):
        width = update.rows.shape[1]
        block = normal((1, 100), source, like=update.rows)
        noise = block.repeat(1, width // 100 + 1)[:, :width]
        law = Gaussian(0.1**2)
        return Update(update.rows + 0.1 * noise, update.unit, update.examples, law), state


@dataclass(frozen=True, repr=False)
class WrongShape(Liar):
    """Uniform noise of the declared variance."""

    def transform(self, update, state, context, source):
        noise = torch.rand(update.rows.shape, generator=source) - 0.5
        law = Gaussian(1 / 12)
        return Update(update.rows + noise, update.unit, update.examples, law), state


@dataclass(frozen=True, repr=False)
class NotExact(Defense):
    def transform(self, update, state, context, source):
        noise = normal(update.rows.shape, source, like=update.rows)
        return Update(update.rows + 0.1 * noise, update.unit, update.examples, Exact()), state


@dataclass(frozen=True, repr=False)
class NotExactButNear(Defense):
    """So little noise that only other streams tell."""

    def transform(self, update, state, context, source):
        noise = 1e-12 * normal(update.rows.shape, source, like=update.rows)
        return Update(update.rows + noise, update.unit, update.examples, Exact()), state


@dataclass(frozen=True, repr=False)
class LeakyMask(Defense):
    def transform(self, update, state, context, source):
        mask = torch.zeros_like(update.rows, dtype=torch.bool)
        return Update(update.rows, update.unit, update.examples, Exact(), mask), state


@dataclass(frozen=True, repr=False)
class Promises(Defense):
    """Claims a release law and declares none."""

    @property
    def guarantee(self):
        return Guarantee.KNOWN_NOISE


@dataclass(frozen=True, repr=False)
class FalseBound(Defense):
    """Clips to 10, declares 1."""

    accepts = frozenset({Unit.EXAMPLE})
    gives_bound = True

    def transform(self, update, state, context, source):
        given, _ = ClipExamples(10.0).transform(update, state, context, source)
        return given.opaque(given.rows, "", bound=1.0), state

    def imitate(self, rows):
        return ClipExamples(10.0).imitate(rows)


@dataclass(frozen=True, repr=False)
class HonestFace(FalseBound):
    """The same, but imitates the honest one."""

    def imitate(self, rows):
        return ClipExamples(1.0).imitate(rows)


@dataclass(frozen=True, repr=False)
class LittleNoise(GaussianMechanism):
    """A tenth of the noise that the multiplier says."""

    def transform(self, update, state, context, source):
        std = 0.1 * self.noise_multiplier * update.bound
        return update.noised(Gaussian(std**2), source), state


@dataclass(frozen=True, repr=False)
class Writes(Defense):
    def transform(self, update, state, context, source):
        update.rows.mul_(2.0)
        return update, state


@dataclass(frozen=True, repr=False)
class ReadsQuietly(Defense):
    """Uses the client's batch without saying so."""

    def transform(self, update, state, context, source):
        factor = 1.0 if context is None else 1.0 + float(context.batch.inputs.mean())
        return update.opaque(update.rows * factor, ""), state


@dataclass(frozen=True, repr=False)
class OtherImitation(Defense):
    def imitate(self, rows):
        return -rows


@dataclass(frozen=True, repr=False)
class Finer(Defense):
    def returns(self, given):
        return Unit.COHORT


@pytest.mark.parametrize(
    ("defense", "complaint"),
    [
        (Liar(0.8), "1.5.. times the declared"),
        (Liar(1.2), "0.69. times the declared"),
        (SameNoise(), "correlated noise"),
        (WrongShape(), "its shape is another"),
        (NotExact(), "though its release is exact"),
        (NotExactButNear(), "declares an exact release, but another stream"),
        (LeakyMask(), "its mask declares withheld"),
        (Promises(), "declares Exact"),
        (chain(FalseBound(), Mean(), GaussianMechanism(1.0)), "above its bound"),
        (chain(HonestFace(), Mean(), GaussianMechanism(0.1)), "not what it releases"),
        (chain(ClipExamples(1.0), Mean(), LittleNoise(1.0)), "below noise_multiplier"),
        (Writes(), "wrote to a tensor"),
        (ReadsQuietly(), "uses_context"),
        (OtherImitation(), "not what it releases"),
        (Finer(), "`returns` says cohort"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, Defense) else "",
)
def test_lying_defenses_are_caught(defense, complaint):
    with pytest.raises(ContractError, match=complaint):
        check_defense(defense)


def test_a_bound_that_forgets_the_smallest_client_is_caught(monkeypatch):
    honest = Update.stack

    def forgetful(updates):
        whole = honest(updates)
        return whole.opaque(whole.rows, "", bound=updates[0].bound)

    monkeypatch.setattr(Update, "stack", staticmethod(forgetful))
    with pytest.raises(ContractError, match="above its bound"):
        check_defense(
            chain(ClipExamples(1.0), Mean(), SecureAggregation(2), GaussianMechanism(1.0))
        )


def test_an_honest_defense_of_the_same_make_passes():
    check_defense(Liar(1.0))


# Peepers: all answer with the truth that they found elsewhere.


def silent(observation):
    return None if bool(observation.update.rows.any()) else "gradient vanished"


@dataclass(frozen=True)
class Holds(Attack):
    """Was given the truth when it was made."""

    truth: torch.Tensor = field(hash=False)

    def __call__(self, observation, generator):
        return Reconstruction(
            boxed(self.truth.clone(), observation.task), problem=silent(observation)
        )


@dataclass(frozen=True)
class ChoosesByTruth(Attack):
    """Matches gradients, but picks the restart that is nearest to the truth."""

    truth: torch.Tensor = field(hash=False)

    def __call__(self, observation, generator):
        shape = (200, *observation.batch_shape)
        low, high = observation.task.input_range
        starts = low + (high - low) * torch.rand(shape, generator=generator)
        mixed = 0.2 * starts + 0.8 * self.truth
        best = (mixed - self.truth).flatten(1).square().sum(1).argmin()
        return Reconstruction(boxed(mixed[best], observation.task), problem=silent(observation))


@dataclass(frozen=True)
class WalksFrames(Attack):
    def __call__(self, observation, generator):
        frame = inspect.currentframe().f_back
        while frame is not None:
            for value in frame.f_locals.values():
                if isinstance(value, Batch):
                    guess = boxed(value.inputs.clone(), observation.task)
                    return Reconstruction(guess, problem=silent(observation))
            frame = frame.f_back
        raise AssertionError("no batch found")


@dataclass(frozen=True)
class WalksMemory(Attack):
    def __call__(self, observation, generator):
        found = [o for o in gc.get_objects() if type(o) is Batch]
        right = [b for b in found if tuple(b.inputs.shape) == observation.batch_shape]
        guess = boxed(right[0].inputs.clone(), observation.task)
        return Reconstruction(guess, problem=silent(observation))


@dataclass(frozen=True)
class Gray(Attack):
    """The honest attack that learns nothing, with one fault to plant."""

    fault: str = ""

    def __call__(self, observation, generator):
        guess = torch.full(observation.batch_shape, 0.5)
        if self.fault == "global randomness":
            torch.rand(1)
        if self.fault == "writes":
            observation.update.rows.zero_()
        if self.fault == "range":
            guess = guess + 1
        if self.fault == "shape":
            guess = guess[:, :, :-1]
        problem = None if self.fault == "silence" else silent(observation)
        return Reconstruction(guess, problem=problem)


@dataclass(frozen=True)
class ThreeArguments(Gray):
    def __call__(self, observation, generator, truth=None):
        return super().__call__(observation, generator)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda batch: Holds(batch.inputs), "knows the truth from another source"),
        (lambda batch: ChoosesByTruth(batch.inputs), "knows the truth from another source"),
        (
            lambda batch: WalksFrames(),
            "looks for the truth outside|knows the truth from another source",
        ),
        (
            lambda batch: WalksMemory(),
            "looks for the truth outside|knows the truth from another source",
        ),
        (lambda batch: Gray("global randomness"), "global random state"),
        (lambda batch: Gray("writes"), "wrote to a tensor"),
        (lambda batch: Gray("range"), "outside the input range"),
        (lambda batch: Gray("shape"), "returns inputs of shape"),
        (lambda batch: Gray("silence"), "reports no problem"),
        (lambda batch: ThreeArguments(), "must take exactly"),
    ],
)
def test_peeking_and_faulty_attacks_are_caught(make, complaint):
    batch = small_batch(small_task(), seed=1)
    with pytest.raises(ContractError, match=complaint):
        check_attack(make(batch), batch=batch)


def test_the_honest_gray_attack_passes():
    check_attack(Gray())


@dataclass(frozen=True)
class Matching(Attack):
    """A short gradient matching as one would write it from the how-to, with one fault."""

    fault: str = ""

    def __call__(self, observation, generator):
        task = observation.task if self.fault == "sent" else seen_task(observation)
        labels = observation.labels
        if labels is None and self.fault != "labels":
            labels = infer_labels(observation, generator)
        labels = labels[: observation.examples]
        inputs = torch.rand(observation.batch_shape, generator=generator)
        inputs = inputs.to(task.parameters).requires_grad_()
        for _ in range(3):
            rows = expected_rows(observation, task, inputs, labels)
            distance = (rows - observation.update.rows).square().sum()
            (slope,) = torch.autograd.grad(distance, inputs)
            inputs = (inputs - 0.05 * slope.sign()).detach().requires_grad_()
        return Reconstruction(boxed(inputs.detach(), task), problem=silent(observation))


def test_an_attack_that_simulates_what_the_client_trained_passes():
    check_attack(Matching())


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("labels", r"raises TypeError: 'NoneType'.* with labels unknown.*infer_labels"),
        ("sent", r"HiddenDropout\(rate=0.5\).*use leakbound.attacks.base.seen_task"),
    ],
)
def test_what_an_attack_forgets_is_caught(fault, complaint):
    """Both passed: an attack that needs labels, and one that loses 7 dB under hidden_dropout."""
    with pytest.raises(ContractError, match=complaint):
        check_attack(Matching(fault))


@pytest.mark.parametrize(
    ("function", "higher", "complaint"),
    [
        (metrics.mse, True, "a perfect reconstruction not the best value"),
        (metrics.psnr, False, "a perfect reconstruction not the best value"),
        (lambda paired, *, data_range: [1.0], False, "one value for each image"),
        (lambda paired, *, data_range: [float("nan")] * len(paired.inputs), False, "finite"),
        (lambda paired, *, data_range: [1.0] * len(paired.inputs), False, "the same score"),
        (lambda paired, *, data_range: sorted(metrics.mse(paired, data_range=1.0)), False, "perm"),
    ],
)
def test_wrong_metrics_are_caught(function, higher, complaint):
    with pytest.raises(ContractError, match=complaint):
        check_metric(Metric("wrong", function, higher, "", ""))
