"""A budget as a Flower client mod: a round that would cost too much does not train."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from leakbound.client_side.paid import OVER, Purse
from leakbound.flower import messages
from leakbound.flower.compat import error_reply
from leakbound.ledger import Budget
from leakbound.risk.deployment.facts import Deployment


class BudgetMod:
    """Pay for a round in the node's ledger before it trains, or withhold it.

    It is the outermost mod, but for SecAgg+, which calls it once a round only from outside.

    The decision rests on the deployment and on the rounds before, never on data, so a withheld
    round says nothing about the data. A round that is paid for counts even if its training fails.
    Evaluation is not counted: what it sends is not known here.

    Args:
        folder: on the node, for its `leakbound.ledger.Ledger`. In a simulation, each partition has
            one of its own.
        deployment: the facts of the training, as `leakbound.risk.deployment.read` reads them from a
            file. They are not verified: `leakbound audit-epsilon` tests running code against them.
        budget: what may be spent.

    Example:
        >>> from leakbound.risk.deployment import Deployment
        >>> from tempfile import mkdtemp
        >>> mod = BudgetMod(mkdtemp(), Deployment(), Budget(max_epsilon=8.0))
        >>> mod.purse.ledger("node").rounds
        0
    """

    def __init__(
        self,
        folder: Path | str,
        deployment: Deployment,
        budget: Budget,
    ) -> None:
        self.purse = Purse(folder, deployment, budget)

    def __call__(
        self,
        message: Message,
        context: Context,
        call_next: ClientAppCallable,
    ) -> Message:
        if messages.is_train(message):
            number = messages.settings(message, context).get("server-round", "")
            if not self.purse.pays(_own_name(context), str(context.run_id), str(number)):
                return error_reply(message, OVER)
        return call_next(message, context)

    def __repr__(self) -> str:
        return f"BudgetMod({str(self.purse.folder)!r}, {self.purse.budget!r})"


def _own_name(context: Context) -> str:
    """The node's own name of the client, from its own settings.

    The server gives node ids: a new one must not open a new ledger.
    """
    partition = context.node_config.get("partition-id")
    return "node" if partition is None else f"client-{partition}"
