-- A row while the Monero wallet has to scan the chain anew: from before it is given addresses on
-- which money may have come that it did not look for, until the scan is over and stored.
CREATE TABLE monero_rescan_due (
    id INTEGER PRIMARY KEY CHECK (id = 1)
) STRICT;

-- What an address received in all is compared with the outputs that the wallet has there.
CREATE INDEX monero_deposits_by_minor ON monero_deposits (minor);
