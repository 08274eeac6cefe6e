"""What if: tasks of a recorded or predicted compute on engines that may not exist."""
