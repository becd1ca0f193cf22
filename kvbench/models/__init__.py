"""What is known of a model before it is loaded: where it is from, whether it runs, what it takes.

No torch.
"""
