"""Protocols that ``orders`` declares and others implement: store, engines, rate sources."""
