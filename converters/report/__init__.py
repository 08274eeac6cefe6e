"""Reports, and how they become text, Markdown, CSV, JSON and HTML."""
