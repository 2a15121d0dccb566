-- A restored copy has from the payment journal that a sweep ended, and its payment as published: what
-- became of that the chain says. When it failed after all, the sweep took nothing, as above.
DROP TRIGGER evm_sweeps_follow_their_payment;

CREATE TRIGGER evm_sweeps_follow_their_payment AFTER UPDATE OF state ON evm_payments
WHEN OLD.state IN ('published', 'settled') AND NEW.state = 'failed'
BEGIN
    UPDATE evm_sweeps SET state = 'void', taken = 0
        WHERE payment_id = NEW.payment_id AND state = 'done';
END;
