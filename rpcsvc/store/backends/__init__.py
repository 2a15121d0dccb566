"""Databases that the store can use."""
