"""Models of transformers, in the loop of kvbench or in `model.generate`."""
