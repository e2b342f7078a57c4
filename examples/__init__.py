"""Programs to run; benchmarks use their data."""
