"""report.html: a run told in one file that needs nothing else, while it goes on and after."""
