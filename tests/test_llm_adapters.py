"""The example of adapters: Flower, PEFT and transformers, captured and attacked."""

import runpy
import shutil
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "llm-adapters"
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def test_adapters_sent_through_flower_reveal_their_words(tmp_path, monkeypatch):
    for needed in ("flwr", "peft", "transformers"):
        pytest.importorskip(needed)
    from leakbound.flower import capture_app

    shutil.copytree(EXAMPLE, tmp_path / "app")
    monkeypatch.chdir(tmp_path / "app")
    monkeypatch.syspath_prepend(str(tmp_path / "app"))
    capture_app(tmp_path / "app", tmp_path / "seen", clients=2)
    found = runpy.run_path("words.py")["found"]
    results = list(found(tmp_path / "seen"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "adapters"]:
        del sys.modules[name]
    assert len(results) == 2
    for _, told, own in results:
        assert len(told) >= 10
        assert told <= own
