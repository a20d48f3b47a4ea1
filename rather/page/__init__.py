"""Pages for people: one HTML document with everything in it, charts by plotly's own bundle, light and dark."""

from rather.page.charts import chart, lines, plotly_bundle
from rather.page.document import as_json, escape, page, slug, table
from rather.page.thin import thinned

__all__ = ["as_json", "chart", "escape", "lines", "page", "plotly_bundle", "slug", "table", "thinned"]
