"""What the connector tells the people who run vLLM: lines of its log, and counters."""
