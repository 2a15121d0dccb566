-- What left the service's wallets without being on record, and how much of it the operator was told
-- of: payouts were paused for it. What he was told of once does not pause them again.

-- Nonces of the hot wallet below "told" need no record. At first, what it had sent before the
-- service knew the network.
CREATE TABLE evm_nonces (
    network TEXT    NOT NULL,
    sender  TEXT    NOT NULL,
    told    INTEGER NOT NULL CHECK (told >= 0),
    PRIMARY KEY (network, sender)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER evm_nonces_never_fall BEFORE UPDATE ON evm_nonces
WHEN OLD.network IS NOT NEW.network OR OLD.sender IS NOT NEW.sender OR NEW.told < OLD.told
BEGIN SELECT RAISE(ABORT, 'what the operator was told of stays told'); END;

INSERT INTO evm_nonces (network, sender, told)
    SELECT network, sender, MAX(nonce) + 1 FROM evm_payments GROUP BY network, sender;

CREATE TABLE told_transactions (
    network TEXT    NOT NULL,
    txid    TEXT    NOT NULL,
    at      INTEGER NOT NULL,
    PRIMARY KEY (network, txid)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER told_transactions_never_change BEFORE UPDATE ON told_transactions
BEGIN SELECT RAISE(ABORT, 'what the operator was told of stays told'); END;

-- Confirmed deposits that are of no order: one address serves an order on all networks, and only
-- what comes on the order's own is its deposit. An order is there before its address is told.
CREATE TABLE stray_deposits (
    network  TEXT    NOT NULL,
    txid     TEXT    NOT NULL,
    -- as in evm_deposits; for Monero the subaddress
    position INTEGER NOT NULL,
    address  TEXT    NOT NULL,
    units    INTEGER NOT NULL,
    PRIMARY KEY (network, txid, position)
) STRICT, WITHOUT ROWID;

INSERT INTO stray_deposits (network, txid, position, address, units)
    SELECT d.network, d.txid, d.position, a.address, d.units
    FROM evm_deposits d JOIN evm_addresses a ON a.address_index = d.address_index
    WHERE d.acknowledged = 'confirmed' AND NOT EXISTS (SELECT 1 FROM orders o
        WHERE substr(o.deposit_address, 1, 18) = substr(a.address, 1, 18)
            AND o.deposit_address = a.address AND o.deposit_network = d.network);

INSERT INTO stray_deposits (network, txid, position, address, units)
    SELECT 'monero', d.txid, d.minor, a.address, d.units
    FROM monero_deposits d JOIN monero_addresses a ON a.minor = d.minor
    WHERE d.acknowledged = 'confirmed' AND NOT EXISTS (SELECT 1 FROM orders o
        WHERE substr(o.deposit_address, 1, 18) = substr(a.address, 1, 18)
            AND o.deposit_address = a.address AND o.deposit_network = 'monero');

CREATE TRIGGER stray_evm_deposits AFTER INSERT ON evm_deposits
WHEN NEW.acknowledged = 'confirmed'
BEGIN
    INSERT OR IGNORE INTO stray_deposits (network, txid, position, address, units)
        SELECT NEW.network, NEW.txid, NEW.position, a.address, NEW.units FROM evm_addresses a
        WHERE a.address_index = NEW.address_index AND NOT EXISTS (SELECT 1 FROM orders o
            WHERE substr(o.deposit_address, 1, 18) = substr(a.address, 1, 18)
                AND o.deposit_address = a.address AND o.deposit_network = NEW.network);
END;

CREATE TRIGGER stray_evm_deposits_again AFTER UPDATE OF acknowledged ON evm_deposits
WHEN NEW.acknowledged IS 'confirmed' AND OLD.acknowledged IS NOT 'confirmed'
BEGIN
    INSERT OR IGNORE INTO stray_deposits (network, txid, position, address, units)
        SELECT NEW.network, NEW.txid, NEW.position, a.address, NEW.units FROM evm_addresses a
        WHERE a.address_index = NEW.address_index AND NOT EXISTS (SELECT 1 FROM orders o
            WHERE substr(o.deposit_address, 1, 18) = substr(a.address, 1, 18)
                AND o.deposit_address = a.address AND o.deposit_network = NEW.network);
END;

CREATE TRIGGER stray_evm_deposits_are_gone AFTER UPDATE OF acknowledged ON evm_deposits
WHEN OLD.acknowledged IS 'confirmed' AND NEW.acknowledged IS NOT 'confirmed'
BEGIN
    DELETE FROM stray_deposits
        WHERE network = NEW.network AND txid = NEW.txid AND position = NEW.position;
END;

CREATE TRIGGER stray_monero_deposits AFTER INSERT ON monero_deposits
WHEN NEW.acknowledged = 'confirmed'
BEGIN
    INSERT OR IGNORE INTO stray_deposits (network, txid, position, address, units)
        SELECT 'monero', NEW.txid, NEW.minor, a.address, NEW.units FROM monero_addresses a
        WHERE a.minor = NEW.minor AND NOT EXISTS (SELECT 1 FROM orders o
            WHERE substr(o.deposit_address, 1, 18) = substr(a.address, 1, 18)
                AND o.deposit_address = a.address AND o.deposit_network = 'monero');
END;

CREATE TRIGGER stray_monero_deposits_again AFTER UPDATE OF acknowledged ON monero_deposits
WHEN NEW.acknowledged IS 'confirmed' AND OLD.acknowledged IS NOT 'confirmed'
BEGIN
    INSERT OR IGNORE INTO stray_deposits (network, txid, position, address, units)
        SELECT 'monero', NEW.txid, NEW.minor, a.address, NEW.units FROM monero_addresses a
        WHERE a.minor = NEW.minor AND NOT EXISTS (SELECT 1 FROM orders o
            WHERE substr(o.deposit_address, 1, 18) = substr(a.address, 1, 18)
                AND o.deposit_address = a.address AND o.deposit_network = 'monero');
END;

CREATE TRIGGER stray_monero_deposits_are_gone AFTER UPDATE OF acknowledged ON monero_deposits
WHEN OLD.acknowledged IS 'confirmed' AND NEW.acknowledged IS NOT 'confirmed'
BEGIN
    DELETE FROM stray_deposits
        WHERE network = 'monero' AND txid = NEW.txid AND position = NEW.minor;
END;
