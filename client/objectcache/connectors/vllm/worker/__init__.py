"""The connector in a vLLM worker: layers into its paged KV, and out of it."""
