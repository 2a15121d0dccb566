-- Orders that each client made on a day (UTC, counted from the epoch). ``client`` is a kind and a keyed
-- hash. A day's orders delete the days before.
CREATE TABLE order_counts (
    day    INTEGER NOT NULL,
    client TEXT    NOT NULL,
    orders INTEGER NOT NULL CHECK (orders > 0),
    PRIMARY KEY (day, client)
) STRICT, WITHOUT ROWID;
