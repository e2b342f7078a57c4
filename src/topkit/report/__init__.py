"""A page about a comparison of runs; needs ``topkit[train]``."""

from topkit.report.page import write_report

__all__ = ["write_report"]
