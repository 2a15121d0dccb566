"""The OpenAPI 3.1 description of the agent API and the BFF, made of the tables and the settings."""
