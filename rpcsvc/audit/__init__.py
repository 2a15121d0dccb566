"""The auditor: recomputes orders and wallets from the chains, and compares them with the books."""
