"""A plan's units on a Ray cluster: many machines, the same records. Needs the extra `ray`.

The only part that imports Ray.
"""

from leakbound.cluster.engine import engine, run

__all__ = ["engine", "run"]
