"""The report of a run: one HTML page that works offline, written from the records alone."""

from leakbound.report.page import write, write_one
from leakbound.report.template import check_installed

__all__ = ["check_installed", "write", "write_one"]
