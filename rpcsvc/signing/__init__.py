"""The service's signing keys; signatures over responses and over the terms of orders."""
