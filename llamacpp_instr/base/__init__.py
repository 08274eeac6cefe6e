"""What every room may use: errors, output, the terminal, child processes, extras."""
