"""Model files: headers, types, parts, and how to find them by name."""
