"""Rate sources. Each price has the time that its source gave for it."""
