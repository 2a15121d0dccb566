"""The auditor: a second reader that recomputes orders and wallets from the chains and the books."""
