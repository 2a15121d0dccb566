-- Orders that are swapped in chunks, and orders that an integrator brought.

ALTER TABLE orders ADD COLUMN integrator TEXT;
ALTER TABLE orders ADD COLUMN integrator_bps INTEGER NOT NULL DEFAULT 0
    CHECK (integrator_bps BETWEEN 0 AND 10000);
ALTER TABLE orders ADD COLUMN twap_chunk_usd INTEGER CHECK (twap_chunk_usd > 0);
ALTER TABLE orders ADD COLUMN twap_interval_ms INTEGER CHECK (twap_interval_ms > 0);
-- deposit units that were not swapped and are still to be sent back
ALTER TABLE orders ADD COLUMN leftover INTEGER NOT NULL DEFAULT 0 CHECK (leftover >= 0);
-- what was kept from a payout for the order's integrator: the books are the settled payouts
ALTER TABLE transfers ADD COLUMN integrator_fee INTEGER NOT NULL DEFAULT 0
    CHECK (integrator_fee >= 0);

CREATE INDEX orders_by_integrator ON orders (integrator) WHERE integrator IS NOT NULL;

-- The chunks of an order so far. A chunk is filled once: a reorganisation that takes chunks back
-- deletes them, in the same commit; what happened stays in event_log.
CREATE TABLE fills (
    order_id       TEXT    NOT NULL REFERENCES orders (order_id) DEFERRABLE INITIALLY DEFERRED,
    chunk          INTEGER NOT NULL CHECK (chunk >= 0),
    units          INTEGER NOT NULL CHECK (units > 0),
    output         INTEGER NOT NULL CHECK (output > 0),
    integrator_fee INTEGER NOT NULL CHECK (integrator_fee >= 0),
    rate           INTEGER NOT NULL CHECK (rate > 0),
    at             INTEGER NOT NULL,
    PRIMARY KEY (order_id, chunk)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER fills_are_never_changed BEFORE UPDATE ON fills
BEGIN SELECT RAISE(ABORT, 'a chunk is filled once'); END;
