"""Imports of the program, without garbage collection and what libraries load unused."""

from __future__ import annotations

import gc
import os
import sys

_CERTIFICATES = "SSL_CERT_FILE"


class Importing:
    """Until the block ends: no garbage collection, no certificates for aiohttp, no rich.

    At import aiohttp reads the system's certificates twice: TLS clients pass
    ``http_client.system_trust`` instead. structlog imports rich where it is installed.
    """

    def __enter__(self) -> None:
        gc.disable()
        self._certificates = os.environ.get(_CERTIFICATES)
        os.environ[_CERTIFICATES] = os.devnull
        self._hides_rich = "rich" not in sys.modules
        if self._hides_rich:
            sys.modules["rich"] = None  # type: ignore[assignment]  # importing it fails

    def __exit__(self, *_: object) -> None:
        gc.enable()
        del os.environ[_CERTIFICATES]
        if self._certificates is not None:
            os.environ[_CERTIFICATES] = self._certificates
        if self._hides_rich:
            del sys.modules["rich"]
