"""SQLite: one process, one writer with group commit."""
