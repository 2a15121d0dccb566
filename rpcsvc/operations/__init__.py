"""The operations: tables that are the same over every transport."""
