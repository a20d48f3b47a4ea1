"""report.html and the building blocks of every HTML page: documents, tables and plotly charts."""

from rather.report.charts import chart, downsample, lines, plotly_bundle
from rather.report.document import LEVELS, as_json, escape, page, slug, table

__all__ = [
    "LEVELS",
    "as_json",
    "chart",
    "downsample",
    "escape",
    "lines",
    "page",
    "plotly_bundle",
    "slug",
    "table",
]
