"""A page about a comparison of runs; needs ``topklass[train]``."""

from topklass.report.page import write_report

__all__ = ["write_report"]
