"""The commands that open the database themselves, most of them while no service runs."""
