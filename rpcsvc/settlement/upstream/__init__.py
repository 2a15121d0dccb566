"""The upstream engine's parts: another swap API, called over HTTP.

models.py    what is asked, what is answered, and the tree of failures
statuses.py  an upstream's statuses, read as an open set
budget.py    how often it may be called, and one poll shared by all who ask
breaker.py   when it is left alone because it is down
options.py   where it is, and how patient its client is
exchange.py  one HTTP exchange: bounded, strict, and judged for what it proves
client.py    calls, repeated where that is safe; honest about whether one may have acted
reading.py   an answer's JSON, checked and turned into those types
calls.py     the calls, the same in both dialects
bff.py       what is particular to another rpcsvc
v1.py        what is particular to the public cross-chain API
offered.py   which chains can be offered here
engine.py    the settlement engine over all of it
timing.py    time, waiting and chance
wiring.py    putting it together from the settings
"""
