"""Model files: header, types, parts, importance matrix, hyper-parameters."""
