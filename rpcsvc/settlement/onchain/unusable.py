"""Raised by both adapters for a node, wallet or token that answers and can't be relied on.

Failures to get an answer are in daemon_rpc.py.
"""

from __future__ import annotations


class ChainUnusable(Exception):
    """Node, wallet, token or mnemonic is not what it should be. The text is for the operator."""
