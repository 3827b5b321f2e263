"""Parts of records that domains and attacks fill in: reports read records without torch."""

from __future__ import annotations

from typing import Annotated, Literal

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


LISTED = 1000
"""Most items that a fact lists; their count has no limit."""
FactKind = Literal["attribute", "words", "levels", "classes", "zero values", "batch statistics"]
VALUES = ("attribute", "words", "levels")
"""Kinds of facts whose items are values of examples."""


class Fact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that an update reveals about its examples, though no example is reconstructed.

    Attributes:
        kind: "attribute", the unknown column (or label) of examples of which all else is known;
            "words" of a text, "levels" of a column, "classes" of the labels, "zero values" of all
            inputs, "batch statistics".
        subject: the column or layer that it is about; "" for all of the input.
        items: what is revealed, as text; what matters most comes first, and long lists are cut.
        count: how many items there are.
        level: the largest probability that any of them is wrong; None if none can be, under what it
            `assumes`.
        assumes: what must be true of the client's training, as the end of a sentence.
        sensitive: the schema says that the subject is.
        examples: of an attribute, the example of each item, from 0.
    """

    kind: FactKind
    subject: str = ""
    items: tuple[str, ...] = ()
    count: Annotated[int, msgspec.Meta(ge=0)]
    level: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    assumes: str
    sensitive: bool = False
    examples: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()

    @property
    def withheld(self) -> Fact:
        """The same without the values of examples, for files that hold no private data."""
        if self.kind not in VALUES:
            return self
        return msgspec.structs.replace(self, items=(), examples=())
