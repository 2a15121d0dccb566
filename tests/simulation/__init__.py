"""The whole service in one process: time, order, crashes and faults come from a seed."""
