"""Uses of Flower beyond its public interface: imports, identity, error codes."""

from __future__ import annotations

import copy
import warnings
from typing import Any

with warnings.catch_warnings():
    # flwr's own dependencies warn on import (typer asks click for a deprecated name)
    warnings.simplefilter("ignore", DeprecationWarning)
    import flwr.app
    import flwr.clientapp
    import flwr.serverapp  # noqa: F401

from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore import log
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

__all__ = ["delivered", "empty_run", "error_reply", "flower_name", "log", "take_identity"]


def error_reply(
    message: Message,
    reason: str,
    *,
    raised: bool = False,
) -> Message:
    """A reply with a reason and no content: from a mod, or from an app that raised."""
    code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION if raised else ErrorCode.MOD_FAILED_PRECONDITION
    return Message(Error(code=code, reason=reason), reply_to=message)


def take_identity(run_id: int) -> None:
    """Flower stamps messages with the identity of the process, which is the node's here."""
    TaskIdentity.task_id = 1
    TaskIdentity.run_id = run_id
    TaskIdentity.node_id = 1


def empty_run(run_id: int) -> Run:
    """The record of a run unknown to any SuperLink: strategies of the older API ask for its id."""
    return Run.create_empty(run_id)


def delivered(message: Message, number: str) -> Message:
    """The message as another process receives it: with an id and own records of shared bytes."""
    metadata = copy.copy(message.metadata)
    # Flower gives the id no setter.
    metadata.__dict__["_message_id"] = number
    if message.has_error():
        return Message(error=message.error, metadata=metadata)  # type: ignore[call-overload,no-any-return]
    records = {key: type(record)(dict(record)) for key, record in message.content.items()}  # type: ignore[arg-type]
    return Message(content=RecordDict(records), metadata=metadata)  # type: ignore[call-overload,no-any-return]


def flower_name(thing: Any) -> str | None:
    """The name of a mod or strategy of Flower's own, or of Flower's class that it derives from."""
    if hasattr(thing, "__name__"):
        return str(thing.__name__) if str(thing.__module__).startswith("flwr.") else None
    bases = (kind for kind in type(thing).__mro__ if kind.__module__.startswith("flwr."))
    return next((kind.__name__ for kind in bases), None)
