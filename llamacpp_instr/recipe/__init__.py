"""Which type each tensor should have: effects on the output, errors, and the best mixture."""
