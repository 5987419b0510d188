"""The page that a person reads after a run: one HTML file without any request, the same tables as Markdown, and the results as data."""

from parallel_r1.report.claims import claims_table
from parallel_r1.report.inputs import Curve, Evaluation, ReportInput, StageRun
from parallel_r1.report.page import Report, build
from parallel_r1.report.tables import results_table

__all__ = ["Curve", "Evaluation", "Report", "ReportInput", "StageRun", "build", "claims_table", "results_table"]
