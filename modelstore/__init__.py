"""Turns the files people have into shards."""
