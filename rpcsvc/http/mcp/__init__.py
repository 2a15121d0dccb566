"""The Model Context Protocol at POST /mcp: the operations as tools, the documents as resources."""
