"""A page about a comparison of runs; needs ``topklass[train]``."""

from topklass.report.page import Report, write_report

__all__ = ["Report", "write_report"]
