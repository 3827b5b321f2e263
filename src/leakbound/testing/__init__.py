"""Contract checks for defenses, attacks and metrics, of third parties and our own.

Each raises `ContractError` with a sentence that says what is broken, and returns None otherwise.
All randomness is named, so a check gives the same answer every time.

Example:
    >>> from leakbound.defenses import GaussianNoise
    >>> check_defense(GaussianNoise(0.1))
"""

from leakbound.testing.attack import check_attack
from leakbound.testing.common import ContractError
from leakbound.testing.defense import check_defense
from leakbound.testing.metric import check_metric

__all__ = ["ContractError", "check_attack", "check_defense", "check_metric"]
