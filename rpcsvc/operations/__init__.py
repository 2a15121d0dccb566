"""What the service can be asked: tables of operations, the same over every transport."""
