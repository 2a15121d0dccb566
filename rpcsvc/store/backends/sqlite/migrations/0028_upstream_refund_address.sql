-- Where an upstream says that it sends refunds of an order.

ALTER TABLE relays ADD COLUMN refund_address TEXT;
