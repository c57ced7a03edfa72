"""Which way attention takes over split sequences: keys around a ring, or heads in exchange for positions."""

from __future__ import annotations

from typing import Literal

Form = Literal["auto", "ring", "ulysses"]


def choose_form(form: Form, *, heads: int, size: int, dropout_p: float = 0.0) -> Literal["ring", "ulysses"]:
    """The form for an attention of `heads` heads on a rank, over `size` ranks. Equal on all ranks of the group."""
    if form != "auto":
        return form
    return "ulysses" if heads % size == 0 else "ring"
