"""A report as a document, a table, a page."""
