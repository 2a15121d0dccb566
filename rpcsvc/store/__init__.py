"""SQLite: the one place where orders, keys and the sandbox's chains persist."""
