"""A budget as a filter of an NVFlare client: a round that would cost too much does not train."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvflare.apis.filter import Filter
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_constant import AppConstants

from leakbound.client_side.paid import OVER, Purse
from leakbound.ledger import Budget
from leakbound.risk.deployment import read


class BudgetFilter(Filter):  # type: ignore[misc]
    """Pay for a round in the site's ledger before it trains, or withhold it.

    Put it under `task_data_filters`, with the exact names of all tasks that train. In a site's
    privacy.json, no job can leave it out if every scope has it, and it counts every task. The
    decision rests on the deployment and on the rounds before, never on data. A withheld task ends
    with NVFlare's TASK_DATA_FILTER_ERROR.

    Args:
        folder: on the site, for its `leakbound.ledger.Ledger`.
        deployment: path of the deployment file on the site.
        budget: what may be spent, as the arguments of `leakbound.ledger.Budget`.

    Raises:
        ValueError: the deployment or the budget cannot be read.

    Example:
        >>> from tempfile import mkdtemp
        >>> path = Path(mkdtemp()) / "deployment.toml"
        >>> _ = path.write_text("rounds = 3")
        >>> BudgetFilter("ledgers", str(path), {"max_epsilon": 8.0}).budget
        {'max_epsilon': 8.0}
    """

    def __init__(
        self,
        folder: str,
        deployment: str,
        budget: Mapping[str, Any],
    ) -> None:
        super().__init__()
        # NVFlare's job writer reads the settings from attributes of these names
        self.folder = folder
        self.deployment = deployment
        self.budget = dict(budget)
        given, _ = read(Path(deployment))
        self._purse = Purse(folder, given, Budget(**budget))

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """The task, if the round is paid for.

        Raises:
            ValueError: it is not; NVFlare then runs no executor.
        """
        round = str(shareable.get_header(AppConstants.CURRENT_ROUND, ""))
        job = str(fl_ctx.get_job_id())
        if not self._purse.pays(fl_ctx.get_identity_name(), job, round):
            raise ValueError(OVER)
        return shareable
