"""What a user chooses of a paper's own scale: parts, lengths, a time limit, a device."""

from __future__ import annotations

from dataclasses import dataclass

from leakbound import check


@dataclass(frozen=True)
class Jobs:
    """A choice; the default is everything, at the paper's lengths.

    Attributes:
        parts: names of the parts to run; none: all.
        steps: of every search, in all its stages; None: the paper's.
        seeds: rounds, at most the plan's; None: all.
        hours: no experiment starts after so many; 0 only says what everything costs.
        device: "cpu" or "cuda"; None: a GPU if there is one.
        lpips_weights: a file of LPIPS weights; without it there is no such number.
    """

    parts: tuple[str, ...] = ()
    steps: int | None = None
    seeds: int | None = None
    hours: float | None = None
    device: str | None = None
    lpips_weights: str | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "seeds"):
            if getattr(self, name) is not None:
                check.count(**{name: getattr(self, name)})
        if self.hours is not None:
            check.non_negative(hours=self.hours)
