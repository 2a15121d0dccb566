"""Carries orders through: commits what happened, then acts, and resumes after a crash."""
