"""Accidents to real training runs, and what is left after them: ``python -m tests.chaos``."""
