"""What the operator should know of one network's payments, sweeps and nonces, in words.

What does not live here: when something is one (upkeep.py, presence.py, nonces.py, sweeps.py).
"""

from __future__ import annotations

import structlog

log = structlog.get_logger(__name__)


class Conditions:
    """What the operator should know, in words; said in the log when it is new."""

    def __init__(self, network: str) -> None:
        self._network = network
        self._texts: dict[str, str] = {}

    def set(self, key: str, text: str | None) -> None:
        """Keep a condition, or drop it (None)."""
        if text is None:
            self._texts.pop(key, None)
            return
        if self._texts.get(key) != text:
            log.error("evm_condition", network=self._network, condition=text)
        self._texts[key] = text

    def texts(self) -> list[str]:
        """All that hold."""
        return list(self._texts.values())
