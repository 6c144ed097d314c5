"""The KV of running sequences."""
