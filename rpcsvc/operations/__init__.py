"""The operations: tables that every transport serves alike."""
