"""The algorithms in plain PyTorch: what every kernel is measured against."""
