"""Dialects: how a model family writes items as tokens, and how its tokens are read back."""
