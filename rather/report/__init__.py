"""report.html and the building blocks of every HTML page: documents, tables and plotly charts."""

from rather.report.charts import chart, lines, plotly_bundle
from rather.report.document import as_json, escape, page, slug, table
from rather.report.downsample import thinned

__all__ = [
    "as_json",
    "chart",
    "escape",
    "lines",
    "page",
    "plotly_bundle",
    "slug",
    "table",
    "thinned",
]
