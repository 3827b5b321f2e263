"""What a node's trainings have cost so far: a ledger on its disk, and a budget that stops them.

    ledger = Ledger(Path("ledger.jsonl"))
    charge = ledger.charge(deployment, Budget(max_epsilon=8.0))  # before the round trains
    if charge.refused:
        ...  # withhold the round

`leakbound ledger FILE` shows a ledger.
"""

from leakbound.ledger.budget import Budget
from leakbound.ledger.file import Charge, Ledger
from leakbound.ledger.lines import PaidRound, Standing
from leakbound.ledger.standing import standings

__all__ = ["Budget", "Charge", "Ledger", "PaidRound", "Standing", "standings"]
