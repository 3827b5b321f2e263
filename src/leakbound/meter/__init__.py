"""The leak meter: shows a client what an update reveals, before it leaves.

What a client computes from its data stays on the client. A `Reading`, or a number of it, is never
sent unless the client releases it (`Reading.release`). A decision to refuse depends on private
data, so it reveals something about them.
"""

from leakbound.meter.reading import Decision, Policy, Reading, measure

__all__ = ["Decision", "Policy", "Reading", "measure"]
