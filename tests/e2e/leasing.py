"""``python -m tests.e2e.leasing serve ...``: the service; its lease is short, and renewed often."""

from __future__ import annotations

from rpcsvc.__main__ import main
from rpcsvc.orders import lease
from rpcsvc.store.backends.postgresql.database import PostgresqlDatabase

if __name__ == "__main__":
    lease.RENEW_MS = 500  # type: ignore[misc]
    PostgresqlDatabase.lease_ms = 5_000
    main()
