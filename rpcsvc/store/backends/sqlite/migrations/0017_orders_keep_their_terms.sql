-- Orders, deposits and transfers are guarded as the payments of the wallets are: what was agreed,
-- what came and what is sent never change, and none of them is deleted.

-- No statement of the service names one of these columns, so the trigger costs an update nothing.
CREATE TRIGGER orders_keep_their_terms BEFORE UPDATE OF
    seq, order_id, session_id, direction, chain, chain_id, deposit_network, payout_network,
    deposit_address, to_address, deposit_amount, expected_output, min_received, min_deposit,
    max_deposit, rate, spread_bps, payout_fee, min_received_bps, refund_fee, created_at,
    expires_at, late_window, confirm_timeout, prepare_timeout, payout_check, refund_reminder,
    integrator, integrator_bps, twap_chunk_usd, twap_interval_ms, upstream_id
ON orders
BEGIN SELECT RAISE(ABORT, 'an order keeps its terms'); END;

CREATE TRIGGER orders_are_never_deleted BEFORE DELETE ON orders
BEGIN SELECT RAISE(ABORT, 'an order stays'); END;

-- One that comes back after a reorganisation keeps its sender, and when it was first seen.
DROP TRIGGER deposits_keep_what_they_are;
CREATE TRIGGER deposits_keep_what_they_are BEFORE UPDATE ON deposits
WHEN OLD.network IS NOT NEW.network OR OLD.txid IS NOT NEW.txid
    OR OLD.output_index IS NOT NEW.output_index OR OLD.order_id IS NOT NEW.order_id
    OR OLD.units IS NOT NEW.units OR OLD.sender IS NOT NEW.sender
    OR OLD.first_seen_at IS NOT NEW.first_seen_at
BEGIN SELECT RAISE(ABORT, 'a deposit keeps what it is'); END;

CREATE TRIGGER deposits_are_never_deleted BEFORE DELETE ON deposits
BEGIN SELECT RAISE(ABORT, 'a deposit stays'); END;

DROP TRIGGER transfers_keep_what_they_are;
CREATE TRIGGER transfers_keep_what_they_are BEFORE UPDATE ON transfers
WHEN OLD.transfer_id IS NOT NEW.transfer_id OR OLD.order_id IS NOT NEW.order_id
    OR OLD.kind IS NOT NEW.kind OR OLD.network IS NOT NEW.network OR OLD.asset IS NOT NEW.asset
    OR OLD.address IS NOT NEW.address OR OLD.units IS NOT NEW.units OR OLD.fee IS NOT NEW.fee
    OR OLD.integrator_fee IS NOT NEW.integrator_fee
BEGIN SELECT RAISE(ABORT, 'a transfer keeps its order, recipient and amount'); END;

CREATE TRIGGER transfers_are_never_deleted BEFORE DELETE ON transfers
BEGIN SELECT RAISE(ABORT, 'a transfer stays'); END;
