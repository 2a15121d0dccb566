"""What moves orders on by itself: the worker loop and the work it starts."""
