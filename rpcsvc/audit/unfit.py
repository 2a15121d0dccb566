"""Why an audit could not be made, where it is no failed call."""

from __future__ import annotations


class Unfit(Exception):
    """A node or wallet is not the one that the books are about. The text is for the operator."""


class ChainMoved(Exception):
    """The chain changed while it was read: look again."""
