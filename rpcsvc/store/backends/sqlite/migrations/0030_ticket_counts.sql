-- Tickets and bytes that each client was charged on a day (UTC, counted from the epoch). ``client`` is
-- a kind and a keyed hash. A day's first ticket deletes the days before.
CREATE TABLE ticket_counts (
    day     INTEGER NOT NULL,
    client  TEXT    NOT NULL,
    tickets INTEGER NOT NULL,
    bytes   INTEGER NOT NULL,
    PRIMARY KEY (day, client)
) STRICT, WITHOUT ROWID;
