"""Tokens: where they come from, the cache they are kept in, and the batches that are made of them."""
