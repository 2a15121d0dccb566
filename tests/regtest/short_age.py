"""``python -m tests.regtest.short_age serve ...``: the service, whose replicas take orders by a
published state of the wallets that is 5 seconds old at most, and not a minute.
"""

from __future__ import annotations

from typing import Final

from rpcsvc.__main__ import main
from rpcsvc.orders import shared_wallets

AGE_MS: Final = 5_000

if __name__ == "__main__":
    vars(shared_wallets)["MAX_AGE_MS"] = AGE_MS
    main()
