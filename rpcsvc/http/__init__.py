"""How calls arrive over HTTP: JSON-RPC, the agent API, the BFF, documents, health."""
