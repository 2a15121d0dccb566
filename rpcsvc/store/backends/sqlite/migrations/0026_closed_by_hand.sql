-- Transfers that the operator says were paid by a transaction which proves nothing of it: his word,
-- and its signature by the service's key.
CREATE TABLE closed_by_hand (
    transfer_id TEXT    PRIMARY KEY,
    txid        TEXT    NOT NULL,
    note        TEXT    NOT NULL,
    at          INTEGER NOT NULL,
    kid         TEXT    NOT NULL,
    signature   TEXT    NOT NULL
) STRICT;
