"""The report of a run: one HTML page that works offline, written from the records alone."""

from leakbound.report.html import write

__all__ = ["write"]
