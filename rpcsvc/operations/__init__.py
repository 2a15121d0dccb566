"""What the service can be asked: one table of operations, the same over every transport."""
