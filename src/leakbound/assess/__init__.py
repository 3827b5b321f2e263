"""Assessments: what attacks reconstructed, what bounds them, and the verdict.

`read` reads the records of a run: `Assessment` of records.jsonl, `Training` of utility.jsonl.
"""

from leakbound.assess.record import (
    Assessment,
    Bound,
    Damage,
    DefenseInfo,
    Training,
    read,
    schema,
)

__all__ = ["Assessment", "Bound", "Damage", "DefenseInfo", "Training", "read", "schema"]
