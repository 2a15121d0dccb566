"""Carrying orders through: commit what happened, then act, and find it again after a crash."""
