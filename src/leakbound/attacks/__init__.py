"""Attacks: functions of an observation that reconstruct the private inputs.

Every attack class and preset exported here is registered under its snake_case name.
"""

from leakbound.attacks.across_rounds import AcrossRounds
from leakbound.attacks.analytic import LinearInversion
from leakbound.attacks.attribute_filter import AttributeFilter
from leakbound.attacks.base import Attack, BestOf, ByNoise
from leakbound.attacks.blind import ConstantImage, MeanImage
from leakbound.attacks.codebook import Codebook
from leakbound.attacks.data_dependent_law import (
    CandidateLikelihood,
    LawEvolution,
    LawMatching,
    VarianceReadout,
)
from leakbound.attacks.features.cocktail_party import CocktailPartyImages
from leakbound.attacks.fedavg import FedAvgMatching
from leakbound.attacks.fishing import Fishing
from leakbound.attacks.gias import Gias
from leakbound.attacks.grad_inversion import GradInversion
from leakbound.attacks.imprint import Loki, RobbingTheFed
from leakbound.attacks.labels import (
    LABEL_RULES,
    infer,
    infer_labels,
    label_accuracy,
    label_totals,
)
from leakbound.attacks.matching.attack import (
    GradientMatching,
    dlg,
    idlg,
    inverting_gradients,
    inverting_gradients_large_steps,
    matching_over_rounds,
    published_inverting_gradients,
    settings_hash,
    strong_matching,
)
from leakbound.attacks.matching.newton import GaussNewton
from leakbound.attacks.matching.rows import TabLeak
from leakbound.attacks.mixed_start import MixedStart
from leakbound.attacks.patches import PatchInversion, PatchSpan
from leakbound.attacks.prior.attack import LearnedPrior
from leakbound.attacks.prior.denoiser import train_prior
from leakbound.attacks.prior.files import load_prior, save_prior
from leakbound.attacks.sign_inversion import SignInversion
from leakbound.attacks.sparse import SparseRecovery
from leakbound.attacks.sparse_inversion import (
    sparse_gradient_inversion,
    sparse_gradient_inversion_paper,
)
from leakbound.attacks.table.decoding import SpanDecoding
from leakbound.attacks.table.touched import TouchedRows
from leakbound.attacks.tokens.adapter_words import AdapterWords
from leakbound.attacks.tokens.adapters import AdapterPursuit
from leakbound.attacks.tokens.matching import TokenMatching
from leakbound.attacks.tokens.rows import TokenRows
from leakbound.attacks.tokens.span import TokenSpan
from leakbound.attacks.trap import CorrelatedTrap, LinearTrap
from leakbound.attacks.trap_weights import TrapWeights

__all__ = [
    "LABEL_RULES",
    "AcrossRounds",
    "AdapterPursuit",
    "AdapterWords",
    "Attack",
    "AttributeFilter",
    "BestOf",
    "ByNoise",
    "CandidateLikelihood",
    "CocktailPartyImages",
    "Codebook",
    "ConstantImage",
    "CorrelatedTrap",
    "FedAvgMatching",
    "Fishing",
    "GaussNewton",
    "Gias",
    "GradInversion",
    "GradientMatching",
    "LawEvolution",
    "LawMatching",
    "LearnedPrior",
    "LinearInversion",
    "LinearTrap",
    "Loki",
    "MeanImage",
    "MixedStart",
    "PatchInversion",
    "PatchSpan",
    "RobbingTheFed",
    "SignInversion",
    "SpanDecoding",
    "SparseRecovery",
    "TabLeak",
    "TokenMatching",
    "TokenRows",
    "TokenSpan",
    "TouchedRows",
    "TrapWeights",
    "VarianceReadout",
    "dlg",
    "idlg",
    "infer",
    "infer_labels",
    "inverting_gradients",
    "inverting_gradients_large_steps",
    "matching_over_rounds",
    "label_accuracy",
    "label_totals",
    "load_prior",
    "published_inverting_gradients",
    "save_prior",
    "settings_hash",
    "sparse_gradient_inversion",
    "sparse_gradient_inversion_paper",
    "strong_matching",
    "train_prior",
]
