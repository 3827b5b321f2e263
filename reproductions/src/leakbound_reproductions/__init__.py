"""Built-in plans and, later, the papers' experiments over the public API."""
