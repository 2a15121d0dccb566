-- The status answer of an order, written with the change that it tells of; ``key`` names the code and
-- settings that rendered it (ADR 7). Beside the orders and not in their rows: deleting it frees its
-- pages. Answers from before are rendered when they are asked for.
CREATE TABLE status_views (
    order_seq   INTEGER PRIMARY KEY REFERENCES orders (seq) DEFERRABLE INITIALLY DEFERRED,
    view        BLOB NOT NULL,
    valid_until INTEGER,
    key         TEXT NOT NULL
) STRICT;

ALTER TABLE orders DROP COLUMN view;
ALTER TABLE orders DROP COLUMN view_valid_until;
ALTER TABLE orders DROP COLUMN view_key;

-- When an order ended to which nothing was ever paid; NULL of any other, and once its answers were
-- deleted (store/retention.py). Its terms and its deposit address stay.
ALTER TABLE orders ADD COLUMN unpaid_since INTEGER;

UPDATE orders SET unpaid_since = completed_at
WHERE status = 'expired'
    AND NOT EXISTS (SELECT 1 FROM deposits d WHERE d.order_id = orders.order_id)
    AND NOT EXISTS (SELECT 1 FROM relays r
        WHERE r.order_id = orders.order_id AND r.deposit_txid IS NOT NULL);

CREATE INDEX orders_unpaid ON orders (unpaid_since) WHERE unpaid_since IS NOT NULL;

-- The order that a key made. Keys from before have none, and go when their time is over.
ALTER TABLE idempotency_keys ADD COLUMN order_seq INTEGER;
CREATE INDEX idempotency_keys_by_order ON idempotency_keys (order_seq)
    WHERE order_seq IS NOT NULL;
