"""What any federated client does: what it sends, declares and keeps, whichever library carries it.

`Setup` describes the training, `tap` shows its batches, which `listening` collects. `ClientRound`
turns what was trained into what may leave, `ClientMeter` measures that first, and `Captures` keeps
what a server saw. `leakbound.flower` and `leakbound.nvflare` translate their own messages to these.
"""

from leakbound.client_side.batches import listening, tap
from leakbound.client_side.round import ClientRound
from leakbound.client_side.setup import Setup

__all__ = ["ClientRound", "Setup", "listening", "tap"]
