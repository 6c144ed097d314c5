"""The lab, really run: on an engine of its own, and disturbed while it answers. By hand: `make lab-test`."""
