"""One sample through one arm: its prompt by the protocol, its generation, its times, its score."""
