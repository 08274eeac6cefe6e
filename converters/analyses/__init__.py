"""Reports about sessions and models, one module or folder for each question."""
