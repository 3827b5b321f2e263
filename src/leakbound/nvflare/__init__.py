"""NVFlare: a task result filter with defenses and the leak meter, and the server's view of a job.

Only this package imports nvflare; install it with `pip install leakbound[nvflare]`.

In config_fed_client.json, under `task_result_filters`, for the tasks that train:

    {"path": "leakbound.nvflare.LeakboundFilter",
     "args": {"defense": ["clip,clip_norm=1.0", "gaussian_noise,noise_std=0.01"],
              "model": "net:Net"}}
"""

from leakbound.client_side import tap
from leakbound.nvflare.budget import BudgetFilter
from leakbound.nvflare.capture import capture_job
from leakbound.nvflare.filter import LeakboundFilter
from leakbound.nvflare.watch import ServerWatch

__all__ = ["BudgetFilter", "LeakboundFilter", "ServerWatch", "capture_job", "tap"]
