"""Settlement engines, which move the money. Each implements orders/ports/."""
