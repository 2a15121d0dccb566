"""The OpenAPI 3.1 description of the agent API and the BFF, made of the tables and the settings.

document.py    the whole document
operations.py  the agent API's calls
bff.py         the BFF's calls
site_calls.py  health and quickstart, which are not operations of the table
responses.py   what calls are refused with
headers.py     headers, and the parameters that calls share
parts.py       what all of these are made of

Schemas, examples and the meaning of errors come from http/schemas.py. What does not live here:
serving the document (http/discovery.py), JSON-RPC (http/openrpc.py).
"""
