"""Model files: their headers, types and parts, and what a user calls them."""
