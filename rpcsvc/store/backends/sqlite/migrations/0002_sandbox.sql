-- The sandbox engine's simulated chains. Blocks come with the clock: the height of a chain at a
-- time follows from its base, and only blocks that hold a transaction are written down.

CREATE TABLE sandbox_chains (
    network        TEXT    NOT NULL PRIMARY KEY,
    base_height    INTEGER NOT NULL,
    base_at        INTEGER NOT NULL,
    block_ms       INTEGER NOT NULL CHECK (block_ms > 0),
    paused         INTEGER NOT NULL CHECK (paused IN (0, 1)),
    -- what the service's wallet started with, and what it holds now
    inventory      INTEGER NOT NULL CHECK (inventory >= 0),
    balance        INTEGER NOT NULL
) STRICT;

CREATE TABLE sandbox_blocks (
    network  TEXT    NOT NULL,
    height   INTEGER NOT NULL,
    hash     TEXT    NOT NULL PRIMARY KEY,
    mined_at INTEGER NOT NULL,
    orphaned INTEGER NOT NULL CHECK (orphaned IN (0, 1))
) STRICT;

CREATE UNIQUE INDEX sandbox_blocks_by_height ON sandbox_blocks (network, height)
    WHERE orphaned = 0;

CREATE TABLE sandbox_transactions (
    seq          INTEGER PRIMARY KEY,
    network      TEXT    NOT NULL,
    txid         TEXT    NOT NULL,
    kind         TEXT    NOT NULL CHECK (kind IN ('deposit', 'transfer')),
    recipient    TEXT    NOT NULL,
    sender       TEXT,
    units        INTEGER NOT NULL CHECK (units > 0),
    fee          INTEGER NOT NULL CHECK (fee >= 0),
    broadcast_at INTEGER NOT NULL,
    block_height INTEGER,
    state        TEXT    NOT NULL CHECK (state IN ('mempool', 'mined', 'dropped', 'reverted')),
    -- 1 while the service has not yet committed what the chain last said of it
    watched      INTEGER NOT NULL CHECK (watched IN (0, 1)),
    UNIQUE (network, txid)
) STRICT;

CREATE INDEX sandbox_transactions_watched ON sandbox_transactions (seq) WHERE watched = 1;
CREATE INDEX sandbox_transactions_by_recipient ON sandbox_transactions (network, recipient);

CREATE TABLE sandbox_faults (
    order_id TEXT NOT NULL,
    fault    TEXT NOT NULL,
    PRIMARY KEY (order_id, fault)
) STRICT, WITHOUT ROWID;

CREATE TABLE sandbox_settings (
    name  TEXT    NOT NULL PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
