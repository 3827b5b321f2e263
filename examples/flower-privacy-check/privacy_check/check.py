"""Describe the app's own strategy and mods, and write deployment.toml.

python -m privacy_check.check
"""

import tomllib
from pathlib import Path

from flwr.app import ArrayRecord

from leakbound.flower import describe
from leakbound.risk.deployment import text_of
from privacy_check import client_app, task


def check(strategy, config, arrays, path: Path):
    """Print what makes the protection smaller than it looks, and write the facts."""
    found, mistakes = describe(
        strategy,
        client_app.MODS,
        rounds=config["num-server-rounds"],
        arrays=arrays,
        seeded=False,  # this app seeds no generator of NumPy
    )
    for mistake in mistakes:
        print(f"{mistake.name} ({mistake.key}): {mistake.text}")
    path.write_text(text_of(found), encoding="utf-8")
    return found, mistakes


def main():
    """Check the settings in pyproject.toml without a training."""
    from privacy_check.server_app import strategy_of

    about = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))
    config = about["tool"]["flwr"]["app"]["config"]
    arrays = ArrayRecord(task.Net().state_dict())
    check(strategy_of(config), config, arrays, Path("deployment.toml"))


if __name__ == "__main__":
    main()
