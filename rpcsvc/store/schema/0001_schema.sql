-- The schema of both databases: SQLite takes it as it stands, PostgreSQL with other words for the types
-- (rpcsvc/store/backends/postgresql/schema.py).
--
-- Money is INTEGER atomic units in STRICT tables: text, or a number beyond 2^63, is an error there,
-- where a loose INTEGER column would quietly keep a REAL. Times are milliseconds since the
-- epoch, flags are 0 or 1. ``seq`` numbers rows in the order in which they came.

-- --- Orders -------------------------------------------------------------------------------------

-- One row for each swap: the terms that were agreed, which never change, and how far it is.
CREATE TABLE orders (
    seq                   INTEGER PRIMARY KEY,
    order_id              TEXT    NOT NULL UNIQUE,
    session_id            TEXT    NOT NULL,
    direction             TEXT    NOT NULL CHECK (direction IN ('x2u', 'u2x')),
    chain                 TEXT    NOT NULL,
    chain_id              INTEGER NOT NULL,
    deposit_network       TEXT    NOT NULL,
    payout_network        TEXT    NOT NULL,
    deposit_address       TEXT    NOT NULL,
    to_address            TEXT    NOT NULL,
    deposit_amount        INTEGER NOT NULL CHECK (deposit_amount > 0),
    expected_output       INTEGER NOT NULL CHECK (expected_output > 0),
    min_received          INTEGER NOT NULL CHECK (min_received >= 0),
    min_deposit           INTEGER NOT NULL CHECK (min_deposit > 0),
    max_deposit           INTEGER NOT NULL CHECK (max_deposit >= min_deposit),
    -- USDC units per XMR
    rate                  INTEGER NOT NULL CHECK (rate > 0),
    spread_bps            INTEGER NOT NULL CHECK (spread_bps BETWEEN 0 AND 10000),
    payout_fee            INTEGER NOT NULL CHECK (payout_fee >= 0),
    min_received_bps      INTEGER NOT NULL CHECK (min_received_bps BETWEEN 0 AND 10000),
    refund_fee            INTEGER NOT NULL CHECK (refund_fee >= 0),
    created_at            INTEGER NOT NULL,
    expires_at            INTEGER NOT NULL,
    late_window           INTEGER NOT NULL,
    confirm_timeout       INTEGER NOT NULL,
    prepare_timeout       INTEGER NOT NULL,
    payout_check          INTEGER NOT NULL,
    refund_reminder       INTEGER NOT NULL,
    integrator            TEXT,
    integrator_bps        INTEGER NOT NULL CHECK (integrator_bps BETWEEN 0 AND 10000),
    -- gas of a signed payment (x402) that the quote has in it: in payout units, and in USDC units
    funding_fee           INTEGER NOT NULL CHECK (funding_fee >= 0),
    funding_gas           INTEGER NOT NULL CHECK (funding_gas >= 0),
    -- what a chunk of a TWAP order is worth, in millionths of a dollar; NULL: swapped at once
    twap_chunk_units      INTEGER CHECK (twap_chunk_units > 0),
    twap_interval_ms      INTEGER CHECK (twap_interval_ms > 0),
    upstream_id           TEXT,
    -- the refund address that the order was made with: refunds go there and nowhere else
    agreed_refund_address TEXT,
    -- NULL: the price is locked until expires_at
    price_locked_until    INTEGER,
    -- what the deposit_amount pays exactly; NULL: the order named its deposit, and not this
    receive_amount        INTEGER CHECK (receive_amount > 0),
    -- who made it with a token, by the name in the settings; NULL: without a token
    client                TEXT,
    -- from here on: what changes
    status                TEXT    NOT NULL CHECK (status IN (
        'awaiting_deposit', 'deposit_detected', 'deposit_confirmed', 'executing_swap',
        'completed', 'refunding', 'refunded', 'failed', 'expired')),
    status_at             INTEGER NOT NULL,
    version               INTEGER NOT NULL CHECK (version >= 1),
    deadline_at           INTEGER,
    on_deadline           TEXT,
    refund_address        TEXT,
    action_required       TEXT,
    error_message         TEXT,
    completed_at          INTEGER,
    -- deposit units that were not swapped and are still to be sent back
    leftover              INTEGER NOT NULL CHECK (leftover >= 0),
    lock_broken_at        INTEGER,
    -- when the order ended if nothing was ever paid to it; NULL again once its answers were pruned
    unpaid_since          INTEGER,
    -- the version from which event_log has every event of the order; above 1 once its history was
    -- reduced (store/orders.py)
    history_from          INTEGER NOT NULL DEFAULT 1,
    -- Both ends of the deposit address, where its random characters are: an index over the whole
    -- (42 or 95 characters, in no order) is so wide that nearly every order dirties a page of it.
    deposit_address_ends  TEXT    GENERATED ALWAYS AS (
        substr(deposit_address, 1, 9) || substr(deposit_address, length(deposit_address) - 8)
    ) VIRTUAL,
    -- How a session id begins, 32 random bits, for the same reason.
    session_start         TEXT    GENERATED ALWAYS AS (substr(session_id, 1, 8)) VIRTUAL,
    CHECK (history_from BETWEEN 1 AND version),
    CHECK ((twap_chunk_units IS NULL) = (twap_interval_ms IS NULL)),
    -- an order that is not over has a deadline, and one that is over has none
    CHECK ((deadline_at IS NULL) = (status IN ('completed', 'refunded', 'failed', 'expired')))
) STRICT;

-- An address serves one order.
CREATE UNIQUE INDEX orders_by_address_ends ON orders (deposit_address_ends);
CREATE INDEX orders_by_session_start ON orders (session_start);
CREATE INDEX orders_by_deadline ON orders (deadline_at) WHERE deadline_at IS NOT NULL;
CREATE UNIQUE INDEX orders_by_upstream_id ON orders (upstream_id) WHERE upstream_id IS NOT NULL;
CREATE INDEX orders_open_at_upstream ON orders (upstream_id)
    WHERE upstream_id IS NOT NULL AND deadline_at IS NOT NULL;
CREATE INDEX orders_by_client ON orders (client, seq) WHERE client IS NOT NULL;
CREATE INDEX orders_by_integrator ON orders (integrator) WHERE integrator IS NOT NULL;
-- Whether any order waits for a deposit on a network, and until when.
CREATE INDEX orders_awaiting ON orders (deposit_network, expires_at)
    WHERE status IN ('awaiting_deposit', 'deposit_detected');
-- The orders whose locked rate is beyond what the current one allows.
CREATE INDEX orders_by_locked_rate ON orders (direction, rate, price_locked_until)
    WHERE price_locked_until IS NOT NULL AND lock_broken_at IS NULL
    AND status IN ('awaiting_deposit', 'deposit_detected');
CREATE INDEX orders_unpaid ON orders (unpaid_since) WHERE unpaid_since IS NOT NULL;
-- Orders that are over, and whose history was not reduced since. No new order is among them.
CREATE INDEX orders_with_history ON orders (status_at)
    WHERE deadline_at IS NULL AND action_required IS NULL AND history_from < version;

-- No statement of the service names one of these columns, so the trigger costs an update nothing.
CREATE TRIGGER orders_keep_their_terms BEFORE UPDATE OF
    seq, order_id, session_id, direction, chain, chain_id, deposit_network, payout_network,
    deposit_address, to_address, deposit_amount, expected_output, min_received, min_deposit,
    max_deposit, rate, spread_bps, payout_fee, min_received_bps, refund_fee, created_at,
    expires_at, late_window, confirm_timeout, prepare_timeout, payout_check, refund_reminder,
    integrator, integrator_bps, funding_fee, funding_gas, twap_chunk_units, twap_interval_ms, upstream_id,
    agreed_refund_address, price_locked_until, receive_amount, client
ON orders
BEGIN SELECT RAISE(ABORT, 'an order keeps its terms'); END;

-- The holder of the session can't name another one beside it.
CREATE TRIGGER an_agreed_refund_address_is_the_only_one BEFORE UPDATE OF refund_address ON orders
WHEN NEW.refund_address IS NOT NULL AND OLD.agreed_refund_address IS NOT NULL
BEGIN SELECT RAISE(ABORT, 'an agreed refund address is the only one'); END;

CREATE TRIGGER orders_are_never_deleted BEFORE DELETE ON orders
BEGIN SELECT RAISE(ABORT, 'an order stays'); END;

-- What was paid to the deposit addresses of orders. A deposit is credited once, whichever order it
-- is for; one that is reorganised away is 'removed', and its row stays.
CREATE TABLE deposits (
    seq           INTEGER PRIMARY KEY,
    network       TEXT    NOT NULL,
    txid          TEXT    NOT NULL,
    output_index  INTEGER NOT NULL,
    order_id      TEXT    NOT NULL REFERENCES orders (order_id) DEFERRABLE INITIALLY DEFERRED,
    units         INTEGER NOT NULL CHECK (units > 0),
    sender        TEXT,
    first_seen_at INTEGER NOT NULL,
    state         TEXT    NOT NULL CHECK (state IN ('seen', 'confirmed', 'removed')),
    -- the transfer that it is spent on
    transfer_id   TEXT,
    is_dust       INTEGER NOT NULL CHECK (is_dust IN (0, 1)),
    -- USDC units per XMR; NULL: priced when the order is decided
    rate          INTEGER CHECK (rate > 0),
    UNIQUE (network, txid, output_index)
) STRICT;

CREATE INDEX deposits_by_order ON deposits (order_id);
-- Those that vanished after a payout or refund of them was signed.
CREATE INDEX deposits_lost ON deposits (network)
    WHERE state = 'removed' AND transfer_id IS NOT NULL;

CREATE TRIGGER deposits_keep_what_they_are BEFORE UPDATE ON deposits
WHEN OLD.seq IS NOT NEW.seq OR OLD.network IS NOT NEW.network OR OLD.txid IS NOT NEW.txid
    OR OLD.output_index IS NOT NEW.output_index OR OLD.order_id IS NOT NEW.order_id
    OR OLD.units IS NOT NEW.units OR OLD.sender IS NOT NEW.sender
    OR OLD.first_seen_at IS NOT NEW.first_seen_at OR OLD.rate IS NOT NEW.rate
BEGIN SELECT RAISE(ABORT, 'a deposit keeps what it is'); END;

CREATE TRIGGER deposits_are_never_deleted BEFORE DELETE ON deposits
BEGIN SELECT RAISE(ABORT, 'a deposit stays'); END;

-- Payouts and refunds. raw holds the signed bytes; it is empty where the wallet's own tables have
-- them (monero_payments, evm_attempts), or the operator recorded it as paid.
CREATE TABLE transfers (
    seq            INTEGER PRIMARY KEY,
    transfer_id    TEXT    NOT NULL UNIQUE,
    order_id       TEXT    NOT NULL REFERENCES orders (order_id) DEFERRABLE INITIALLY DEFERRED,
    kind           TEXT    NOT NULL CHECK (kind IN ('payout', 'refund')),
    network        TEXT    NOT NULL,
    asset          TEXT    NOT NULL CHECK (asset IN ('XMR', 'USDC')),
    address        TEXT    NOT NULL,
    units          INTEGER NOT NULL CHECK (units > 0),
    fee            INTEGER NOT NULL CHECK (fee >= 0),
    state          TEXT    NOT NULL CHECK (state IN (
        'planned', 'prepared', 'published', 'unknown', 'settled', 'failed', 'cancelled')),
    txid           TEXT,
    raw            BLOB,
    reason         TEXT,
    -- what was kept from a payout for the order's integrator: the settled payouts are the books
    integrator_fee INTEGER NOT NULL CHECK (integrator_fee >= 0),
    -- how anyone with a node of their own can check that it was made (JSON, compressed with the rest
    -- of the row: rpcsvc/store/packing.py)
    receipt        BLOB    CHECK (receipt IS NULL OR state = 'settled'),
    CHECK ((txid IS NULL) = (raw IS NULL))
) STRICT;

CREATE INDEX transfers_by_order ON transfers (order_id);
CREATE INDEX transfers_planned ON transfers (network) WHERE state = 'planned';
-- Transfers may share a transaction; none pays an address twice in it.
CREATE UNIQUE INDEX transfers_by_txid ON transfers (network, txid, address)
    WHERE txid IS NOT NULL;
-- The last line of defence against paying twice: one payout per order that is, or may be, paid.
CREATE UNIQUE INDEX one_payout_per_order ON transfers (order_id)
    WHERE kind = 'payout' AND state NOT IN ('failed', 'cancelled');

CREATE TRIGGER transfers_keep_what_they_are BEFORE UPDATE ON transfers
WHEN OLD.seq IS NOT NEW.seq OR OLD.transfer_id IS NOT NEW.transfer_id
    OR OLD.order_id IS NOT NEW.order_id OR OLD.kind IS NOT NEW.kind
    OR OLD.network IS NOT NEW.network OR OLD.asset IS NOT NEW.asset
    OR OLD.address IS NOT NEW.address OR OLD.units IS NOT NEW.units OR OLD.fee IS NOT NEW.fee
    OR OLD.integrator_fee IS NOT NEW.integrator_fee
BEGIN SELECT RAISE(ABORT, 'a transfer keeps its order, recipient and amount'); END;

CREATE TRIGGER transfers_keep_their_bytes BEFORE UPDATE ON transfers
WHEN OLD.raw IS NOT NULL AND (OLD.raw IS NOT NEW.raw OR OLD.txid IS NOT NEW.txid)
BEGIN SELECT RAISE(ABORT, 'a signed transfer keeps its bytes'); END;

CREATE TRIGGER transfers_are_never_deleted BEFORE DELETE ON transfers
BEGIN SELECT RAISE(ABORT, 'a transfer stays'); END;

-- The chunks of a TWAP order so far. A reorganisation that takes chunks back deletes them, in the
-- same commit; what happened stays in event_log.
CREATE TABLE fills (
    order_id       TEXT    NOT NULL REFERENCES orders (order_id) DEFERRABLE INITIALLY DEFERRED,
    chunk          INTEGER NOT NULL CHECK (chunk >= 0),
    units          INTEGER NOT NULL CHECK (units > 0),
    output         INTEGER NOT NULL CHECK (output > 0),
    integrator_fee INTEGER NOT NULL CHECK (integrator_fee >= 0),
    rate           INTEGER NOT NULL CHECK (rate > 0),
    at             INTEGER NOT NULL,
    PRIMARY KEY (order_id, chunk)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER fills_are_never_changed BEFORE UPDATE ON fills
BEGIN SELECT RAISE(ABORT, 'a chunk is filled once'); END;

-- The history of orders. Only the events of an order that is over are ever deleted, and never its
-- last one. The primary key is also the guard against two writers: a version happens once. By the
-- order's number instead of its random id, so that new rows go to the end of the tree.
CREATE TABLE event_log (
    order_seq INTEGER NOT NULL REFERENCES orders (seq) DEFERRABLE INITIALLY DEFERRED,
    version   INTEGER NOT NULL,
    at        INTEGER NOT NULL,
    event     TEXT    NOT NULL,
    status    TEXT    NOT NULL,
    -- JSON
    details   TEXT    NOT NULL,
    PRIMARY KEY (order_seq, version)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER events_are_never_changed BEFORE UPDATE ON event_log
BEGIN SELECT RAISE(ABORT, 'an event stays as it is'); END;

-- history_from is at most the order's version, so its last event stays.
CREATE TRIGGER the_last_event_is_never_deleted BEFORE DELETE ON event_log
WHEN NOT EXISTS (SELECT 1 FROM orders o WHERE o.seq = OLD.order_seq
    AND o.deadline_at IS NULL AND OLD.version < o.history_from)
BEGIN SELECT RAISE(ABORT, 'an event of an open order, and the last one of any, stays'); END;

-- The history by order id.
CREATE VIEW order_events AS
SELECT o.order_id, e.version, e.at, e.event, e.status, e.details
FROM event_log e JOIN orders o ON o.seq = e.order_seq;

-- Work that a transition asked for and that is not done. subject is a transfer's id, a chunk's
-- index, or empty.
CREATE TABLE effects (
    order_id TEXT NOT NULL REFERENCES orders (order_id) DEFERRABLE INITIALLY DEFERRED,
    kind     TEXT NOT NULL CHECK (kind IN (
        'advance_transfer', 'fill_chunk', 'price_late_deposit')),
    subject  TEXT NOT NULL,
    -- an operator asked another replica than the one that settles to have it run now
    hurried  INTEGER NOT NULL DEFAULT 0 CHECK (hurried IN (0, 1)),
    PRIMARY KEY (order_id, kind, subject)
) STRICT, WITHOUT ROWID;

CREATE INDEX effects_hurried ON effects (order_id) WHERE hurried = 1;

-- The status answer of an order, written with the change that it shows; ``key`` names the code and
-- settings that rendered it, ``kind`` the kind of swap whose observed time is added when it is sent,
-- NULL of an order that is over. Beside the orders and not in their rows: deleting it frees its pages.
CREATE TABLE status_views (
    order_seq   INTEGER PRIMARY KEY REFERENCES orders (seq) DEFERRABLE INITIALLY DEFERRED,
    view        BLOB NOT NULL,
    valid_until INTEGER,
    key         TEXT NOT NULL,
    kind        TEXT
) STRICT;

-- What each order may still take out of the wallet of a network (rpcsvc/domain/reservations.py): for
-- money that has come, and for a deposit that it awaits. An unfunded one names who asked for the
-- order (the kind of client, and a keyed hash of its name); it is deleted when the order is funded,
-- ends or expires. On the network 'upstream', units are the order's worth in USDC, and the row is
-- there before the order: while the upstream is being asked for it. An open withdrawal has one too.
CREATE TABLE reservations (
    order_id        TEXT    NOT NULL,
    kind            TEXT    NOT NULL CHECK (kind IN ('funded', 'unfunded')),
    network         TEXT    NOT NULL,
    units           INTEGER NOT NULL CHECK (units >= 0),
    client          TEXT,
    deposit_network TEXT,
    expires_at      INTEGER,
    CHECK ((kind = 'unfunded') = (client IS NOT NULL)),
    CHECK ((kind = 'unfunded') = (deposit_network IS NOT NULL)),
    CHECK ((kind = 'unfunded') = (expires_at IS NOT NULL)),
    PRIMARY KEY (order_id, kind, network)
) STRICT, WITHOUT ROWID;

-- Those for money that has come are few: anybody may make orders that are never paid.
CREATE INDEX reservations_funded ON reservations (network) WHERE kind = 'funded';
CREATE INDEX reservations_by_end ON reservations (expires_at) WHERE kind = 'unfunded';
CREATE INDEX reservations_by_client ON reservations (client) WHERE kind = 'unfunded';

-- The sums of reservations, kept by the triggers below: of a network in all ('total'), and of its
-- unfunded ones by who asked: anybody ('all'), callers known by an address alone ('by_address'), each
-- client. The scope 'unfinal' has the sums of unfinal_deposits. On the network '' a client's unfunded
-- orders are counted. A transaction that adds to a sum checks it before it commits, so that no two
-- orders reserve the same money. A wallet's total is written before its other sums: two writers that
-- wait for it do not wait for each other.
CREATE TABLE reservation_sums (
    scope   TEXT    NOT NULL,
    network TEXT    NOT NULL,
    units   INTEGER NOT NULL CHECK (units >= 0),
    number  INTEGER NOT NULL CHECK (number >= 0),
    PRIMARY KEY (scope, network)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER reservations_keep_whose_they_are BEFORE UPDATE ON reservations
WHEN OLD.order_id IS NOT NEW.order_id OR OLD.kind IS NOT NEW.kind
    OR OLD.network IS NOT NEW.network OR OLD.client IS NOT NEW.client
BEGIN SELECT RAISE(ABORT, 'a reservation keeps its order, wallet and client'); END;

CREATE TRIGGER reservations_are_added_up AFTER INSERT ON reservations
BEGIN
    INSERT INTO reservation_sums (scope, network, units, number)
        SELECT s.scope, s.network, s.units, 1 FROM (
            SELECT 'total' AS scope, NEW.network AS network, NEW.units AS units
            UNION ALL SELECT 'all', NEW.network, NEW.units WHERE NEW.kind = 'unfunded'
            UNION ALL SELECT 'by_address', NEW.network, NEW.units WHERE NEW.kind = 'unfunded'
                AND (NEW.client = '' OR NEW.client LIKE 'address:%')
            UNION ALL SELECT NEW.client, NEW.network, NEW.units WHERE NEW.kind = 'unfunded'
            UNION ALL SELECT NEW.client, '', 0 WHERE NEW.kind = 'unfunded') AS s
        WHERE true
        ON CONFLICT (scope, network) DO UPDATE SET
            units = reservation_sums.units + excluded.units,
            number = reservation_sums.number + 1;
END;

CREATE TRIGGER reservations_are_added_up_again AFTER UPDATE OF units ON reservations
WHEN OLD.units <> NEW.units
BEGIN
    UPDATE reservation_sums SET units = units + NEW.units - OLD.units
        WHERE network = NEW.network AND scope = 'total';
    UPDATE reservation_sums SET units = units + NEW.units - OLD.units
        WHERE network = NEW.network AND scope IN (
            CASE WHEN NEW.kind = 'unfunded' THEN 'all' END,
            CASE WHEN NEW.client = '' OR NEW.client LIKE 'address:%' THEN 'by_address' END,
            NEW.client);
END;

CREATE TRIGGER reservations_are_taken_off AFTER DELETE ON reservations
BEGIN
    UPDATE reservation_sums SET units = units - OLD.units, number = number - 1
        WHERE network = OLD.network AND scope = 'total';
    UPDATE reservation_sums SET units = units - OLD.units, number = number - 1
        WHERE network = OLD.network AND scope IN (
            CASE WHEN OLD.kind = 'unfunded' THEN 'all' END,
            CASE WHEN OLD.client = '' OR OLD.client LIKE 'address:%' THEN 'by_address' END,
            OLD.client);
    UPDATE reservation_sums SET number = number - 1 WHERE network = '' AND scope = OLD.client;
    DELETE FROM reservation_sums WHERE scope = OLD.client AND number = 0;
END;

-- Deposits that orders count before they are final (rpcsvc/domain/finality.py), each with its worth in
-- USDC units. A row is written by the commit that confirms its deposit. It goes once the deposit is
-- final, or is gone unspent; it stays, with the time, when the deposit vanished after its payout.
CREATE TABLE unfinal_deposits (
    network      TEXT    NOT NULL,
    txid         TEXT    NOT NULL,
    output_index INTEGER NOT NULL,
    order_id     TEXT    NOT NULL REFERENCES orders (order_id) DEFERRABLE INITIALLY DEFERRED,
    units        INTEGER NOT NULL CHECK (units > 0),
    lost_at      INTEGER,
    PRIMARY KEY (network, txid, output_index)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER unfinal_deposits_keep_their_worth BEFORE UPDATE ON unfinal_deposits
WHEN OLD.network IS NOT NEW.network OR OLD.txid IS NOT NEW.txid
    OR OLD.output_index IS NOT NEW.output_index OR OLD.order_id IS NOT NEW.order_id
    OR OLD.units IS NOT NEW.units
BEGIN SELECT RAISE(ABORT, 'a deposit that is not final keeps its order and worth'); END;

-- The sum at risk: of a network, and on the network '' of all.
CREATE TRIGGER unfinal_deposits_are_added_up AFTER INSERT ON unfinal_deposits
BEGIN
    INSERT INTO reservation_sums (scope, network, units, number)
        SELECT 'unfinal', s.network, NEW.units, 1 FROM (
            SELECT NEW.network AS network UNION ALL SELECT '') AS s
        WHERE true
        ON CONFLICT (scope, network) DO UPDATE SET
            units = reservation_sums.units + excluded.units,
            number = reservation_sums.number + 1;
END;

CREATE TRIGGER unfinal_deposits_are_taken_off AFTER DELETE ON unfinal_deposits
BEGIN
    UPDATE reservation_sums SET units = units - OLD.units, number = number - 1
        WHERE scope = 'unfinal' AND network IN (OLD.network, '');
END;

-- Until when (ms) only final deposits count on a network, because one was lost after its payout.
CREATE TABLE finality_holds (
    network TEXT    PRIMARY KEY,
    until   INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Orders that each client made on a day (UTC, counted from the epoch). A day's orders delete
-- the days before yesterday: a replica whose clock is a day ahead leaves today's counts.
CREATE TABLE order_counts (
    day    INTEGER NOT NULL,
    client TEXT    NOT NULL,
    orders INTEGER NOT NULL CHECK (orders > 0),
    PRIMARY KEY (day, client)
) STRICT, WITHOUT ROWID;

-- What the orders that a client of the settings made on a day (UTC, counted from the epoch) are worth
-- together, in USDC units. The transaction of an order adds to it, within the client's limit; that
-- of an upstream's refusal takes it off again.
CREATE TABLE client_days (
    day    INTEGER NOT NULL,
    client TEXT    NOT NULL,
    units  INTEGER NOT NULL CHECK (units >= 0),
    orders INTEGER NOT NULL CHECK (orders >= 0),
    PRIMARY KEY (day, client)
) STRICT, WITHOUT ROWID;

-- Orders of clients that a person has to approve (rpcsvc/operations/approvals.py). One that holds is
-- the only one for its client, terms and key. shown is JSON, as the person reads it.
CREATE TABLE approvals (
    seq             INTEGER PRIMARY KEY,
    approval_id     TEXT    NOT NULL UNIQUE,
    client          TEXT    NOT NULL,
    idempotency_key TEXT    NOT NULL,
    terms           TEXT    NOT NULL,
    state           TEXT    NOT NULL CHECK (state IN (
        'pending', 'granted', 'denied', 'used', 'ended')),
    requested_at    INTEGER NOT NULL,
    expires_at      INTEGER NOT NULL,
    deposit         INTEGER NOT NULL CHECK (deposit > 0),
    output          INTEGER NOT NULL CHECK (output > 0),
    shown           TEXT    NOT NULL,
    decided_at      INTEGER,
    decided_by      TEXT,
    order_id        TEXT,
    CHECK ((decided_at IS NULL) = (decided_by IS NULL)),
    CHECK ((order_id IS NOT NULL) = (state = 'used')),
    CHECK (decided_by IS NOT NULL OR state IN ('pending', 'ended'))
) STRICT;

CREATE UNIQUE INDEX approvals_that_hold ON approvals (client, terms, idempotency_key)
    WHERE state IN ('pending', 'granted', 'denied');
-- By time first: those that nobody decided on stay pending after their end.
CREATE INDEX approvals_pending ON approvals (expires_at, client) WHERE state = 'pending';

CREATE TRIGGER approvals_keep_what_they_are BEFORE UPDATE OF
    seq, approval_id, client, idempotency_key, terms, requested_at, expires_at, deposit, output, shown
ON approvals
BEGIN SELECT RAISE(ABORT, 'an approval keeps its terms'); END;

CREATE TRIGGER approvals_are_decided_once BEFORE UPDATE OF decided_at, decided_by ON approvals
WHEN OLD.decided_at IS NOT NULL AND NOT (OLD.state = 'granted' AND NEW.state = 'denied')
BEGIN SELECT RAISE(ABORT, 'a decision stays, but for a grant that is withdrawn'); END;

CREATE TRIGGER approvals_are_never_deleted BEFORE DELETE ON approvals
BEGIN SELECT RAISE(ABORT, 'an approval stays'); END;

-- --- Withdrawals --------------------------------------------------------------------------------

-- The operator's own transfers out of the wallets, each of no order. While one is open its units and
-- fee are reserved like those of an order (reservations.order_id is its id then). raw is as in
-- transfers, hex, from before the publication.
CREATE TABLE withdrawals (
    seq           INTEGER PRIMARY KEY,
    withdrawal_id TEXT    NOT NULL UNIQUE CHECK (substr(withdrawal_id, 1, 3) = 'wd_'),
    network       TEXT    NOT NULL,
    asset         TEXT    NOT NULL CHECK (asset IN ('XMR', 'USDC')),
    address       TEXT    NOT NULL,
    units         INTEGER NOT NULL CHECK (units > 0),
    fee           INTEGER NOT NULL CHECK (fee >= 0),
    created_at    INTEGER NOT NULL,
    changed_at    INTEGER NOT NULL,
    state         TEXT    NOT NULL CHECK (state IN (
        'planned', 'prepared', 'published', 'unknown', 'settled', 'failed', 'cancelled')),
    txid          TEXT,
    raw           TEXT,
    reason        TEXT,
    -- as in transfers
    receipt       TEXT    CHECK (receipt IS NULL OR state = 'settled'),
    CHECK ((txid IS NULL) = (raw IS NULL)),
    CHECK (txid IS NOT NULL OR state IN ('planned', 'failed', 'cancelled')),
    CHECK (txid IS NULL OR state NOT IN ('planned', 'cancelled'))
) STRICT;

-- One at a time on each network: the next is judged by what this one left.
CREATE UNIQUE INDEX withdrawals_open ON withdrawals (network)
    WHERE state NOT IN ('settled', 'failed', 'cancelled');

CREATE TRIGGER withdrawals_keep_what_they_are BEFORE UPDATE ON withdrawals
WHEN OLD.seq IS NOT NEW.seq OR OLD.withdrawal_id IS NOT NEW.withdrawal_id
    OR OLD.network IS NOT NEW.network OR OLD.asset IS NOT NEW.asset
    OR OLD.address IS NOT NEW.address OR OLD.units IS NOT NEW.units OR OLD.fee IS NOT NEW.fee
    OR OLD.created_at IS NOT NEW.created_at
BEGIN SELECT RAISE(ABORT, 'a withdrawal keeps its recipient and amount'); END;

CREATE TRIGGER withdrawals_keep_their_bytes BEFORE UPDATE ON withdrawals
WHEN OLD.raw IS NOT NULL AND (OLD.raw IS NOT NEW.raw OR OLD.txid IS NOT NEW.txid)
BEGIN SELECT RAISE(ABORT, 'a signed withdrawal keeps its bytes'); END;

CREATE TRIGGER withdrawals_end_once BEFORE UPDATE OF state ON withdrawals
WHEN OLD.state IN ('settled', 'failed', 'cancelled')
BEGIN SELECT RAISE(ABORT, 'a withdrawal that is over stays so'); END;

CREATE TRIGGER withdrawals_are_never_deleted BEFORE DELETE ON withdrawals
BEGIN SELECT RAISE(ABORT, 'a withdrawal stays'); END;

-- --- Webhooks -----------------------------------------------------------------------------------

-- Where the events of an order are sent, if its maker asked for it, and how that goes.
CREATE TABLE webhooks (
    order_seq     INTEGER PRIMARY KEY REFERENCES orders (seq) DEFERRABLE INITIALLY DEFERRED,
    url           TEXT    NOT NULL,
    -- host and port of the URL
    receiver      TEXT    NOT NULL,
    -- what the receiver checks signatures with, if it gave a secret
    secret        TEXT,
    -- who named it: a kind and a keyed hash (rpcsvc/orders/unfunded.py). Messages are shared by it
    client        TEXT    NOT NULL,
    -- failed attempts in a row, and since when; nothing is sent before due_at
    failures      INTEGER NOT NULL CHECK (failures >= 0),
    failing_since INTEGER,
    due_at        INTEGER NOT NULL,
    -- when the last attempt was made, and whether it got an HTTP status
    tried_at      INTEGER,
    has_answered  INTEGER CHECK (has_answered IN (0, 1)),
    -- when it ended: the receiver answered 410, or the order was cancelled before a deposit
    ended_at      INTEGER,
    CHECK ((failures = 0) = (failing_since IS NULL)),
    CHECK ((tried_at IS NULL) = (has_answered IS NULL)),
    CHECK (failures = 0 OR tried_at IS NOT NULL)
) STRICT;

CREATE INDEX webhooks_by_receiver ON webhooks (receiver, tried_at) WHERE tried_at IS NOT NULL;

CREATE TRIGGER webhooks_keep_their_receiver
BEFORE UPDATE OF order_seq, url, receiver, secret, client ON webhooks
BEGIN SELECT RAISE(ABORT, 'a webhook keeps its receiver'); END;

-- The events that are to be sent, each written by the commit of its event. Of an order, those that
-- are pending have the same due_at, and go in the order of their versions.
CREATE TABLE webhook_deliveries (
    order_seq INTEGER NOT NULL REFERENCES webhooks (order_seq) DEFERRABLE INITIALLY DEFERRED,
    version   INTEGER NOT NULL CHECK (version >= 1),
    state     TEXT    NOT NULL CHECK (state IN ('pending', 'delivered', 'dead')),
    due_at    INTEGER NOT NULL,
    attempts  INTEGER NOT NULL CHECK (attempts >= 0),
    -- the last attempt: when it was made, the HTTP status, and why it failed
    tried_at  INTEGER,
    status    INTEGER,
    error     TEXT,
    PRIMARY KEY (order_seq, version),
    CHECK ((attempts = 0) = (tried_at IS NULL)),
    CHECK (state <> 'delivered' OR (status IS NOT NULL AND status BETWEEN 200 AND 299))
) STRICT, WITHOUT ROWID;

CREATE INDEX webhook_deliveries_pending ON webhook_deliveries (due_at, order_seq, version)
    WHERE state = 'pending';

-- --- Who settles --------------------------------------------------------------------------------

-- Leases by name (docs/adr/0014-replicas.md). Whoever takes one gets the next token, and each of its
-- transactions looks whether that is still the token.
CREATE TABLE leases (
    name       TEXT    PRIMARY KEY,
    holder     TEXT    NOT NULL,
    token      INTEGER NOT NULL CHECK (token >= 0),
    -- by the database's clock; NULL: it has no end, its holder has the owner lock
    expires_at INTEGER
) STRICT, WITHOUT ROWID;

CREATE TRIGGER tokens_never_fall BEFORE UPDATE ON leases
WHEN OLD.name IS NOT NEW.name OR NEW.token < OLD.token
    OR (OLD.holder IS NOT NEW.holder AND NEW.token = OLD.token)
BEGIN SELECT RAISE(ABORT, 'each holder of a lease has a token of its own'); END;

CREATE TRIGGER leases_are_never_deleted BEFORE DELETE ON leases
BEGIN SELECT RAISE(ABORT, 'a lease stays'); END;

-- The rate that the settling process had, for a week: new orders have to agree with the last row
-- (rpcsvc/orders/published_rates.py).
CREATE TABLE rates (
    seq          INTEGER PRIMARY KEY,
    -- by the database's clock
    published_at INTEGER NOT NULL,
    -- USDC units per XMR
    usdc_per_xmr INTEGER NOT NULL CHECK (usdc_per_xmr > 0),
    -- of the lease that it was published under
    token        INTEGER NOT NULL CHECK (token > 0)
) STRICT;

CREATE INDEX rates_by_time ON rates (published_at);

CREATE TRIGGER rates_never_change BEFORE UPDATE ON rates
BEGIN SELECT RAISE(ABORT, 'a published rate stays as it was'); END;

-- The wallets of the replica that settles, for the others, which take orders by them
-- (rpcsvc/orders/shared_wallets.py). Amounts are units of the network's asset.
CREATE TABLE wallet_states (
    network           TEXT    PRIMARY KEY,
    -- by the database's clock
    published_at      INTEGER NOT NULL,
    is_up             INTEGER NOT NULL CHECK (is_up IN (0, 1)),
    height            INTEGER,
    fee               INTEGER CHECK (fee >= 0),
    -- NULL: not known, or too low; shortage says so
    free              INTEGER CHECK (free >= 0),
    locked            INTEGER CHECK (locked >= 0),
    seconds_to_unlock INTEGER CHECK (seconds_to_unlock >= 0),
    shortage          TEXT,
    -- why no order is taken; NULL: orders are taken
    refusal           TEXT,
    CHECK ((free IS NULL) = (locked IS NULL) AND (free IS NULL) = (seconds_to_unlock IS NULL))
) STRICT, WITHOUT ROWID;

-- Deposit addresses that orders of those replicas may get: each is in use already as far as the wallet
-- is concerned. The transaction of the order that gets one deletes its row.
CREATE TABLE address_pool (
    address TEXT PRIMARY KEY,
    asset   TEXT NOT NULL CHECK (asset IN ('XMR', 'USDC'))
) STRICT, WITHOUT ROWID;

CREATE TRIGGER pooled_addresses_never_change BEFORE UPDATE ON address_pool
BEGIN SELECT RAISE(ABORT, 'a pooled address stays as it is'); END;

-- --- Idempotency keys and tickets ---------------------------------------------------------------

-- The first answer to each idempotency key, and the order that it made, if it made one.
CREATE TABLE idempotency_keys (
    seq             INTEGER PRIMARY KEY,
    namespace       TEXT    NOT NULL,
    idempotency_key TEXT    NOT NULL,
    operation       TEXT    NOT NULL,
    -- JSON; empty where it is compressed with the answer
    params          TEXT    NOT NULL,
    -- as it was sent, or compressed with the dictionary of that number (rpcsvc/store/packing.py)
    body            BLOB    NOT NULL,
    packed          INTEGER NOT NULL DEFAULT 0 CHECK (packed >= 0),
    created_at      INTEGER NOT NULL,
    order_seq       INTEGER,
    UNIQUE (namespace, idempotency_key)
) STRICT;

CREATE INDEX idempotency_keys_by_order ON idempotency_keys (order_seq)
    WHERE order_seq IS NOT NULL;
CREATE INDEX idempotency_keys_unpacked ON idempotency_keys (created_at) WHERE packed = 0;

-- Support tickets. secret_hash is the SHA-256 of the secret that opens the conversation, as hex; empty
-- where nobody has one. messages counts those of the person, the first one included.
CREATE TABLE tickets (
    seq            INTEGER PRIMARY KEY,
    ticket_id      TEXT    NOT NULL UNIQUE,
    created_at     INTEGER NOT NULL,
    category       TEXT    NOT NULL,
    message        TEXT    NOT NULL,
    order_id       TEXT,
    session_id     TEXT,
    wallet_address TEXT,
    secret_hash    TEXT    NOT NULL DEFAULT '',
    messages       INTEGER NOT NULL DEFAULT 1 CHECK (messages > 0),
    awaits_answer  INTEGER NOT NULL DEFAULT 1 CHECK (awaits_answer IN (0, 1))
) STRICT;

-- What was written to a ticket after its first message: by the person where answered_by is NULL, else
-- by the operator whom it names. Deleted with the ticket.
CREATE TABLE ticket_messages (
    seq         INTEGER PRIMARY KEY,
    ticket_id   TEXT    NOT NULL REFERENCES tickets (ticket_id) DEFERRABLE INITIALLY DEFERRED,
    at          INTEGER NOT NULL,
    answered_by TEXT,
    message     TEXT    NOT NULL
) STRICT;

CREATE INDEX ticket_messages_by_ticket ON ticket_messages (ticket_id, seq);

CREATE TRIGGER ticket_messages_never_change BEFORE UPDATE ON ticket_messages
BEGIN SELECT RAISE(ABORT, 'a message stays as it is'); END;

-- Tickets and bytes that each client was charged on a day (UTC, counted from the epoch), and all
-- clients together (''). A day's first ticket deletes the days before yesterday.
CREATE TABLE ticket_counts (
    day     INTEGER NOT NULL,
    client  TEXT    NOT NULL,
    tickets INTEGER NOT NULL,
    bytes   INTEGER NOT NULL,
    PRIMARY KEY (day, client)
) STRICT, WITHOUT ROWID;

-- --- Settle times -------------------------------------------------------------------------------

-- How many orders of a kind ("direction/chain/class of size") settled on a day (UTC, counted from the
-- epoch) within the seconds of a bucket (rpcsvc/domain/settle_times.py). Counted by the commit that
-- completes the order, which deletes the days that count no longer.
CREATE TABLE settle_times (
    day    INTEGER NOT NULL,
    kind   TEXT    NOT NULL,
    bucket INTEGER NOT NULL,
    orders INTEGER NOT NULL CHECK (orders > 0),
    PRIMARY KEY (day, kind, bucket)
) STRICT, WITHOUT ROWID;

-- --- Signed authorizations ----------------------------------------------------------------------

-- Signed authorizations that are to pay an order (EIP-3009), here before anything is sent. While one
-- of an order is 'recorded' or 'sent', the network may carry it out, and the order takes no other.
CREATE TABLE funding_authorizations (
    seq          INTEGER PRIMARY KEY,
    network      TEXT    NOT NULL,
    -- the token's contract
    asset        TEXT    NOT NULL,
    payer        TEXT    NOT NULL,
    nonce        TEXT    NOT NULL,
    order_id     TEXT    NOT NULL REFERENCES orders (order_id) DEFERRABLE INITIALLY DEFERRED,
    recipient    TEXT    NOT NULL,
    units        INTEGER NOT NULL CHECK (units > 0),
    -- seconds since the epoch, as they are signed
    valid_after  INTEGER NOT NULL,
    valid_before INTEGER NOT NULL CHECK (valid_before > valid_after),
    signature    BLOB    NOT NULL,
    -- 1: the quote of its order has its gas in it
    is_gas_paid  INTEGER NOT NULL CHECK (is_gas_paid IN (0, 1)),
    created_at   INTEGER NOT NULL,
    state        TEXT    NOT NULL CHECK (state IN ('recorded', 'sent', 'credited', 'failed')),
    txid         TEXT,
    reason       TEXT,
    -- the payer's name for the payment, if it has one (x402, extension payment-identifier)
    payment_id   TEXT,
    UNIQUE (network, asset, payer, nonce),
    CHECK (state NOT IN ('sent', 'credited') OR txid IS NOT NULL)
) STRICT;

-- Which payments of gas are for an authorization whose order bears it.
CREATE INDEX funding_by_recipient ON funding_authorizations (recipient) WHERE is_gas_paid = 1;
CREATE UNIQUE INDEX funding_by_payment_id ON funding_authorizations (payer, payment_id)
    WHERE payment_id IS NOT NULL;
CREATE UNIQUE INDEX funding_unresolved ON funding_authorizations (order_id)
    WHERE state IN ('recorded', 'sent');
CREATE INDEX funding_credited ON funding_authorizations (order_id) WHERE state = 'credited';

CREATE TRIGGER authorizations_keep_what_was_signed BEFORE UPDATE OF
    seq, network, asset, payer, nonce, order_id, recipient, units, valid_after, valid_before,
    signature, is_gas_paid, created_at, payment_id
ON funding_authorizations
BEGIN SELECT RAISE(ABORT, 'an authorization keeps what was signed'); END;

-- One that is credited is sent again once its deposit is off the chain.
CREATE TRIGGER authorizations_stay_resolved BEFORE UPDATE OF state ON funding_authorizations
WHEN OLD.state = 'failed' OR (OLD.state = 'credited' AND NEW.state <> 'sent')
BEGIN SELECT RAISE(ABORT, 'an authorization stays resolved'); END;

CREATE TRIGGER authorizations_are_never_deleted BEFORE DELETE ON funding_authorizations
BEGIN SELECT RAISE(ABORT, 'an authorization stays'); END;

-- Authorizations that each client's gas was spent on, or may be, on a day (UTC, counted from the
-- epoch). A day's first deletes the days before yesterday.
CREATE TABLE authorization_counts (
    day            INTEGER NOT NULL,
    client         TEXT    NOT NULL,
    authorizations INTEGER NOT NULL CHECK (authorizations > 0),
    PRIMARY KEY (day, client)
) STRICT, WITHOUT ROWID;

-- --- Orders at an upstream ----------------------------------------------------------------------

-- Claims on orders at the upstream. A claim is here before the upstream is called; it is never
-- deleted, so that the operator finds what may have been created there.
CREATE TABLE relays (
    seq             INTEGER PRIMARY KEY,
    order_id        TEXT    NOT NULL UNIQUE,
    state           TEXT    NOT NULL CHECK (state IN (
        'claimed', 'created', 'refused', 'reconciling')),
    -- how often the upstream was called for it, and when (by the clock of the database) that was
    -- written last: a claim that is 'claimed' for longer than any call lasts has lost its caller
    attempt         INTEGER NOT NULL CHECK (attempt > 0),
    written_at      INTEGER NOT NULL,
    created_at      INTEGER NOT NULL,
    session_id      TEXT    NOT NULL,
    -- what the idempotency key was used for: while the outcome of the call is not known there is
    -- no answer, and the key stands for that call all the same
    namespace       TEXT,
    idempotency_key TEXT,
    operation       TEXT,
    params          TEXT,
    upstream_id     TEXT,
    reason          TEXT,
    -- what the operator noted when closing the claim; only the closing writes it
    note            TEXT,
    -- the upstream's answer to the creation, for audit
    raw             BLOB    NOT NULL,
    -- what it last said of the order, and the answer that this was read from
    deposit_txid    TEXT,
    output          INTEGER CHECK (output >= 0),
    refund_txid     TEXT,
    refund_address  TEXT,
    due             INTEGER CHECK (due > 0),
    error           TEXT,
    completed_at    INTEGER,
    extra           TEXT,
    evidence        BLOB,
    CHECK (state <> 'created' OR upstream_id IS NOT NULL)
) STRICT;

CREATE UNIQUE INDEX relays_by_upstream_id ON relays (upstream_id)
    WHERE upstream_id IS NOT NULL AND state = 'created';
CREATE INDEX relays_by_key ON relays (namespace, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
-- One claim a key while its outcome is not known: of two replicas that make the same call, one asks
-- the upstream.
CREATE UNIQUE INDEX relays_by_open_key ON relays (namespace, idempotency_key)
    WHERE idempotency_key IS NOT NULL AND state IN ('claimed', 'reconciling');
CREATE INDEX relays_in_doubt ON relays (state) WHERE state IN ('claimed', 'reconciling');

CREATE TRIGGER relays_are_never_deleted BEFORE DELETE ON relays
BEGIN SELECT RAISE(ABORT, 'a claim on an upstream order stays'); END;

-- --- The sandbox's simulated chains -------------------------------------------------------------

-- Blocks come with the clock: the height of a chain at a time follows from its base.
CREATE TABLE sandbox_chains (
    network     TEXT    NOT NULL PRIMARY KEY,
    base_height INTEGER NOT NULL,
    base_at     INTEGER NOT NULL,
    block_ms    INTEGER NOT NULL CHECK (block_ms > 0),
    paused      INTEGER NOT NULL CHECK (paused IN (0, 1)),
    -- what the service's wallet started with, and what it holds now
    inventory   INTEGER NOT NULL CHECK (inventory >= 0),
    balance     INTEGER NOT NULL
) STRICT;

-- The blocks that hold a transaction.
CREATE TABLE sandbox_blocks (
    network  TEXT    NOT NULL,
    height   INTEGER NOT NULL,
    hash     TEXT    NOT NULL PRIMARY KEY,
    mined_at INTEGER NOT NULL,
    orphaned INTEGER NOT NULL CHECK (orphaned IN (0, 1))
) STRICT;

CREATE UNIQUE INDEX sandbox_blocks_by_height ON sandbox_blocks (network, height)
    WHERE orphaned = 0;

-- Transactions of the simulated chains.
CREATE TABLE sandbox_transactions (
    seq          INTEGER PRIMARY KEY,
    network      TEXT    NOT NULL,
    txid         TEXT    NOT NULL,
    kind         TEXT    NOT NULL CHECK (kind IN ('deposit', 'transfer')),
    recipient    TEXT    NOT NULL,
    sender       TEXT,
    units        INTEGER NOT NULL CHECK (units > 0),
    fee          INTEGER NOT NULL CHECK (fee >= 0),
    broadcast_at INTEGER NOT NULL,
    block_height INTEGER,
    state        TEXT    NOT NULL CHECK (state IN ('mempool', 'mined', 'dropped', 'reverted')),
    -- 1 while the service has not yet committed what the chain last said of it
    watched      INTEGER NOT NULL CHECK (watched IN (0, 1)),
    -- as in orders
    recipient_ends TEXT GENERATED ALWAYS AS (
        substr(recipient, 1, 9) || substr(recipient, length(recipient) - 8)) VIRTUAL,
    UNIQUE (network, txid)
) STRICT;

CREATE INDEX sandbox_transactions_watched ON sandbox_transactions (seq) WHERE watched = 1;
-- By the end of the address alone: it is random, and the whole is as wide as the row.
CREATE INDEX sandbox_transactions_by_recipient ON sandbox_transactions (recipient_ends);

-- Faults that wait for an order's next transfer.
CREATE TABLE sandbox_faults (
    order_id TEXT NOT NULL,
    fault    TEXT NOT NULL,
    PRIMARY KEY (order_id, fault)
) STRICT, WITHOUT ROWID;

-- Settings of the sandbox that were changed while it ran.
CREATE TABLE sandbox_settings (
    name  TEXT    NOT NULL PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- --- The Monero wallet --------------------------------------------------------------------------

-- The wallet of the first start, and the highest subaddress index that orders may have been given.
CREATE TABLE monero_wallet (
    id              INTEGER PRIMARY KEY CHECK (id = 1),
    nettype         TEXT    NOT NULL,
    primary_address TEXT    NOT NULL,
    reserved_to     INTEGER NOT NULL CHECK (reserved_to >= 0)
) STRICT;

CREATE TRIGGER monero_wallet_stays_the_same BEFORE UPDATE ON monero_wallet
WHEN OLD.nettype IS NOT NEW.nettype OR OLD.primary_address IS NOT NEW.primary_address
BEGIN SELECT RAISE(ABORT, 'the service keeps its wallet'); END;

-- Subaddresses made ahead. The wallet has stored them before they come here.
CREATE TABLE monero_addresses (
    minor        INTEGER PRIMARY KEY CHECK (minor > 0),
    address      TEXT    NOT NULL UNIQUE,
    -- as in orders
    address_ends TEXT    GENERATED ALWAYS AS (
        substr(address, 1, 9) || substr(address, length(address) - 8)) VIRTUAL
) STRICT;

CREATE TRIGGER monero_addresses_never_change BEFORE UPDATE ON monero_addresses
WHEN OLD.minor IS NOT NEW.minor OR OLD.address IS NOT NEW.address
BEGIN SELECT RAISE(ABORT, 'an index keeps its address: this is another wallet'); END;

-- Blocks up to which every deposit is committed, newest last; older ones find a fork.
CREATE TABLE monero_cursor (
    height INTEGER PRIMARY KEY CHECK (height >= 0),
    hash   TEXT    NOT NULL
) STRICT;

-- A row while the wallet has to scan the chain again: from before it is given addresses to which
-- money may have come that it did not look for, until the scan is over and stored.
CREATE TABLE monero_rescan_due (
    id INTEGER PRIMARY KEY CHECK (id = 1)
) STRICT;

-- One row for what one transaction paid to one subaddress: the wallet sums its outputs.
CREATE TABLE monero_deposits (
    txid          TEXT    NOT NULL,
    minor         INTEGER NOT NULL REFERENCES monero_addresses (minor),
    units         INTEGER NOT NULL CHECK (units > 0),
    unlock_time   INTEGER NOT NULL CHECK (unlock_time >= 0),
    first_seen_at INTEGER NOT NULL,
    height        INTEGER CHECK (height >= 0),
    -- the state that the order layer has committed last; NULL: none yet
    acknowledged  TEXT    CHECK (acknowledged IN ('seen', 'confirmed', 'removed')),
    -- 1 while the chain may still change what it says of it
    watched       INTEGER NOT NULL CHECK (watched IN (0, 1)),
    PRIMARY KEY (txid, minor)
) STRICT, WITHOUT ROWID;

CREATE INDEX monero_deposits_watched ON monero_deposits (watched) WHERE watched = 1;
CREATE INDEX monero_deposits_by_height ON monero_deposits (height);
-- What an address received in all is compared with the outputs that the wallet has there.
CREATE INDEX monero_deposits_by_minor ON monero_deposits (minor);

-- Transactions that the wallet signed, from before their publication to their end. A payment of one
-- transfer has that transfer's id; one of several has rows in monero_payees. relayed_at is written
-- before the wallet is told to relay, which it is at most once.
CREATE TABLE monero_payments (
    seq             INTEGER PRIMARY KEY,
    payment_id      TEXT    NOT NULL UNIQUE,
    purpose         TEXT    NOT NULL CHECK (purpose IN ('transfer', 'upkeep')),
    address         TEXT    NOT NULL,
    units           INTEGER NOT NULL CHECK (units > 0),
    fee             INTEGER NOT NULL CHECK (fee >= 0),
    txid            TEXT    NOT NULL UNIQUE,
    raw             BLOB    NOT NULL,
    metadata        TEXT    NOT NULL,
    tx_key          TEXT    NOT NULL,
    prepared_at     INTEGER NOT NULL,
    state           TEXT    NOT NULL CHECK (state IN (
        'prepared', 'relaying', 'published', 'settled', 'failed')),
    relayed_at      INTEGER,
    height          INTEGER CHECK (height >= 0),
    -- a block by which another transaction had spent an input of this one
    conflict_height INTEGER CHECK (conflict_height >= 0),
    conflict_hash   TEXT,
    -- constant: what the index below is unique over
    wallet          INTEGER NOT NULL DEFAULT 1 CHECK (wallet = 1),
    CHECK (state <> 'relaying' OR relayed_at IS NOT NULL),
    CHECK (state <> 'prepared' OR relayed_at IS NULL),
    CHECK ((conflict_height IS NULL) = (conflict_hash IS NULL))
) STRICT;

-- A prepared payment reserves nothing in the wallet: the next one would spend the same outputs.
CREATE UNIQUE INDEX monero_one_unpublished ON monero_payments (wallet)
    WHERE state IN ('prepared', 'relaying');
CREATE INDEX monero_payments_by_state ON monero_payments (state, purpose, height);
CREATE INDEX monero_payments_by_time ON monero_payments (prepared_at);

CREATE TRIGGER monero_payments_keep_what_they_are BEFORE UPDATE ON monero_payments
WHEN OLD.payment_id IS NOT NEW.payment_id OR OLD.address IS NOT NEW.address
    OR OLD.units IS NOT NEW.units OR OLD.fee IS NOT NEW.fee OR OLD.txid IS NOT NEW.txid
    OR OLD.raw IS NOT NEW.raw OR OLD.tx_key IS NOT NEW.tx_key
    OR (OLD.relayed_at IS NOT NULL AND OLD.relayed_at IS NOT NEW.relayed_at)
    OR (OLD.state = 'failed' AND NEW.state <> 'failed')
BEGIN SELECT RAISE(ABORT, 'a prepared payment keeps what it is'); END;

CREATE TRIGGER monero_payments_are_never_deleted BEFORE DELETE ON monero_payments
BEGIN SELECT RAISE(ABORT, 'a prepared payment stays'); END;

-- The recipients of a transaction that pays several transfers.
CREATE TABLE monero_payees (
    payment_id  TEXT    NOT NULL REFERENCES monero_payments (payment_id)
        DEFERRABLE INITIALLY DEFERRED,
    transfer_id TEXT    NOT NULL UNIQUE,
    address     TEXT    NOT NULL,
    units       INTEGER NOT NULL CHECK (units > 0),
    PRIMARY KEY (payment_id, transfer_id),
    -- what a transaction paid to an address must tell whose payout it was
    UNIQUE (payment_id, address)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER monero_payees_keep_what_they_are BEFORE UPDATE ON monero_payees
WHEN OLD.payment_id IS NOT NEW.payment_id OR OLD.transfer_id IS NOT NEW.transfer_id
    OR OLD.address IS NOT NEW.address OR OLD.units IS NOT NEW.units
BEGIN SELECT RAISE(ABORT, 'a payee keeps its address and its amount'); END;

CREATE TRIGGER monero_payees_are_never_deleted BEFORE DELETE ON monero_payees
BEGIN SELECT RAISE(ABORT, 'a payee stays'); END;

-- A transfer is signed for alone or together with others, never both.
CREATE TRIGGER monero_payees_are_not_paid_alone BEFORE INSERT ON monero_payees
WHEN EXISTS (SELECT 1 FROM monero_payments WHERE payment_id = NEW.transfer_id)
BEGIN SELECT RAISE(ABORT, 'the transfer has a payment of its own'); END;

CREATE TRIGGER monero_payments_are_not_in_a_batch BEFORE INSERT ON monero_payments
WHEN EXISTS (SELECT 1 FROM monero_payees WHERE transfer_id = NEW.payment_id)
BEGIN SELECT RAISE(ABORT, 'the transfer is part of another payment'); END;

-- What each payment spends. The same key image twice is a double spend.
CREATE TABLE monero_key_images (
    payment_id TEXT    NOT NULL REFERENCES monero_payments (payment_id)
        DEFERRABLE INITIALLY DEFERRED,
    key_image  TEXT    NOT NULL,
    -- 0 once the payment can never be made
    live       INTEGER NOT NULL CHECK (live IN (0, 1)),
    PRIMARY KEY (payment_id, key_image)
) STRICT, WITHOUT ROWID;

CREATE UNIQUE INDEX monero_key_images_live ON monero_key_images (key_image) WHERE live = 1;

-- --- The EVM wallet: addresses and deposits -----------------------------------------------------

-- The mnemonic of the first start, by the address of its hot wallet, and the highest address index
-- that orders may have been given, on whatever network.
CREATE TABLE evm_wallet (
    id          INTEGER PRIMARY KEY CHECK (id = 1),
    hot_address TEXT    NOT NULL,
    reserved_to INTEGER NOT NULL CHECK (reserved_to >= 0)
) STRICT;

CREATE TRIGGER evm_wallet_stays_the_same BEFORE UPDATE ON evm_wallet
WHEN OLD.hot_address IS NOT NEW.hot_address
BEGIN SELECT RAISE(ABORT, 'the service keeps its mnemonic'); END;

CREATE TRIGGER evm_wallet_is_never_deleted BEFORE DELETE ON evm_wallet
BEGIN SELECT RAISE(ABORT, 'the service keeps its mnemonic'); END;

-- Addresses made ahead, by their index in BIP-44. Index 0 is the hot wallet's and not among them.
CREATE TABLE evm_addresses (
    address_index INTEGER PRIMARY KEY CHECK (address_index > 0),
    address       TEXT    NOT NULL,
    -- hex digits are the same address in any case
    address_lower TEXT    GENERATED ALWAYS AS (lower(address)) VIRTUAL,
    -- as in orders
    address_ends  TEXT    GENERATED ALWAYS AS (
        substr(address, 1, 9) || substr(address, length(address) - 8)) VIRTUAL
) STRICT;

CREATE UNIQUE INDEX evm_addresses_by_address ON evm_addresses (address_lower);

CREATE TRIGGER evm_addresses_never_change BEFORE UPDATE ON evm_addresses
WHEN OLD.address_index IS NOT NEW.address_index OR OLD.address IS NOT NEW.address
BEGIN SELECT RAISE(ABORT, 'an index keeps its address: this is another mnemonic'); END;

CREATE TRIGGER evm_addresses_are_never_deleted BEFORE DELETE ON evm_addresses
BEGIN SELECT RAISE(ABORT, 'money may arrive at an address at any time'); END;

-- Blocks up to which every deposit is committed, newest last; older ones find a fork.
CREATE TABLE evm_cursor (
    network TEXT    NOT NULL,
    number  INTEGER NOT NULL CHECK (number >= 0),
    hash    TEXT    NOT NULL,
    PRIMARY KEY (network, number)
) STRICT, WITHOUT ROWID;

-- One row for one Transfer event of the token to one of our addresses.
CREATE TABLE evm_deposits (
    network       TEXT    NOT NULL,
    txid          TEXT    NOT NULL,
    -- of the event among all events of its transaction, from 0
    position      INTEGER NOT NULL CHECK (position >= 0),
    address_index INTEGER NOT NULL REFERENCES evm_addresses (address_index),
    units         INTEGER NOT NULL CHECK (units > 0),
    -- as the event has it: the zero address when the tokens were minted
    sender        TEXT    NOT NULL,
    first_seen_at INTEGER NOT NULL,
    -- where it is; NULL while it is on the chain no more
    block_number  INTEGER CHECK (block_number >= 0),
    block_hash    TEXT,
    -- the state that the order layer has committed; NULL: not known, since another was shown to it
    acknowledged  TEXT    CHECK (acknowledged IN ('seen', 'confirmed', 'removed')),
    -- 1 while its state may differ from the acknowledged one, or its block is young
    watched       INTEGER NOT NULL CHECK (watched IN (0, 1)),
    PRIMARY KEY (network, txid, position),
    CHECK ((block_number IS NULL) = (block_hash IS NULL))
) STRICT, WITHOUT ROWID;


CREATE INDEX evm_deposits_watched ON evm_deposits (network, watched) WHERE watched = 1;
CREATE INDEX evm_deposits_by_block ON evm_deposits (network, block_number);
CREATE INDEX evm_deposits_by_address ON evm_deposits (address_index);

CREATE TRIGGER evm_deposits_keep_what_they_are BEFORE UPDATE ON evm_deposits
WHEN OLD.network IS NOT NEW.network OR OLD.txid IS NOT NEW.txid
    OR OLD.position IS NOT NEW.position OR OLD.address_index IS NOT NEW.address_index
    OR OLD.units IS NOT NEW.units OR OLD.sender IS NOT NEW.sender
    OR OLD.first_seen_at IS NOT NEW.first_seen_at
BEGIN SELECT RAISE(ABORT, 'a deposit keeps what it is'); END;

CREATE TRIGGER evm_deposits_are_never_deleted BEFORE DELETE ON evm_deposits
BEGIN SELECT RAISE(ABORT, 'a deposit stays'); END;

-- Payments to addresses of orders that a node was about to mine, and when they were first seen, by
-- the service's clock: for expires_at that counts, and not the time of their block. No deposit
-- follows from a row here, since its sender can replace or cancel what is not mined.
CREATE TABLE evm_pool_sightings (
    network       TEXT    NOT NULL,
    txid          TEXT    NOT NULL,
    address_index INTEGER NOT NULL REFERENCES evm_addresses (address_index),
    first_seen_at INTEGER NOT NULL,
    PRIMARY KEY (network, txid)
) STRICT, WITHOUT ROWID;

CREATE INDEX evm_pool_sightings_by_address ON evm_pool_sightings (network, address_index);

CREATE TRIGGER evm_pool_sightings_never_change BEFORE UPDATE ON evm_pool_sightings
BEGIN SELECT RAISE(ABORT, 'the first sight stays the first'); END;

-- --- The EVM wallet: payments and sweeps --------------------------------------------------------

-- One row for each nonce of the hot wallet that is, or may be, used. Wei are stored per gas: those
-- fit 63 bits.
CREATE TABLE evm_payments (
    seq             INTEGER PRIMARY KEY,
    payment_id      TEXT    NOT NULL UNIQUE,
    network         TEXT    NOT NULL,
    sender          TEXT    NOT NULL,
    nonce           INTEGER NOT NULL CHECK (nonce >= 0),
    purpose         TEXT    NOT NULL CHECK (purpose IN ('transfer', 'sweep', 'authorization')),
    recipient       TEXT    NOT NULL,
    units           INTEGER NOT NULL CHECK (units >= 0),
    contract        TEXT    NOT NULL,
    data            BLOB    NOT NULL,
    gas             INTEGER NOT NULL CHECK (gas > 0),
    prepared_at     INTEGER NOT NULL,
    state           TEXT    NOT NULL CHECK (state IN (
        'prepared', 'published', 'settled', 'failed')),
    published_at    INTEGER,
    -- where one of its attempts was mined at the last look, and what that cost
    mined_txid      TEXT    REFERENCES evm_attempts (txid) DEFERRABLE INITIALLY DEFERRED,
    block_number    INTEGER CHECK (block_number >= 0),
    block_hash      TEXT,
    gas_used        INTEGER CHECK (gas_used >= 0),
    gas_price       INTEGER CHECK (gas_price >= 0),
    -- wei that an OP-stack chain took for data on L1; NULL where the receipt tells none
    l1_fee          INTEGER CHECK (l1_fee >= 0),
    log_position    INTEGER CHECK (log_position >= 0),
    log_index       INTEGER CHECK (log_index >= 0),
    -- a block by which another transaction had spent its nonce
    conflict_number INTEGER CHECK (conflict_number >= 0),
    conflict_hash   TEXT,
    CHECK (purpose <> 'transfer' OR units > 0),
    CHECK (state <> 'prepared' OR published_at IS NULL),
    CHECK ((mined_txid IS NULL) = (block_number IS NULL)
        AND (mined_txid IS NULL) = (block_hash IS NULL)
        AND (mined_txid IS NULL) = (gas_used IS NULL)
        AND (mined_txid IS NULL) = (gas_price IS NULL)
        AND (mined_txid IS NOT NULL OR l1_fee IS NULL)),
    CHECK ((log_position IS NULL) = (log_index IS NULL)),
    CHECK ((conflict_number IS NULL) = (conflict_hash IS NULL))
) STRICT;

-- The last line of defence against paying twice.
CREATE UNIQUE INDEX evm_payments_one_per_nonce ON evm_payments (network, sender, nonce);
CREATE INDEX evm_payments_by_state ON evm_payments (network, state, block_number);
CREATE INDEX evm_payments_by_time ON evm_payments (prepared_at);
CREATE INDEX evm_payments_of_others ON evm_payments (network, prepared_at)
    WHERE purpose = 'authorization';

-- A deep reorganisation can make a settled sweep fail: it is mined again while its deposit is away. A
-- settled payment of an order stays settled.
CREATE TRIGGER evm_payments_keep_what_they_are BEFORE UPDATE ON evm_payments
WHEN OLD.payment_id IS NOT NEW.payment_id OR OLD.network IS NOT NEW.network
    OR OLD.sender IS NOT NEW.sender OR OLD.nonce IS NOT NEW.nonce
    OR OLD.purpose IS NOT NEW.purpose OR OLD.recipient IS NOT NEW.recipient
    OR OLD.units IS NOT NEW.units OR OLD.contract IS NOT NEW.contract
    OR OLD.data IS NOT NEW.data OR OLD.gas IS NOT NEW.gas
    OR OLD.prepared_at IS NOT NEW.prepared_at
    OR (OLD.published_at IS NOT NULL AND OLD.published_at IS NOT NEW.published_at)
    OR (OLD.state = 'failed' AND NEW.state <> 'failed')
    OR (OLD.state = 'settled' AND NEW.state <> 'settled'
        AND NOT (OLD.purpose <> 'transfer' AND NEW.state = 'failed'))
    OR (NEW.state = 'prepared' AND OLD.state <> 'prepared')
BEGIN SELECT RAISE(ABORT, 'a prepared payment keeps what it is'); END;

CREATE TRIGGER evm_payments_are_never_deleted BEFORE DELETE ON evm_payments
BEGIN SELECT RAISE(ABORT, 'a prepared payment stays'); END;

-- The signed transactions of a payment, by rising fees. They have its nonce, call and recipient. A
-- failed sweep gets more when a reorganisation has freed its nonce: it has to be spent again.
CREATE TABLE evm_attempts (
    payment_id TEXT    NOT NULL REFERENCES evm_payments (payment_id)
        DEFERRABLE INITIALLY DEFERRED,
    number     INTEGER NOT NULL CHECK (number >= 1),
    txid       TEXT    NOT NULL UNIQUE,
    raw        BLOB    NOT NULL,
    max_fee    INTEGER NOT NULL CHECK (max_fee > 0),
    tip        INTEGER NOT NULL CHECK (tip >= 0 AND tip <= max_fee),
    made_at    INTEGER NOT NULL,
    PRIMARY KEY (payment_id, number)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER evm_attempts_go_on_from_the_last BEFORE INSERT ON evm_attempts
WHEN NEW.number > 1 AND NOT EXISTS (
    SELECT 1 FROM evm_attempts a JOIN evm_payments p ON p.payment_id = a.payment_id
    WHERE a.payment_id = NEW.payment_id AND a.number = NEW.number - 1
        AND a.max_fee < NEW.max_fee AND a.tip < NEW.tip
        AND (p.state <> 'failed' OR p.purpose = 'sweep'))
BEGIN SELECT RAISE(ABORT, 'an attempt raises the fees of a payment that may be published'); END;

CREATE TRIGGER evm_attempts_never_change BEFORE UPDATE ON evm_attempts
BEGIN SELECT RAISE(ABORT, 'what is signed never changes'); END;

CREATE TRIGGER evm_attempts_are_never_deleted BEFORE DELETE ON evm_attempts
BEGIN SELECT RAISE(ABORT, 'what is signed stays'); END;

-- Steps of bringing deposits to the hot wallet. taken is what left the address by it.
CREATE TABLE evm_sweeps (
    network            TEXT    NOT NULL,
    address_index      INTEGER NOT NULL CHECK (address_index > 0),
    serial             INTEGER NOT NULL CHECK (serial >= 1),
    address            TEXT    NOT NULL,
    method             TEXT    NOT NULL CHECK (method IN ('receive', 'permit', 'take')),
    units              INTEGER NOT NULL CHECK (units > 0),
    -- the nonce that an EIP-3009 signature uses up
    authorization_hash TEXT,
    payment_id         TEXT    UNIQUE REFERENCES evm_payments (payment_id)
        DEFERRABLE INITIALLY DEFERRED,
    state              TEXT    NOT NULL CHECK (state IN ('signed', 'done', 'void')),
    taken              INTEGER NOT NULL CHECK (taken >= 0),
    CHECK ((method = 'receive') = (authorization_hash IS NOT NULL)),
    CHECK (state = 'done' OR taken = 0),
    CHECK (state <> 'signed' OR payment_id IS NOT NULL),
    PRIMARY KEY (network, address_index, serial)
) STRICT, WITHOUT ROWID;

-- One at a time for an address: the next is judged by what this one left.
CREATE UNIQUE INDEX evm_sweeps_under_way ON evm_sweeps (network, state, address_index)
    WHERE state = 'signed';

-- A sweep that took something is void once its payment has failed after all. A void one is done
-- once its authorization is used: then its payment was mined after all.
CREATE TRIGGER evm_sweeps_keep_what_they_are BEFORE UPDATE ON evm_sweeps
WHEN OLD.network IS NOT NEW.network OR OLD.address_index IS NOT NEW.address_index
    OR OLD.serial IS NOT NEW.serial OR OLD.address IS NOT NEW.address
    OR OLD.method IS NOT NEW.method OR OLD.units IS NOT NEW.units
    OR OLD.authorization_hash IS NOT NEW.authorization_hash
    OR OLD.payment_id IS NOT NEW.payment_id
    OR NOT (OLD.state = 'signed'
        OR (OLD.state = 'void' AND NEW.state = 'done' AND OLD.authorization_hash IS NOT NULL)
        OR (OLD.state = 'done' AND NEW.state = 'void' AND EXISTS (
            SELECT 1 FROM evm_payments p
            WHERE p.payment_id = OLD.payment_id AND p.state = 'failed')))
BEGIN SELECT RAISE(ABORT, 'a sweep keeps what it is, and how it ended'); END;

CREATE TRIGGER evm_sweeps_are_never_deleted BEFORE DELETE ON evm_sweeps
BEGIN SELECT RAISE(ABORT, 'a sweep stays'); END;

-- A payment that fails after all took nothing, so that the deposit is swept again. A restored copy
-- has from the payment journal that a sweep ended, and its payment as published.
CREATE TRIGGER evm_sweeps_follow_their_payment AFTER UPDATE OF state ON evm_payments
WHEN OLD.state IN ('published', 'settled') AND NEW.state = 'failed'
BEGIN
    UPDATE evm_sweeps SET state = 'void', taken = 0
        WHERE payment_id = NEW.payment_id AND state = 'done';
END;

-- Sums for each address, kept by the triggers below: confirmed deposits, and what sweeps took.
-- Adding them up each time takes a fifth of a second for 100,000 deposits.
CREATE TABLE evm_holdings (
    network       TEXT    NOT NULL,
    address_index INTEGER NOT NULL REFERENCES evm_addresses (address_index),
    confirmed     INTEGER NOT NULL,
    taken         INTEGER NOT NULL,
    unswept       INTEGER GENERATED ALWAYS AS (confirmed - taken) VIRTUAL,
    PRIMARY KEY (network, address_index)
) STRICT, WITHOUT ROWID;

CREATE INDEX evm_holdings_unswept ON evm_holdings (network, unswept) WHERE unswept > 0;

CREATE TRIGGER evm_deposits_are_added_up AFTER INSERT ON evm_deposits
WHEN NEW.acknowledged = 'confirmed'
BEGIN
    INSERT INTO evm_holdings (network, address_index, confirmed, taken)
        VALUES (NEW.network, NEW.address_index, NEW.units, 0)
        ON CONFLICT (network, address_index) DO UPDATE SET
            confirmed = evm_holdings.confirmed + excluded.confirmed;
END;

CREATE TRIGGER evm_deposits_are_added_up_again AFTER UPDATE OF acknowledged ON evm_deposits
WHEN (OLD.acknowledged IS 'confirmed') <> (NEW.acknowledged IS 'confirmed')
BEGIN
    INSERT INTO evm_holdings (network, address_index, confirmed, taken)
        VALUES (NEW.network, NEW.address_index,
            CASE WHEN NEW.acknowledged IS 'confirmed' THEN NEW.units ELSE -NEW.units END, 0)
        ON CONFLICT (network, address_index) DO UPDATE SET
            confirmed = evm_holdings.confirmed + excluded.confirmed;
END;

CREATE TRIGGER evm_sweeps_are_added_up AFTER INSERT ON evm_sweeps WHEN NEW.taken > 0
BEGIN
    INSERT INTO evm_holdings (network, address_index, confirmed, taken)
        VALUES (NEW.network, NEW.address_index, 0, NEW.taken)
        ON CONFLICT (network, address_index) DO UPDATE SET
            taken = evm_holdings.taken + excluded.taken;
END;

CREATE TRIGGER evm_sweeps_are_added_up_again AFTER UPDATE OF taken ON evm_sweeps
WHEN OLD.taken <> NEW.taken
BEGIN
    INSERT INTO evm_holdings (network, address_index, confirmed, taken)
        VALUES (NEW.network, NEW.address_index, 0, NEW.taken - OLD.taken)
        ON CONFLICT (network, address_index) DO UPDATE SET
            taken = evm_holdings.taken + excluded.taken;
END;

-- What the hot wallet held of a network's own coin when the service first looked: the auditor adds
-- up from there. Wei do not fit 63 bits: they are decimal digits. When its block is replaced, a row
-- is recorded again.
CREATE TABLE evm_openings (
    network      TEXT    NOT NULL,
    sender       TEXT    NOT NULL,
    block_number INTEGER NOT NULL CHECK (block_number >= 0),
    block_hash   TEXT    NOT NULL,
    -- how many transactions it had sent by then: those from this nonce on are added up
    nonce        INTEGER NOT NULL CHECK (nonce >= 0),
    wei          TEXT    NOT NULL CHECK (
        length(wei) BETWEEN 1 AND 78 AND trim(wei, '0123456789') = ''),
    PRIMARY KEY (network, sender)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER evm_openings_follow_their_block BEFORE UPDATE ON evm_openings
WHEN OLD.network IS NOT NEW.network OR OLD.sender IS NOT NEW.sender
    OR OLD.block_hash IS NEW.block_hash
BEGIN SELECT RAISE(ABORT, 'an opening balance changes with its block alone'); END;

CREATE TRIGGER evm_openings_are_never_deleted BEFORE DELETE ON evm_openings
BEGIN SELECT RAISE(ABORT, 'an opening balance stays'); END;

-- --- Transactions and deposits that are of no order ---------------------------------------------

-- Nonces of the hot wallet below this need no record: the operator acknowledged them, or they were
-- used before the service knew the network.
CREATE TABLE evm_nonces (
    network            TEXT    NOT NULL,
    sender             TEXT    NOT NULL,
    acknowledged_below INTEGER NOT NULL CHECK (acknowledged_below >= 0),
    PRIMARY KEY (network, sender)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER evm_nonces_never_fall BEFORE UPDATE ON evm_nonces
WHEN OLD.network IS NOT NEW.network OR OLD.sender IS NOT NEW.sender
    OR NEW.acknowledged_below < OLD.acknowledged_below
BEGIN SELECT RAISE(ABORT, 'an acknowledged nonce stays acknowledged'); END;

-- Unrecorded outgoing transactions that paused payouts once, and do not pause them again.
CREATE TABLE acknowledged_transactions (
    network TEXT    NOT NULL,
    txid    TEXT    NOT NULL,
    at      INTEGER NOT NULL,
    PRIMARY KEY (network, txid)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER acknowledged_transactions_never_change BEFORE UPDATE ON acknowledged_transactions
BEGIN SELECT RAISE(ABORT, 'an acknowledged transaction stays acknowledged'); END;

-- Transactions that the operator made by hand, with a note on each. What they moved is not stored:
-- it is read from the chain. wei is what contracts sent to the hot wallet in it: no node shows that
-- without tracing, so it is the operator's word.
CREATE TABLE annotated_transactions (
    network TEXT    NOT NULL,
    txid    TEXT    NOT NULL,
    note    TEXT    NOT NULL CHECK (note <> ''),
    at      INTEGER NOT NULL,
    wei     TEXT    CHECK (
        wei IS NULL OR (length(wei) BETWEEN 1 AND 78 AND trim(wei, '0123456789') = '')),
    PRIMARY KEY (network, txid)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER annotated_transactions_never_change BEFORE UPDATE ON annotated_transactions
BEGIN SELECT RAISE(ABORT, 'an annotation is withdrawn, not changed'); END;

-- Confirmed deposits that are of no order: one address serves an order on all networks, and only
-- what comes on the order's own is its deposit. Kept by the triggers below; an order is there before
-- its address is given out.
CREATE TABLE unattributed_deposits (
    network      TEXT    NOT NULL,
    txid         TEXT    NOT NULL,
    -- as in evm_deposits; for Monero the subaddress
    position     INTEGER NOT NULL,
    address      TEXT    NOT NULL,
    units        INTEGER NOT NULL,
    -- as in orders
    address_ends TEXT    GENERATED ALWAYS AS (
        substr(address, 1, 9) || substr(address, length(address) - 8)) VIRTUAL,
    PRIMARY KEY (network, txid, position)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER unattributed_evm_deposits AFTER INSERT ON evm_deposits
WHEN NEW.acknowledged = 'confirmed'
BEGIN
    INSERT INTO unattributed_deposits (network, txid, position, address, units)
        SELECT NEW.network, NEW.txid, NEW.position, a.address, NEW.units FROM evm_addresses a
        WHERE a.address_index = NEW.address_index AND NOT EXISTS (SELECT 1 FROM orders o
            WHERE o.deposit_address_ends = a.address_ends
                AND o.deposit_address = a.address AND o.deposit_network = NEW.network)
        ON CONFLICT DO NOTHING;
END;

CREATE TRIGGER unattributed_evm_deposits_again AFTER UPDATE OF acknowledged ON evm_deposits
WHEN NEW.acknowledged IS 'confirmed' AND OLD.acknowledged IS NOT 'confirmed'
BEGIN
    INSERT INTO unattributed_deposits (network, txid, position, address, units)
        SELECT NEW.network, NEW.txid, NEW.position, a.address, NEW.units FROM evm_addresses a
        WHERE a.address_index = NEW.address_index AND NOT EXISTS (SELECT 1 FROM orders o
            WHERE o.deposit_address_ends = a.address_ends
                AND o.deposit_address = a.address AND o.deposit_network = NEW.network)
        ON CONFLICT DO NOTHING;
END;

CREATE TRIGGER unattributed_evm_deposits_are_gone AFTER UPDATE OF acknowledged ON evm_deposits
WHEN OLD.acknowledged IS 'confirmed' AND NEW.acknowledged IS NOT 'confirmed'
BEGIN
    DELETE FROM unattributed_deposits
        WHERE network = NEW.network AND txid = NEW.txid AND position = NEW.position;
END;

CREATE TRIGGER unattributed_monero_deposits AFTER INSERT ON monero_deposits
WHEN NEW.acknowledged = 'confirmed'
BEGIN
    INSERT INTO unattributed_deposits (network, txid, position, address, units)
        SELECT 'monero', NEW.txid, NEW.minor, a.address, NEW.units FROM monero_addresses a
        WHERE a.minor = NEW.minor AND NOT EXISTS (SELECT 1 FROM orders o
            WHERE o.deposit_address_ends = a.address_ends
                AND o.deposit_address = a.address AND o.deposit_network = 'monero')
        ON CONFLICT DO NOTHING;
END;

CREATE TRIGGER unattributed_monero_deposits_again AFTER UPDATE OF acknowledged ON monero_deposits
WHEN NEW.acknowledged IS 'confirmed' AND OLD.acknowledged IS NOT 'confirmed'
BEGIN
    INSERT INTO unattributed_deposits (network, txid, position, address, units)
        SELECT 'monero', NEW.txid, NEW.minor, a.address, NEW.units FROM monero_addresses a
        WHERE a.minor = NEW.minor AND NOT EXISTS (SELECT 1 FROM orders o
            WHERE o.deposit_address_ends = a.address_ends
                AND o.deposit_address = a.address AND o.deposit_network = 'monero')
        ON CONFLICT DO NOTHING;
END;

CREATE TRIGGER unattributed_monero_deposits_are_gone AFTER UPDATE OF acknowledged ON monero_deposits
WHEN OLD.acknowledged IS 'confirmed' AND NEW.acknowledged IS NOT 'confirmed'
BEGIN
    DELETE FROM unattributed_deposits
        WHERE network = 'monero' AND txid = NEW.txid AND position = NEW.minor;
END;

-- Transfers that the operator says were paid by a transaction which proves nothing of it: the note,
-- signed by the service's key.
CREATE TABLE closed_by_hand (
    transfer_id TEXT    PRIMARY KEY,
    txid        TEXT    NOT NULL,
    note        TEXT    NOT NULL,
    at          INTEGER NOT NULL,
    kid         TEXT    NOT NULL,
    signature   TEXT    NOT NULL
) STRICT;

-- --- The payment journal (docs/adr/0012-payment-journal.md) -------------------------------------

-- Up to which line of each replica's journal everything is in this database, and the lease under
-- which that was recorded.
CREATE TABLE payment_journal (
    journal TEXT    PRIMARY KEY,
    line    INTEGER NOT NULL CHECK (line >= 0),
    sum     TEXT    NOT NULL,
    token   INTEGER NOT NULL CHECK (token >= 0),
    holder  TEXT    NOT NULL
) STRICT, WITHOUT ROWID;

-- Why payouts are paused on all replicas; no row: they are not, unless a replica's own file says so.
CREATE TABLE payout_pause (
    id        INTEGER PRIMARY KEY CHECK (id = 1),
    reason    TEXT    NOT NULL,
    paused_at INTEGER NOT NULL
) STRICT;

-- Transactions that an older copy of the database did not have, and that came from the journal.
CREATE TABLE journal_adopted (
    txid       TEXT    PRIMARY KEY,
    adopted_at INTEGER NOT NULL
) STRICT;
