"""The signing keys of all replicas, which the operator rotates, and people who verify orders."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rpcsvc import verify
from rpcsvc.clock import Clock
from rpcsvc.ids import RandomBytes
from rpcsvc.signing import KEYS_DIR, RING_NAME, KeyRing


class KeyRings:
    """One ring in the data directories of all replicas, copied as docs/operate/cluster.md says."""

    def __init__(self, folders: Sequence[Path], clock: Clock, random: RandomBytes) -> None:
        self._folders = [folder / KEYS_DIR for folder in folders]
        for folder in folders:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._ring = KeyRing.load_or_create(self._folders[0], clock, random)
        self._copy()
        # What a verifier keeps, until it meets a key that is not in it.
        self._known: Mapping[str, Any] = self._ring.jwks()

    def rotate(self) -> None:
        """Sign with a new key from now on, at all replicas."""
        self._ring.refresh()
        self._ring.rotate()
        self._copy()

    def _copy(self) -> None:
        first, *others = self._folders
        for folder in others:
            folder.mkdir(mode=0o700, exist_ok=True)
            fresh = folder / f"{RING_NAME}.copy"
            shutil.copy2(first / RING_NAME, fresh)
            fresh.replace(folder / RING_NAME)

    def problem(self, token: str, expected: verify.Expected, jwks: Mapping[str, Any]) -> str | None:
        """Why an order is not what was ordered; None: it is, by the keys that a verifier knows.

        ``jwks``: what a replica publishes now, which is asked for when a key is not known.
        """
        try:
            verify.verify_attestation(token, self._known, expected)
        except verify.UnknownKey:
            self._known = jwks
        except verify.VerificationError as error:
            return repr(error)
        else:
            return None
        try:
            verify.verify_attestation(token, jwks, expected)
        except verify.VerificationError as error:
            return repr(error)
        return None
