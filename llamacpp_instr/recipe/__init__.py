"""Which type each tensor of a model should have, by measurement."""
