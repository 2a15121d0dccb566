-- The XMR side of the engine that settles from the operator's own wallet.

-- What was true when the service first met its wallet: network, primary address; and how far down
-- the list of addresses orders may have gone.
CREATE TABLE monero_wallet (
    id              INTEGER PRIMARY KEY CHECK (id = 1),
    nettype         TEXT    NOT NULL,
    primary_address TEXT    NOT NULL,
    reserved_to     INTEGER NOT NULL CHECK (reserved_to >= 0)
) STRICT;

CREATE TRIGGER monero_wallet_stays_the_same BEFORE UPDATE ON monero_wallet
WHEN OLD.nettype IS NOT NEW.nettype OR OLD.primary_address IS NOT NEW.primary_address
BEGIN SELECT RAISE(ABORT, 'the service keeps its wallet'); END;

-- Subaddresses made ahead. The wallet has stored them before they come here.
CREATE TABLE monero_addresses (
    minor   INTEGER PRIMARY KEY CHECK (minor > 0),
    address TEXT    NOT NULL UNIQUE
) STRICT;

CREATE TRIGGER monero_addresses_never_change BEFORE UPDATE ON monero_addresses
WHEN OLD.minor IS NOT NEW.minor OR OLD.address IS NOT NEW.address
BEGIN SELECT RAISE(ABORT, 'an index keeps its address: this is another wallet'); END;

-- Blocks up to which every deposit is committed, newest last; older ones find a fork.
CREATE TABLE monero_cursor (
    height INTEGER PRIMARY KEY CHECK (height >= 0),
    hash   TEXT    NOT NULL
) STRICT;

-- One row for what one transaction paid to one subaddress: the wallet sums its outputs.
CREATE TABLE monero_deposits (
    txid          TEXT    NOT NULL,
    minor         INTEGER NOT NULL REFERENCES monero_addresses (minor),
    units         INTEGER NOT NULL CHECK (units > 0),
    unlock_time   INTEGER NOT NULL CHECK (unlock_time >= 0),
    first_seen_at INTEGER NOT NULL,
    height        INTEGER CHECK (height >= 0),
    -- the state that the order layer has committed last; NULL: none yet
    acknowledged  TEXT    CHECK (acknowledged IN ('seen', 'confirmed', 'removed')),
    -- 1 while the chain may still change what it says of it
    watched       INTEGER NOT NULL CHECK (watched IN (0, 1)),
    PRIMARY KEY (txid, minor)
) STRICT, WITHOUT ROWID;

CREATE INDEX monero_deposits_watched ON monero_deposits (watched) WHERE watched = 1;
CREATE INDEX monero_deposits_by_height ON monero_deposits (height);

-- Payments from before their publication to their end. relayed_at is written before the wallet is
-- told to relay, which it is at most once.
CREATE TABLE monero_payments (
    seq             INTEGER PRIMARY KEY,
    transfer_id     TEXT    NOT NULL UNIQUE,
    purpose         TEXT    NOT NULL CHECK (purpose IN ('transfer', 'upkeep')),
    address         TEXT    NOT NULL,
    units           INTEGER NOT NULL CHECK (units > 0),
    fee             INTEGER NOT NULL CHECK (fee >= 0),
    txid            TEXT    NOT NULL UNIQUE,
    raw             TEXT    NOT NULL,
    metadata        TEXT    NOT NULL,
    tx_key          TEXT    NOT NULL,
    prepared_at     INTEGER NOT NULL,
    state           TEXT    NOT NULL CHECK (state IN (
        'prepared', 'relaying', 'published', 'settled', 'failed', 'withdrawn')),
    relayed_at      INTEGER,
    height          INTEGER CHECK (height >= 0),
    -- a block by which another transaction had spent an input of this one
    conflict_height INTEGER CHECK (conflict_height >= 0),
    conflict_hash   TEXT,
    proof           TEXT,
    -- constant: what the index below is unique over
    wallet          INTEGER NOT NULL DEFAULT 1 CHECK (wallet = 1),
    CHECK (state <> 'relaying' OR relayed_at IS NOT NULL),
    CHECK (state NOT IN ('prepared', 'withdrawn') OR relayed_at IS NULL),
    CHECK ((conflict_height IS NULL) = (conflict_hash IS NULL))
) STRICT;

-- A prepared payment reserves nothing in the wallet: the next one would spend the same outputs.
CREATE UNIQUE INDEX monero_one_unpublished ON monero_payments (wallet)
    WHERE state IN ('prepared', 'relaying');
CREATE INDEX monero_payments_by_state ON monero_payments (state, purpose, height);

CREATE TRIGGER monero_payments_keep_what_they_are BEFORE UPDATE ON monero_payments
WHEN OLD.transfer_id IS NOT NEW.transfer_id OR OLD.address IS NOT NEW.address
    OR OLD.units IS NOT NEW.units OR OLD.fee IS NOT NEW.fee OR OLD.txid IS NOT NEW.txid
    OR OLD.raw IS NOT NEW.raw OR OLD.tx_key IS NOT NEW.tx_key
    OR (OLD.relayed_at IS NOT NULL AND OLD.relayed_at IS NOT NEW.relayed_at)
    OR (OLD.state IN ('failed', 'withdrawn') AND OLD.state IS NOT NEW.state)
BEGIN SELECT RAISE(ABORT, 'a prepared payment keeps what it is'); END;

CREATE TRIGGER monero_payments_are_never_deleted BEFORE DELETE ON monero_payments
BEGIN SELECT RAISE(ABORT, 'a prepared payment stays'); END;

CREATE TABLE monero_key_images (
    transfer_id TEXT    NOT NULL REFERENCES monero_payments (transfer_id)
        DEFERRABLE INITIALLY DEFERRED,
    key_image   TEXT    NOT NULL,
    -- 0 once the payment can never be made
    live        INTEGER NOT NULL CHECK (live IN (0, 1)),
    PRIMARY KEY (transfer_id, key_image)
) STRICT, WITHOUT ROWID;

CREATE UNIQUE INDEX monero_key_images_live ON monero_key_images (key_image) WHERE live = 1;
