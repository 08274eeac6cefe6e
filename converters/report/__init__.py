"""A report: its tables, and how they become text, Markdown, CSV, JSON and HTML."""
