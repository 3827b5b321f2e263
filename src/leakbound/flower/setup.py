"""The settings that an app and its server give a mod."""

from __future__ import annotations

from typing import Any

from flwr.app import Context, Message

from leakbound.meter.setup import Conflict


def settings(message: Message, context: Context) -> dict[str, Any]:
    """The app's run configuration and the server's message configuration, by their keys.

    A mod cannot see which of two values your training uses: a server could add a key to remove a
    defense's noise.
    """
    config: dict[str, Any] = dict(context.run_config)
    for record in message.content.config_records.values():
        for key, value in record.items():
            differs = key in config and config[key] != value
            config[key] = Conflict((config[key], value)) if differs else value
    return config
