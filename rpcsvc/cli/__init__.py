"""The command line: commands for agents, for operators, and for recovery."""
