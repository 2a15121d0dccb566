"""The service's signing keys, and signing with them: responses and the terms of orders.

keys.py             a key ring as a value, and as JSON
key_files.py        the ring on disk: private, replaced whole, the old key destroyed
key_ring.py         the keys of one directory: made, rotated, read again
response_signer.py  what goes out is signed

What does not live here: what is signed, byte for byte, and how it is checked (verify.py); which
responses are signed (transport/).
"""
