-- Orders that an upstream settles. A claim is here before the upstream is called; it is never
-- deleted, so that what may have been created there is found by the operator.

ALTER TABLE orders ADD COLUMN upstream_id TEXT;
CREATE UNIQUE INDEX orders_by_upstream_id ON orders (upstream_id) WHERE upstream_id IS NOT NULL;

CREATE TABLE relays (
    seq             INTEGER PRIMARY KEY,
    order_id        TEXT    NOT NULL UNIQUE,
    state           TEXT    NOT NULL CHECK (state IN (
        'claimed', 'created', 'refused', 'reconciling')),
    created_at      INTEGER NOT NULL,
    session_id      TEXT    NOT NULL,
    namespace       TEXT,
    idempotency_key TEXT,
    upstream_id     TEXT,
    reason          TEXT,
    -- the upstream's answer to the creation, for audit
    raw             BLOB    NOT NULL,
    -- what it last said of the order, and the answer that this was read from
    deposit_txid    TEXT,
    output          INTEGER CHECK (output >= 0),
    refund_txid     TEXT,
    error           TEXT,
    completed_at    INTEGER,
    extra           TEXT,
    evidence        BLOB,
    CHECK (state <> 'created' OR upstream_id IS NOT NULL)
) STRICT;

CREATE UNIQUE INDEX relays_by_upstream_id ON relays (upstream_id)
    WHERE upstream_id IS NOT NULL AND state = 'created';
CREATE INDEX relays_by_key ON relays (namespace, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
CREATE INDEX relays_in_doubt ON relays (state) WHERE state IN ('claimed', 'reconciling');

CREATE TRIGGER relays_are_never_deleted BEFORE DELETE ON relays
BEGIN SELECT RAISE(ABORT, 'a claim on an upstream order stays'); END;
