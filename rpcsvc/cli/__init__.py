"""The command line: ``main.py`` holds the tree of commands, each other module one or a few of them.

Nothing is imported here, so that a command loads what it needs and nothing else.
"""
