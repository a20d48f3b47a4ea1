"""report.html and the building blocks of every HTML page: documents, tables and charts."""
