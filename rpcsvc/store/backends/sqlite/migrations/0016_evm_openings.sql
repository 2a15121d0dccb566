-- What the hot wallet held of a network's own coin when the service first looked: the auditor adds
-- up from there. Wei do not fit 63 bits: they are decimal digits.

-- When its block is replaced, a row is recorded anew.
CREATE TABLE evm_openings (
    network      TEXT    NOT NULL,
    sender       TEXT    NOT NULL,
    block_number INTEGER NOT NULL CHECK (block_number >= 0),
    block_hash   TEXT    NOT NULL,
    -- how many transactions it had sent by then: those from this nonce on are added up
    nonce        INTEGER NOT NULL CHECK (nonce >= 0),
    wei          TEXT    NOT NULL CHECK (length(wei) BETWEEN 1 AND 78 AND wei NOT GLOB '*[^0-9]*'),
    PRIMARY KEY (network, sender)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER evm_openings_follow_their_block BEFORE UPDATE ON evm_openings
WHEN OLD.network IS NOT NEW.network OR OLD.sender IS NOT NEW.sender
    OR OLD.block_hash IS NEW.block_hash
BEGIN SELECT RAISE(ABORT, 'an opening balance changes with its block alone'); END;

CREATE TRIGGER evm_openings_are_never_deleted BEFORE DELETE ON evm_openings
BEGIN SELECT RAISE(ABORT, 'an opening balance stays'); END;

-- Ether that contracts sent to the hot wallet in an explained transaction: no node shows it without
-- tracing, so it is the operator's word.
ALTER TABLE explained_transactions ADD COLUMN wei TEXT
    CHECK (wei IS NULL OR (length(wei) BETWEEN 1 AND 78 AND wei NOT GLOB '*[^0-9]*'));
