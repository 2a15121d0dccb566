-- The payment journal (docs/adr/0012-payment-journal.md): up to which line of which journal
-- everything is in this database.
CREATE TABLE payment_journal (
    id      INTEGER PRIMARY KEY CHECK (id = 1),
    journal TEXT    NOT NULL,
    line    INTEGER NOT NULL CHECK (line >= 0),
    sum     TEXT    NOT NULL
) STRICT;

-- Transactions that an older copy of the database did not have, and that came from the journal.
CREATE TABLE journal_adopted (
    txid       TEXT    PRIMARY KEY,
    adopted_at INTEGER NOT NULL
) STRICT;
