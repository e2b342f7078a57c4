"""Measurements: each verifies before it times, and names hardware, versions and commit."""
