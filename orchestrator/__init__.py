"""Decides: which device computes what, and when."""
