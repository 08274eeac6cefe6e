"""What tests are made with: models, logs, recordings, libraries to compare with."""
