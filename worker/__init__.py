"""Computes: one process a device."""
