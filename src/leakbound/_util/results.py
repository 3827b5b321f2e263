"""Parts of records that domains fill in, apart from them: reports read records without torch."""

from __future__ import annotations

from typing import Annotated

import msgspec


class ColumnResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One column of a table over all examples, as text in its own units; a part of records.

    `matched`, `baseline`: by example, whether the reconstruction, and the prior-only baseline, are
    within the column's tolerance; empty if the truth is not known, as is `truth`. `agreement`: the
    share of the attack's searches that agree with each value; empty if it does not count them.
    """

    name: str
    unit: str = ""
    sensitive: bool = False
    matched: tuple[bool, ...] = ()
    baseline: tuple[bool, ...] = ()
    truth: tuple[str, ...] = ()
    reconstruction: tuple[str, ...] = ()
    agreement: tuple[Annotated[float, msgspec.Meta(ge=0, le=1)], ...] = ()


class SequenceResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sequence of tokens as texts, and which places are right; a part of records.

    `truth` and `matched` are empty if the truth is not known. `agreement`: the share of the
    attack's searches that agree with each token; empty if it does not count them.
    """

    reconstruction: tuple[str, ...] = ()
    truth: tuple[str, ...] = ()
    matched: tuple[bool, ...] = ()
    agreement: tuple[Annotated[float, msgspec.Meta(ge=0, le=1)], ...] = ()
