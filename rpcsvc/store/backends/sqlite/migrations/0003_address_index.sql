-- Deposit addresses are found by how they begin. Whole ones (42 or 95 characters, in no order) made
-- an index so wide that nearly every order dirtied a page of its own in it, which a checkpoint then
-- had to write; their beginnings need a third of that. Eighteen characters hold 64 random bits of
-- an EVM address and more of a Monero one, so unique beginnings cost no one an order, and an
-- address that is given to two orders is still refused.

DROP INDEX orders_by_deposit_address;
CREATE UNIQUE INDEX orders_by_address_start ON orders (substr(deposit_address, 1, 18));
