"""Contract checks for defenses and attacks, third-party and built-in.

Each raises `ContractError` with a sentence about the violation, and returns None otherwise. All
randomness is seeded by name, so a check always gives the same answer.

Example:
    >>> from leakbound.defenses import GaussianNoise
    >>> check_defense(GaussianNoise(0.1))
"""

from leakbound.testing.attack import check_attack
from leakbound.testing.common import ContractError
from leakbound.testing.defense import check_defense

__all__ = ["ContractError", "check_attack", "check_defense"]
