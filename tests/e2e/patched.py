"""``python -m tests.e2e.patched serve ...``: the service with other values of some constants."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Final

from rpcsvc.__main__ import main

VARIABLE: Final = "PATCHED_CONSTANTS"
# An upstream is polled often.
POLLING: Final = {
    "rpcsvc.settlement.upstream.follower.ASK_EVERY_MS": 100,
    "rpcsvc.settlement.upstream.wiring.POLL_MS": 100,
}
# The lease is short, and renewed often.
LEASING: Final = {
    "rpcsvc.store.backends.postgresql.database.PostgresqlDatabase.lease_ms": 5_000,
    "rpcsvc.store.leases.RENEW_MS": 500,
}
# A collector that does not answer is soon given up.
EXPORTING: Final = {"rpcsvc.http.tracing.EXPORT_SECONDS": 0.5}


def environ_of(constants: Mapping[str, float]) -> dict[str, str]:
    """The environment in which ``Server`` runs with these values."""
    return {VARIABLE: json.dumps(constants)}


def _patch(constants: Mapping[str, float]) -> None:
    for path, value in constants.items():
        owner, _, name = path.rpartition(".")
        place = resolve_name(owner)
        assert hasattr(place, name), path
        setattr(place, name, value)


if __name__ == "__main__":
    _patch(json.loads(os.environ[VARIABLE]))
    main()
