"""The protocol: items, events, runs, and how a model family writes them. It never imports torch."""
