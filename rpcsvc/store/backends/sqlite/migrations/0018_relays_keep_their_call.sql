-- What the idempotency key of a claim was used for, as its answer will have it: while the outcome of
-- the call is not known there is no answer, and the key must stand for that call all the same.
-- Claims from before have neither.

ALTER TABLE relays ADD COLUMN operation TEXT;
ALTER TABLE relays ADD COLUMN params TEXT;

-- What the operator noted when closing the claim. Only the closing writes it: a call that was under
-- way then, and tells afterwards what became of it, leaves it as it is.
ALTER TABLE relays ADD COLUMN note TEXT;
