"""Orders that an upstream settles: made there once, followed to their end."""
