"""Paying for a round before it trains: the same for every framework."""

from __future__ import annotations

import logging
from pathlib import Path

from leakbound.ledger import Budget, Ledger
from leakbound.risk.deployment.facts import Deployment

OVER = "the node's privacy budget is spent"
logger = logging.getLogger("leakbound.ledger")


class Purse:
    """A folder of ledgers, one for each client of this machine, and what may be spent of each.

    Args:
        folder: on the node.
        deployment: the facts of the training.
        budget: what may be spent.
    """

    def __init__(
        self,
        folder: Path | str,
        deployment: Deployment,
        budget: Budget,
    ) -> None:
        self.folder = Path(folder)
        self.deployment = deployment
        self.budget = budget
        self._ledgers: dict[str, Ledger] = {}

    def ledger(self, client: str) -> Ledger:
        """The ledger of a client."""
        if client not in self._ledgers:  # opening checks the whole chain
            self._ledgers[client] = Ledger(self.folder / f"{client}.jsonl")
        return self._ledgers[client]

    def pays(
        self,
        client: str,
        job: str,
        round: str,
    ) -> bool:
        """Whether a round may train: it was paid for, or the budget only warns.

        A ledger that cannot be written or trusted pays for nothing. Reasons go to the Python log
        "leakbound.ledger".
        """
        try:
            own = self.ledger(client)
            charge = own.charge(self.deployment, self.budget, job=job, round=round)
        except Exception as error:  # what is not paid for must not train
            logger.error("the ledger cannot be used: %s", error)
            return False
        for reason in charge.reasons:
            logger.warning("%s: %s", "withheld" if charge.refused else "over budget", reason)
        return not charge.refused
