"""What runs a model: transformers in this process, or vLLM's CPU engine."""
