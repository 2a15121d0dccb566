-- Deposit addresses are found by how they begin and end. An upstream that takes XMR with one wallet and
-- tells its orders apart by payment ids gives addresses of which the first ninety characters are the
-- same: by its beginning the second of them looked like one that was given before. Both ends of an
-- address, nine characters each, hold no fewer random bits than the eighteen it begins with did.

DROP INDEX orders_by_address_start;
CREATE UNIQUE INDEX orders_by_address_ends ON orders
    (substr(deposit_address, 1, 9) || substr(deposit_address, -9));
