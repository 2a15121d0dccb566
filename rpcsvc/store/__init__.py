"""The store: queries for orders, idempotency keys, ledgers and the sandbox, and their databases."""
