"""Whether another engine has orders to carry on in a database.

To one engine the orders of another are about money that it never sees: it would let them expire,
refund them, or call them paid. What does not live here: the engines themselves (settlement/).
"""

from __future__ import annotations

from typing import Final

from rpcsvc.store.database import Tables

_WALLETS: Final = "SELECT EXISTS (SELECT 1 FROM evm_wallet) OR EXISTS (SELECT 1 FROM monero_wallet)"
_ORDERS: Final = "SELECT count(*), min(order_id) FROM orders"
# By that index it costs nothing where no order is at an upstream, however many are open.
_THERE: Final = f"{_ORDERS} WHERE upstream_id IS NOT NULL AND deadline_at IS NOT NULL"
_SIMULATED: Final = f"{_ORDERS} WHERE upstream_id IS NULL"


def claim_of_another(database: Tables, engine: str) -> tuple[str, str] | None:
    """Which engine other than ``engine`` the database is for, and why; None when it is for none.

    That of real wallets is so for ever: money may come to their addresses at any time. Another is
    so until its orders are over; but real wallets never paid what the sandbox did, as their auditor
    would find. Raises errors.Unavailable.
    """
    (has_wallets,) = database.read_one(_WALLETS)
    if has_wallets and engine != "onchain":
        return "onchain", "it has the orders of real wallets"
    if engine != "upstream" and (found := _orders(database, _THERE)):
        return "upstream", f"{found} not over at an upstream"
    if has_wallets or engine == "sandbox":
        return None
    if engine == "onchain":
        found = _orders(database, _SIMULATED)
        return ("sandbox", f"{found} the sandbox's") if found else None
    found = _orders(database, f"{_SIMULATED} AND deadline_at IS NOT NULL")
    return ("sandbox", f"{found} not over in the sandbox") if found else None


def _orders(database: Tables, sql: str) -> str | None:
    count, one = database.read_one(sql)
    return f"{count} orders, such as {one}, are" if count else None
