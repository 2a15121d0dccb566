"""The rules of a swap: money, addresses, prices and the order machine. Pure; no I/O, no clock."""
