"""Faults on real processes, and the figures that must hold. `python -m tests.faults --help` lists them."""
