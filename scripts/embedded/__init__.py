"""The embedded model from nothing: its world of tasks, its vocabulary, its training, its score.

`scripts/train` runs `train`, which names the others. None of it is needed to run the model.
"""
