"""What if: the tasks of a recorded or predicted compute, on other machines."""
