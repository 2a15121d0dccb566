-- Several transfers in one Monero transaction: one row per recipient of such a payment. A payment
-- of a single transfer has that transfer's id in monero_payments, and no row here.
CREATE TABLE monero_payees (
    payment_id  TEXT    NOT NULL REFERENCES monero_payments (transfer_id)
        DEFERRABLE INITIALLY DEFERRED,
    transfer_id TEXT    NOT NULL,
    address     TEXT    NOT NULL,
    units       INTEGER NOT NULL CHECK (units > 0),
    proof       TEXT,
    -- 0 once the payment was withdrawn, unpublished: the transfer may be signed anew
    live        INTEGER NOT NULL CHECK (live IN (0, 1)),
    PRIMARY KEY (payment_id, transfer_id),
    -- what a transaction paid to an address must tell whose payout it was
    UNIQUE (payment_id, address)
) STRICT, WITHOUT ROWID;

CREATE UNIQUE INDEX monero_payees_live ON monero_payees (transfer_id) WHERE live = 1;

CREATE TRIGGER monero_payees_keep_what_they_are BEFORE UPDATE ON monero_payees
WHEN OLD.address IS NOT NEW.address OR OLD.units IS NOT NEW.units
    OR (OLD.live = 0 AND NEW.live = 1)
BEGIN SELECT RAISE(ABORT, 'a payee keeps its address and its amount'); END;

CREATE TRIGGER monero_payees_are_never_deleted BEFORE DELETE ON monero_payees
BEGIN SELECT RAISE(ABORT, 'a payee stays'); END;

-- A transfer is signed for alone or together with others, never both.
CREATE TRIGGER monero_payees_are_not_paid_alone BEFORE INSERT ON monero_payees
WHEN EXISTS (SELECT 1 FROM monero_payments WHERE transfer_id = NEW.transfer_id)
BEGIN SELECT RAISE(ABORT, 'the transfer has a payment of its own'); END;

CREATE TRIGGER monero_payments_are_not_in_a_batch BEFORE INSERT ON monero_payments
WHEN EXISTS (SELECT 1 FROM monero_payees WHERE transfer_id = NEW.transfer_id AND live = 1)
BEGIN SELECT RAISE(ABORT, 'the transfer is part of another payment'); END;

-- Transfers may share a transaction now; none pays an address twice in it.
DROP INDEX transfers_by_txid;
CREATE UNIQUE INDEX transfers_by_txid ON transfers (network, txid, address)
    WHERE txid IS NOT NULL;

CREATE INDEX transfers_planned ON transfers (network) WHERE state = 'planned';
