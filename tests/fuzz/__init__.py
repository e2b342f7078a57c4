"""Broken, foreign and malicious files for every reader: ``python -m tests.fuzz --seconds 3600``."""
