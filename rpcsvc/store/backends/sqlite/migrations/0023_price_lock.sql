-- The price lock of an order, and the rate of each deposit, both in USDC units per XMR.

-- NULL: locked until expires_at, as all orders before this were.
ALTER TABLE orders ADD COLUMN price_locked_until INTEGER;
ALTER TABLE orders ADD COLUMN lock_broken_at INTEGER;

-- NULL: priced when the order is decided.
ALTER TABLE deposits ADD COLUMN rate INTEGER CHECK (rate > 0);

-- Orders with a late deposit were, and still are, priced as a whole when they are decided.
UPDATE deposits SET rate = (SELECT o.rate FROM orders o WHERE o.order_id = deposits.order_id)
WHERE NOT EXISTS (
    SELECT 1 FROM deposits late JOIN orders o ON o.order_id = late.order_id
    WHERE late.order_id = deposits.order_id AND late.first_seen_at > o.expires_at
);

CREATE TRIGGER deposits_keep_their_rate BEFORE UPDATE ON deposits
WHEN OLD.rate IS NOT NEW.rate
BEGIN SELECT RAISE(ABORT, 'a deposit keeps its rate'); END;

CREATE TRIGGER orders_keep_their_price_lock BEFORE UPDATE OF price_locked_until ON orders
BEGIN SELECT RAISE(ABORT, 'an order keeps its terms'); END;

-- Finds the orders whose locked rate is beyond what the current one allows.
CREATE INDEX orders_by_locked_rate ON orders (direction, rate, price_locked_until)
    WHERE price_locked_until IS NOT NULL AND lock_broken_at IS NULL
    AND status IN ('awaiting_deposit', 'deposit_detected');
