"""Flower's apps in this process: imported anew by every test, and quiet."""

import importlib
import logging
import sys

import pytest


@pytest.fixture(autouse=True)
def _quiet():
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.fixture
def imported(monkeypatch):
    """Imports a folder's package with its client's and its server's app; forgotten afterwards."""
    packages = []

    def load(folder, package):
        monkeypatch.syspath_prepend(str(folder))
        packages.append(package)
        for part in ("client_app", "server_app"):
            importlib.import_module(f"{package}.{part}")
        return sys.modules[package]

    yield load
    for name in [name for name in sys.modules if name.split(".")[0] in packages]:
        del sys.modules[name]
