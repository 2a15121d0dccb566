-- A chunk may be worth a fraction of a dollar more than twap_chunk_usd: millionths of one.

ALTER TABLE orders ADD COLUMN twap_chunk_micros INTEGER NOT NULL DEFAULT 0
    CHECK (twap_chunk_micros BETWEEN 0 AND 999999);

CREATE TRIGGER orders_keep_their_chunk BEFORE UPDATE OF twap_chunk_micros ON orders
BEGIN SELECT RAISE(ABORT, 'an order keeps its terms'); END;
