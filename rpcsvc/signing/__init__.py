"""The service's signing keys, and signing with them: responses and the terms of orders."""
