"""What a person runs: the command line, the embedded model's world, tools, training and evaluation."""
