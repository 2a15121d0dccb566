"""The payment journal: every signed payment, on disk before it can reach a network."""
