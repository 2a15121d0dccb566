-- The deposit half of the USDC side of the engine that settles from the operator's own wallet.

-- The mnemonic that the service started with, by the address of its hot wallet; and how far down
-- the list of addresses orders may have gone, on whatever network.
CREATE TABLE evm_wallet (
    id          INTEGER PRIMARY KEY CHECK (id = 1),
    hot_address TEXT    NOT NULL,
    reserved_to INTEGER NOT NULL CHECK (reserved_to >= 0)
) STRICT;

CREATE TRIGGER evm_wallet_stays_the_same BEFORE UPDATE ON evm_wallet
WHEN OLD.hot_address IS NOT NEW.hot_address
BEGIN SELECT RAISE(ABORT, 'the service keeps its mnemonic'); END;

CREATE TRIGGER evm_wallet_is_never_deleted BEFORE DELETE ON evm_wallet
BEGIN SELECT RAISE(ABORT, 'the service keeps its mnemonic'); END;

-- Addresses made ahead, by their index in BIP-44. Index 0 is the hot wallet's and not among them.
-- Hex digits are the same address in any case.
CREATE TABLE evm_addresses (
    address_index INTEGER PRIMARY KEY CHECK (address_index > 0),
    address       TEXT    NOT NULL COLLATE NOCASE UNIQUE
) STRICT;

CREATE TRIGGER evm_addresses_never_change BEFORE UPDATE ON evm_addresses
WHEN OLD.address_index IS NOT NEW.address_index OR OLD.address IS NOT NEW.address
BEGIN SELECT RAISE(ABORT, 'an index keeps its address: this is another mnemonic'); END;

CREATE TRIGGER evm_addresses_are_never_deleted BEFORE DELETE ON evm_addresses
BEGIN SELECT RAISE(ABORT, 'money may arrive at an address at any time'); END;

-- Blocks up to which every deposit is committed, newest last; older ones find a fork.
CREATE TABLE evm_cursor (
    network TEXT    NOT NULL,
    number  INTEGER NOT NULL CHECK (number >= 0),
    hash    TEXT    NOT NULL,
    PRIMARY KEY (network, number)
) STRICT, WITHOUT ROWID;

-- One row for one Transfer event of the token to one of our addresses.
CREATE TABLE evm_deposits (
    network       TEXT    NOT NULL,
    txid          TEXT    NOT NULL,
    -- of the event among all events of its transaction, from 0
    position      INTEGER NOT NULL CHECK (position >= 0),
    address_index INTEGER NOT NULL REFERENCES evm_addresses (address_index),
    units         INTEGER NOT NULL CHECK (units > 0),
    -- as the event has it: the zero address when the tokens were minted
    sender        TEXT    NOT NULL,
    first_seen_at INTEGER NOT NULL,
    -- where it is; NULL while it is on the chain no more
    block_number  INTEGER CHECK (block_number >= 0),
    block_hash    TEXT,
    -- the state that the order layer has committed; NULL: not known, since another was shown to it
    acknowledged  TEXT    CHECK (acknowledged IN ('seen', 'confirmed', 'removed')),
    -- 1 while its state may differ from the acknowledged one, or its block is young
    watched       INTEGER NOT NULL CHECK (watched IN (0, 1)),
    PRIMARY KEY (network, txid, position),
    CHECK ((block_number IS NULL) = (block_hash IS NULL))
) STRICT, WITHOUT ROWID;

CREATE INDEX evm_deposits_watched ON evm_deposits (network) WHERE watched = 1;
CREATE INDEX evm_deposits_by_block ON evm_deposits (network, block_number);
CREATE INDEX evm_deposits_by_address ON evm_deposits (address_index);

CREATE TRIGGER evm_deposits_keep_what_they_are BEFORE UPDATE ON evm_deposits
WHEN OLD.network IS NOT NEW.network OR OLD.txid IS NOT NEW.txid
    OR OLD.position IS NOT NEW.position OR OLD.address_index IS NOT NEW.address_index
    OR OLD.units IS NOT NEW.units OR OLD.sender IS NOT NEW.sender
    OR OLD.first_seen_at IS NOT NEW.first_seen_at
BEGIN SELECT RAISE(ABORT, 'a deposit keeps what it is'); END;

CREATE TRIGGER evm_deposits_are_never_deleted BEFORE DELETE ON evm_deposits
BEGIN SELECT RAISE(ABORT, 'a deposit stays'); END;
