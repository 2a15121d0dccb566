"""Imports of the program, without garbage collection and what libraries load unused."""

from __future__ import annotations

import gc
import os
import sys
from typing import Final

_CERTIFICATES = "SSL_CERT_FILE"
# structlog imports rich where it is installed. pycryptodomex imports cffi, and with it a parser
# of C, where it is installed; ctypes is as fast.
_HIDDEN: Final = ("rich", "cffi")


class Importing:
    """Until the block ends: no garbage collection, no certificates for aiohttp, no rich, no cffi.

    At import aiohttp reads the system's certificates twice: TLS clients pass
    ``http_client.system_trust`` instead.
    """

    def __enter__(self) -> None:
        self._collects = gc.isenabled()
        gc.disable()
        self._certificates = os.environ.get(_CERTIFICATES)
        os.environ[_CERTIFICATES] = os.devnull
        self._hides = [name for name in _HIDDEN if name not in sys.modules]
        for name in self._hides:
            sys.modules[name] = None  # type: ignore[assignment]  # importing it fails

    def __exit__(self, *_: object) -> None:
        if self._collects:
            gc.freeze()  # what was imported stays; looking through it takes 10 ms
            gc.enable()
        del os.environ[_CERTIFICATES]
        if self._certificates is not None:
            os.environ[_CERTIFICATES] = self._certificates
        for name in self._hides:
            del sys.modules[name]
