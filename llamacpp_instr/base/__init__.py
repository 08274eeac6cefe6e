"""What every room may use: errors, output, the terminal, the system, child processes, extras."""
