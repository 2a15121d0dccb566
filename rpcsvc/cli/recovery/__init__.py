"""The commands that open the database themselves, most of them while the service is stopped."""
