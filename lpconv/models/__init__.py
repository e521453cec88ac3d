"""A model opened for a purpose, what it is made of, and inputs for it."""
