"""Offline batches: a file of prompts in, a file of answers out."""
