"""The load harness: what is asked when, of whom, and what came of it."""
