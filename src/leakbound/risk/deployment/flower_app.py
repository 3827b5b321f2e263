"""Stub."""

from leakbound.risk.deployment.file import read as read
