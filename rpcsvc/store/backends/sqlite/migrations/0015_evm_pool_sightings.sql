-- Payments to addresses of orders that an EVM node was about to mine, and when they were first seen:
-- for expires_at that counts, and not the time of their block. No deposit follows from a row here,
-- since what is not mined can be replaced or cancelled by its sender.
CREATE TABLE evm_pool_sightings (
    network       TEXT    NOT NULL,
    txid          TEXT    NOT NULL,
    address_index INTEGER NOT NULL REFERENCES evm_addresses (address_index),
    -- by the service's own clock
    first_seen_at INTEGER NOT NULL,
    PRIMARY KEY (network, txid)
) STRICT, WITHOUT ROWID;

CREATE INDEX evm_pool_sightings_by_address ON evm_pool_sightings (network, address_index);

CREATE TRIGGER evm_pool_sightings_never_change BEFORE UPDATE ON evm_pool_sightings
BEGIN SELECT RAISE(ABORT, 'the first sight stays the first'); END;

-- Whether any order waits for a deposit on a network, and until when.
CREATE INDEX orders_awaiting ON orders (deposit_network, expires_at)
    WHERE status IN ('awaiting_deposit', 'deposit_detected');
