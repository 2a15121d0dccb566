"""The command line: what an agent, an operator, and an operator after a restore can do."""
