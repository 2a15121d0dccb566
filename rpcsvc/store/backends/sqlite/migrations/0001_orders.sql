-- Orders, what arrived for them, what was sent for them, and what is still to be done.
-- Money is INTEGER atomic units in STRICT tables: text or a float beyond 2^63 is an error there,
-- where a loose INTEGER column would quietly keep a REAL. Times are milliseconds since the epoch.

CREATE TABLE orders (
    seq              INTEGER PRIMARY KEY,
    order_id         TEXT    NOT NULL UNIQUE,
    session_id       TEXT    NOT NULL,
    direction        TEXT    NOT NULL CHECK (direction IN ('x2u', 'u2x')),
    chain            TEXT    NOT NULL,
    chain_id         INTEGER NOT NULL,
    deposit_network  TEXT    NOT NULL,
    payout_network   TEXT    NOT NULL,
    deposit_address  TEXT    NOT NULL,
    to_address       TEXT    NOT NULL,
    deposit_amount   INTEGER NOT NULL CHECK (deposit_amount > 0),
    expected_output  INTEGER NOT NULL CHECK (expected_output > 0),
    min_received     INTEGER NOT NULL CHECK (min_received >= 0),
    min_deposit      INTEGER NOT NULL CHECK (min_deposit > 0),
    max_deposit      INTEGER NOT NULL CHECK (max_deposit >= min_deposit),
    rate             INTEGER NOT NULL CHECK (rate > 0),
    spread_bps       INTEGER NOT NULL CHECK (spread_bps BETWEEN 0 AND 10000),
    payout_fee       INTEGER NOT NULL CHECK (payout_fee >= 0),
    min_received_bps INTEGER NOT NULL CHECK (min_received_bps BETWEEN 0 AND 10000),
    refund_fee       INTEGER NOT NULL CHECK (refund_fee >= 0),
    created_at       INTEGER NOT NULL,
    expires_at       INTEGER NOT NULL,
    late_window      INTEGER NOT NULL,
    confirm_timeout  INTEGER NOT NULL,
    prepare_timeout  INTEGER NOT NULL,
    payout_check     INTEGER NOT NULL,
    refund_reminder  INTEGER NOT NULL,
    -- from here on: what changes
    status           TEXT    NOT NULL CHECK (status IN (
        'awaiting_deposit', 'deposit_detected', 'deposit_confirmed', 'executing_swap',
        'completed', 'refunding', 'refunded', 'failed', 'expired')),
    status_at        INTEGER NOT NULL,
    version          INTEGER NOT NULL,
    deadline_at      INTEGER,
    on_deadline      TEXT,
    refund_address   TEXT,
    action_required  TEXT,
    error_message    TEXT,
    completed_at     INTEGER,
    -- the status answer, written with the change that it tells of; view_key names the version of
    -- the service that wrote it, any other one ignores it
    view             BLOB    NOT NULL,
    view_valid_until INTEGER,
    view_key         TEXT    NOT NULL,
    -- an order that is not over has a deadline, and one that is over has none
    CHECK ((deadline_at IS NULL) = (status IN ('completed', 'refunded', 'failed', 'expired')))
) STRICT;

CREATE UNIQUE INDEX orders_by_deposit_address ON orders (deposit_address);
CREATE INDEX orders_by_deadline ON orders (deadline_at) WHERE deadline_at IS NOT NULL;

CREATE TABLE deposits (
    network       TEXT    NOT NULL,
    txid          TEXT    NOT NULL,
    output_index  INTEGER NOT NULL,
    order_id      TEXT    NOT NULL REFERENCES orders (order_id) DEFERRABLE INITIALLY DEFERRED,
    units         INTEGER NOT NULL CHECK (units > 0),
    sender        TEXT,
    first_seen_at INTEGER NOT NULL,
    state         TEXT    NOT NULL CHECK (state IN ('seen', 'confirmed', 'removed')),
    transfer_id   TEXT,
    is_dust       INTEGER NOT NULL CHECK (is_dust IN (0, 1)),
    -- credited once, whichever order it is for
    PRIMARY KEY (network, txid, output_index)
) STRICT;

CREATE INDEX deposits_by_order ON deposits (order_id);

CREATE TABLE transfers (
    transfer_id TEXT    NOT NULL PRIMARY KEY,
    order_id    TEXT    NOT NULL REFERENCES orders (order_id) DEFERRABLE INITIALLY DEFERRED,
    kind        TEXT    NOT NULL CHECK (kind IN ('payout', 'refund')),
    network     TEXT    NOT NULL,
    asset       TEXT    NOT NULL CHECK (asset IN ('XMR', 'USDC')),
    address     TEXT    NOT NULL,
    units       INTEGER NOT NULL CHECK (units > 0),
    fee         INTEGER NOT NULL CHECK (fee >= 0),
    state       TEXT    NOT NULL CHECK (state IN (
        'planned', 'prepared', 'published', 'unknown', 'settled', 'failed', 'cancelled')),
    txid        TEXT,
    raw         TEXT,
    reason      TEXT,
    CHECK ((txid IS NULL) = (raw IS NULL))
) STRICT;

CREATE INDEX transfers_by_order ON transfers (order_id);
CREATE UNIQUE INDEX transfers_by_txid ON transfers (network, txid) WHERE txid IS NOT NULL;
-- the last line of defence against paying twice: one payout per order that is, or may be, paid
CREATE UNIQUE INDEX one_payout_per_order ON transfers (order_id)
    WHERE kind = 'payout' AND state NOT IN ('failed', 'cancelled');

-- Append-only. The primary key is also the guard against two writers: a version happens once.
-- By the order's number instead of its random id, so that new rows go to the end of the tree.
CREATE TABLE event_log (
    order_seq INTEGER NOT NULL REFERENCES orders (seq) DEFERRABLE INITIALLY DEFERRED,
    version   INTEGER NOT NULL,
    at        INTEGER NOT NULL,
    event     TEXT    NOT NULL,
    status    TEXT    NOT NULL,
    details   TEXT    NOT NULL,
    PRIMARY KEY (order_seq, version)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER events_are_never_changed BEFORE UPDATE ON event_log
BEGIN SELECT RAISE(ABORT, 'event_log is append-only'); END;

CREATE TRIGGER events_are_never_deleted BEFORE DELETE ON event_log
BEGIN SELECT RAISE(ABORT, 'event_log is append-only'); END;

CREATE VIEW order_events AS
SELECT o.order_id, e.version, e.at, e.event, e.status, e.details
FROM event_log e JOIN orders o ON o.seq = e.order_seq;

-- What was recorded of a movement of money never changes afterwards, only how far it has come.
CREATE TRIGGER deposits_keep_what_they_are BEFORE UPDATE ON deposits
WHEN OLD.order_id IS NOT NEW.order_id OR OLD.units IS NOT NEW.units
BEGIN SELECT RAISE(ABORT, 'a deposit keeps its order and its amount'); END;

CREATE TRIGGER transfers_keep_what_they_are BEFORE UPDATE ON transfers
WHEN OLD.order_id IS NOT NEW.order_id OR OLD.kind IS NOT NEW.kind
    OR OLD.address IS NOT NEW.address OR OLD.units IS NOT NEW.units OR OLD.fee IS NOT NEW.fee
BEGIN SELECT RAISE(ABORT, 'a transfer keeps its order, recipient and amount'); END;

CREATE TRIGGER transfers_keep_their_bytes BEFORE UPDATE ON transfers
WHEN OLD.raw IS NOT NULL AND (OLD.raw IS NOT NEW.raw OR OLD.txid IS NOT NEW.txid)
BEGIN SELECT RAISE(ABORT, 'a signed transfer keeps its bytes'); END;

CREATE TABLE effects (
    order_id    TEXT NOT NULL REFERENCES orders (order_id) DEFERRABLE INITIALLY DEFERRED,
    kind        TEXT NOT NULL,
    transfer_id TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (order_id, kind, transfer_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE idempotency_keys (
    seq             INTEGER PRIMARY KEY,
    namespace       TEXT    NOT NULL,
    idempotency_key TEXT    NOT NULL,
    operation       TEXT    NOT NULL,
    params          TEXT    NOT NULL,
    body            BLOB    NOT NULL,
    created_at      INTEGER NOT NULL,
    UNIQUE (namespace, idempotency_key)
) STRICT;

CREATE TABLE tickets (
    ticket_id      TEXT    NOT NULL PRIMARY KEY,
    created_at     INTEGER NOT NULL,
    category       TEXT    NOT NULL,
    message        TEXT    NOT NULL,
    order_id       TEXT,
    session_id     TEXT,
    wallet_address TEXT
) STRICT;
