"""Settlement engines: what moves money. Each implements orders/ports/."""
