"""The leak meter: what an update gives away, shown to the client before it leaves.

What a client computes from its data stays on the client: a `Reading` is never sent, nor is a number
of it, unless the client releases it (`Reading.release`). A decision to refuse is itself made from
private data and reveals something of it.
"""

from leakbound.meter.reading import AttackOutcome, Decision, Policy, Reading, measure

__all__ = ["AttackOutcome", "Decision", "Policy", "Reading", "measure"]
