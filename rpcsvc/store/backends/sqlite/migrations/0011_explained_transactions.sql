-- Transactions that the operator made by hand, and says so: the auditor takes them as explained.
-- What they moved is not stored: it is read from the chain.
CREATE TABLE explained_transactions (
    network TEXT    NOT NULL,
    txid    TEXT    NOT NULL,
    note    TEXT    NOT NULL CHECK (note <> ''),
    at      INTEGER NOT NULL,
    PRIMARY KEY (network, txid)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER explained_transactions_never_change BEFORE UPDATE ON explained_transactions
BEGIN SELECT RAISE(ABORT, 'an explanation is taken back, not changed'); END;
