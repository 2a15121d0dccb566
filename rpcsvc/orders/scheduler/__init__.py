"""The worker loop and the work that it starts."""
