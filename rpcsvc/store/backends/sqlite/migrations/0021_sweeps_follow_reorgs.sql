-- A deep reorganisation can make a settled sweep fail: it is mined anew while its deposit is away.
-- Then its payment is failed and the sweep took nothing, so that the deposit is swept again. A
-- settled payment of an order stays settled.
DROP TRIGGER evm_payments_keep_what_they_are;

CREATE TRIGGER evm_payments_keep_what_they_are BEFORE UPDATE ON evm_payments
WHEN OLD.payment_id IS NOT NEW.payment_id OR OLD.network IS NOT NEW.network
    OR OLD.sender IS NOT NEW.sender OR OLD.nonce IS NOT NEW.nonce
    OR OLD.purpose IS NOT NEW.purpose OR OLD.recipient IS NOT NEW.recipient
    OR OLD.units IS NOT NEW.units OR OLD.contract IS NOT NEW.contract
    OR OLD.data IS NOT NEW.data OR OLD.gas IS NOT NEW.gas
    OR OLD.prepared_at IS NOT NEW.prepared_at
    OR (OLD.published_at IS NOT NULL AND OLD.published_at IS NOT NEW.published_at)
    OR (OLD.state IN ('failed', 'withdrawn') AND OLD.state IS NOT NEW.state)
    OR (OLD.state = 'settled' AND NEW.state <> 'settled'
        AND NOT (OLD.purpose <> 'transfer' AND NEW.state = 'failed'))
    OR (NEW.state = 'withdrawn' AND OLD.state NOT IN ('prepared', 'withdrawn'))
    OR (NEW.state = 'prepared' AND OLD.state <> 'prepared')
BEGIN SELECT RAISE(ABORT, 'a prepared payment keeps what it is'); END;

DROP TRIGGER evm_sweeps_keep_what_they_are;

-- A sweep that took something is void once its payment has failed after all. A void one is done
-- once its authorization is used: then its payment was mined after all.
CREATE TRIGGER evm_sweeps_keep_what_they_are BEFORE UPDATE ON evm_sweeps
WHEN OLD.network IS NOT NEW.network OR OLD.address_index IS NOT NEW.address_index
    OR OLD.serial IS NOT NEW.serial OR OLD.address IS NOT NEW.address
    OR OLD.method IS NOT NEW.method OR OLD.units IS NOT NEW.units
    OR OLD.authorization IS NOT NEW.authorization OR OLD.payment_id IS NOT NEW.payment_id
    OR NOT (OLD.state = 'signed'
        OR (OLD.state = 'void' AND NEW.state = 'done' AND OLD.authorization IS NOT NULL)
        OR (OLD.state = 'done' AND NEW.state = 'void' AND EXISTS (
            SELECT 1 FROM evm_payments p
            WHERE p.payment_id = OLD.payment_id AND p.state = 'failed')))
BEGIN SELECT RAISE(ABORT, 'a sweep keeps what it is, and how it ended'); END;

CREATE TRIGGER evm_sweeps_follow_their_payment AFTER UPDATE OF state ON evm_payments
WHEN OLD.state = 'settled' AND NEW.state = 'failed'
BEGIN
    UPDATE evm_sweeps SET state = 'void', taken = 0
        WHERE payment_id = NEW.payment_id AND state = 'done';
END;
