"""One model, one method, one generation: forward passes, the method's turns, audit and probes."""
