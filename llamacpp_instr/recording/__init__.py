"""Records sessions of this process, and handles the files that a recording writes."""
