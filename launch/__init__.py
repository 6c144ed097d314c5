"""Starts processes."""
