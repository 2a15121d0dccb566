"""How calls arrive: JSON-RPC, HTTPS and the CLI, all over the one operation table."""
