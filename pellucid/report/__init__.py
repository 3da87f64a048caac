"""What a run did, for people: report.html and tables in the terminal. Reads the files of a run, never a model."""

from pellucid.report.report import build_report
from pellucid.report.stages import build_stages_report

__all__ = ["build_report", "build_stages_report"]
