"""The HTTP surfaces: JSON-RPC, the agent API, the BFF, documents, health."""
