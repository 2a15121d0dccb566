"""What both sides raise when a node, a wallet or a token answers, and can't be relied on.

What does not live here: finding it out (monero/link.py, evm/link.py), failures to get an answer
(daemon_rpc.py).
"""

from __future__ import annotations


class SideUnusable(Exception):
    """Node, wallet, token or mnemonic is not what it should be. The text is for the operator."""
