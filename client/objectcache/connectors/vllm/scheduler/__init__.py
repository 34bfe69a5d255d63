"""The connector in vLLM's scheduler: what is stored, what is loaded, what may not be read."""
