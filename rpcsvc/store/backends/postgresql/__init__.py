"""PostgreSQL, 15 or newer: imported only when a database URL is configured."""
