-- Who asked for an order that awaits its deposit: the kind of client, and a keyed hash of its name. A
-- row is deleted when its order is funded or ends.

CREATE TABLE order_clients (
    order_id TEXT PRIMARY KEY REFERENCES orders (order_id) DEFERRABLE INITIALLY DEFERRED,
    client   TEXT NOT NULL
) STRICT, WITHOUT ROWID;
