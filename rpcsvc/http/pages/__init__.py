"""Pages for people: the checkout page of an order, the site root, and the status page."""
