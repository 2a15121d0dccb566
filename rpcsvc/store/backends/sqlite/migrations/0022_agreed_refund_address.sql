-- The refund address that an order was made with. Refunds go there and nowhere else.

ALTER TABLE orders ADD COLUMN agreed_refund_address TEXT;

CREATE TRIGGER orders_keep_their_refund_address BEFORE UPDATE OF agreed_refund_address ON orders
BEGIN SELECT RAISE(ABORT, 'an order keeps its terms'); END;

-- The holder of the session can't name another one beside it.
CREATE TRIGGER an_agreed_refund_address_is_the_only_one BEFORE UPDATE OF refund_address ON orders
WHEN NEW.refund_address IS NOT NULL AND OLD.agreed_refund_address IS NOT NULL
BEGIN SELECT RAISE(ABORT, 'an agreed refund address is the only one'); END;
