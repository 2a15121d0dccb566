"""Invariants between the rows of the books, for every backend."""

from __future__ import annotations

from typing import Final

# Each query finds rows that must not be; its first column names the order or transfer.
BOOKS: Final[tuple[tuple[str, str], ...]] = (
    (
        "a deposit is spent on a transfer of another order",
        "SELECT d.order_id FROM deposits d JOIN transfers t USING (transfer_id)"
        " WHERE t.order_id <> d.order_id",
    ),
    (
        "a deposit is spent on a transfer that does not exist",
        # While an order is swapped in chunks, its deposits are set aside for the payout to be.
        "SELECT d.order_id FROM deposits d JOIN orders o USING (order_id)"
        " WHERE d.transfer_id IS NOT NULL"
        " AND d.transfer_id NOT IN (SELECT transfer_id FROM transfers)"
        " AND NOT (o.twap_chunk_units IS NOT NULL AND o.status = 'executing_swap'"
        " AND d.transfer_id LIKE o.order_id || '/payout/%')",
    ),
    (
        "an order has more than one payout that is, or may be, paid",
        "SELECT order_id FROM transfers WHERE kind = 'payout'"
        " AND state NOT IN ('failed', 'cancelled') GROUP BY order_id HAVING count(*) > 1",
    ),
    (
        "a refund is not its deposits less the fee",
        "SELECT t.transfer_id FROM transfers t WHERE t.kind = 'refund'"
        " AND t.state NOT IN ('failed', 'cancelled') AND t.units + t.fee <>"
        " (SELECT coalesce(sum(d.units), 0) FROM deposits d WHERE d.transfer_id = t.transfer_id)"
        " AND t.order_id NOT IN (SELECT order_id FROM fills)",
    ),
    (
        "a payout is not the sum of its chunks",
        "SELECT t.transfer_id FROM transfers t JOIN fills f USING (order_id)"
        " WHERE t.kind = 'payout' AND t.state NOT IN ('failed', 'cancelled')"
        " GROUP BY t.seq HAVING t.units <> sum(f.output)",
    ),
    (
        "chunks, refunds and what is left do not add up to an order's deposits",
        # Deposits that are gone keep back what was left of them.
        "SELECT order_id FROM (SELECT o.order_id, o.leftover,"
        " (SELECT sum(f.units) FROM fills f WHERE f.order_id = o.order_id) AS swapped,"
        " (SELECT coalesce(sum(d.units), 0) FROM deposits d WHERE d.order_id = o.order_id"
        "  AND d.transfer_id IS NOT NULL) AS spent,"
        " (SELECT coalesce(sum(t.units + t.fee), 0) FROM transfers t"
        "  WHERE t.order_id = o.order_id AND t.kind = 'refund'"
        "  AND t.state NOT IN ('failed', 'cancelled')) AS refunded"
        " FROM orders o WHERE o.status = 'completed' AND NOT EXISTS"
        " (SELECT 1 FROM deposits d WHERE d.order_id = o.order_id AND d.state = 'removed')) AS sums"
        " WHERE swapped IS NOT NULL AND swapped + leftover + refunded <> spent",
    ),
    (
        "a payout goes to another address than was ordered",
        "SELECT t.transfer_id FROM transfers t JOIN orders o USING (order_id)"
        " WHERE t.kind = 'payout' AND t.address <> o.to_address",
    ),
    (
        "an order is completed without a settled payout",
        "SELECT order_id FROM orders WHERE status = 'completed' AND upstream_id IS NULL"
        " AND order_id NOT IN"
        " (SELECT order_id FROM transfers WHERE kind = 'payout' AND state = 'settled')",
    ),
    (
        "an order that is over has a deadline, or one that is not has none",
        "SELECT order_id FROM orders WHERE (deadline_at IS NULL) <>"
        " (status IN ('completed', 'refunded', 'failed', 'expired'))",
    ),
    (
        "an order's history has a gap",
        "SELECT o.order_id FROM orders o LEFT JOIN event_log e ON e.order_seq = o.seq"
        " GROUP BY o.seq HAVING count(e.version) <> o.version"
        " OR min(e.version) <> 1 OR max(e.version) <> o.version",
    ),
    (
        "the sum of reservations is another than that of its orders",
        "SELECT scope || ' ' || network FROM ("
        " SELECT 'total' AS scope, network, units, 1 AS number FROM reservations"
        " UNION ALL SELECT 'all', network, units, 1 FROM reservations WHERE kind = 'unfunded'"
        " UNION ALL SELECT 'by_address', network, units, 1 FROM reservations"
        "  WHERE kind = 'unfunded' AND (client = '' OR client LIKE 'address:%')"
        " UNION ALL SELECT client, network, units, 1 FROM reservations WHERE kind = 'unfunded'"
        " UNION ALL SELECT client, '', 0, 1 FROM reservations WHERE kind = 'unfunded'"
        " UNION ALL SELECT scope, network, -units, -number FROM reservation_sums) AS sums"
        " GROUP BY scope, network HAVING sum(units) <> 0 OR sum(number) <> 0",
    ),
    (
        "an order that awaits no deposit reserves something for one",
        "SELECT order_id FROM reservations JOIN orders USING (order_id)"
        " WHERE kind = 'unfunded' AND status NOT IN ('awaiting_deposit', 'deposit_detected')",
    ),
    (
        "a transfer that is not over has no pending effect",
        "SELECT transfer_id FROM transfers WHERE state NOT IN ('settled', 'failed', 'cancelled')"
        " AND transfer_id NOT IN (SELECT subject FROM effects)",
    ),
    (
        "a withdrawal reserves another amount than it takes, or is over and reserves some",
        "SELECT w.withdrawal_id FROM withdrawals w LEFT JOIN reservations r"
        " ON r.order_id = w.withdrawal_id AND r.kind = 'funded' AND r.network = w.network"
        " WHERE coalesce(r.units, 0) <> CASE WHEN w.state IN ('settled', 'failed', 'cancelled')"
        " THEN 0 ELSE w.units + w.fee END",
    ),
    (
        "something is reserved for a withdrawal that does not exist",
        "SELECT order_id FROM reservations WHERE order_id LIKE 'wd_%'"
        " AND order_id NOT IN (SELECT withdrawal_id FROM withdrawals)",
    ),
    (
        "the payment of a withdrawal is another one, or pays something else",
        "SELECT w.withdrawal_id FROM withdrawals w JOIN monero_payments p"
        " ON p.payment_id = w.withdrawal_id WHERE w.network <> 'monero'"
        " OR p.address <> w.address OR p.units <> w.units OR p.txid <> coalesce(w.txid, p.txid)"
        " UNION ALL SELECT w.withdrawal_id FROM withdrawals w JOIN evm_payments p"
        " ON p.payment_id = w.withdrawal_id"
        " JOIN evm_attempts a ON a.payment_id = p.payment_id AND a.number = 1"
        " WHERE p.network <> w.network OR lower(p.recipient) <> lower(w.address)"
        " OR p.units <> w.units OR a.txid <> coalesce(w.txid, a.txid)",
    ),
)
