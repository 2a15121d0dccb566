"""Settles orders: commits each event, then acts, and resumes after a crash."""
