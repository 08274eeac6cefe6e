"""Reports as text, Markdown, CSV, JSON, HTML and charts; pages on the loopback interface."""
