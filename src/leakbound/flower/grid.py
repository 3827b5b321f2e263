"""A Flower app in this process: no Ray, no SuperLink, no listening port."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from logging import ERROR
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from leakbound import check
from leakbound.flower.compat import delivered, empty_run, error_reply, log, take_identity

POLLS = 3
APART = 0.5
"""So many questions for nodes in a row, so many seconds apart, wait for nodes that never come."""


class InProcessGrid(Grid):
    """A Grid that calls the ClientApp directly, one client after the other.

    ServerApp, ClientApp, strategies and mods run unchanged. An exception of the ClientApp becomes
    an error reply and a line in the log. Each client's `context.state` lives as long as the grid.

    Args:
        clients: how many; each has `partition-id` and `num-partitions` in its `node_config`.
        run_config: the value of `context.run_config`.
        on_exchange: called with every message of the server and its reply, as sent.

    Example:
        >>> grid = InProcessGrid(ClientApp(), 2)
        >>> asked = [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]
        >>> [reply.has_error() for reply in grid.send_and_receive(asked)]
        [True, True]
    """

    def __init__(
        self,
        client_app: ClientApp,
        clients: int,
        *,
        run_config: Mapping[str, Any] | None = None,
        on_exchange: Callable[[Message, Message], None] | None = None,
        run_id: int = 1,
    ) -> None:
        check.count(clients=clients)
        take_identity(run_id)
        self._app = client_app
        self._run_id = run_id
        self._on_exchange = on_exchange
        self._replies: dict[str, Message] = {}
        self._count = 0
        self._polls = 0
        self._polled = 0.0
        self.contexts: dict[int, Context] = {}
        for number in range(clients):
            node = number + 2  # 1 is the server
            place: dict[str, Any] = {"partition-id": number, "num-partitions": clients}
            self.contexts[node] = Context(run_id, node, place, RecordDict(), dict(run_config or {}))

    def set_run(self, run: Any) -> None:
        """Do nothing: the run is this process."""

    @property
    def run(self) -> Any:
        return empty_run(self._run_id)

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(
            content,
            dst_node_id,
            message_type,
            ttl=ttl,
            group_id=group_id,
        )

    def get_node_ids(self) -> Iterable[int]:
        """All nodes.

        Raises:
            ValueError: the app asks again and again, as one that waits for more nodes does.
        """
        now = time.monotonic()
        self._polls = self._polls + 1 if now - self._polled > APART else 0
        self._polled = now
        if self._polls > POLLS:
            raise ValueError(
                f"clients is {len(self.contexts)}, and the app waits for more (its strategy's "
                "min_available_nodes); give as many"
            )
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Get every client's answer, in the order of the messages."""
        names = []
        self._polls = 0
        for message in messages:
            self._count += 1
            names.append(str(self._count))
            self._replies[names[-1]] = self._answer(message, names[-1])
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(name) for name in message_ids if name in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message, name: str) -> Message:
        asked = delivered(message, name)
        context = self.contexts[message.metadata.dst_node_id]
        try:
            reply = self._app(asked, context)
        except Exception as error:
            reason = f"the ClientApp raised {type(error).__name__}: {error}"
            log(ERROR, "client %s: %s", context.node_config["partition-id"], reason)
            reply = error_reply(asked, reason, raised=True)
        reply = delivered(reply, f"{name}r")
        if self._on_exchange is not None:
            self._on_exchange(message, reply)
        return reply


def run(
    server_app: ServerApp,
    client_app: ClientApp,
    clients: int,
    *,
    run_config: Mapping[str, Any] | None = None,
    **settings: Any,
) -> InProcessGrid:
    """Run a whole app in this process; returns the grid. Arguments as in `InProcessGrid`."""
    grid = InProcessGrid(
        client_app,
        clients,
        run_config=run_config,
        **settings,
    )
    server_app(grid, Context(1, 1, {}, RecordDict(), dict(run_config or {})))
    return grid
