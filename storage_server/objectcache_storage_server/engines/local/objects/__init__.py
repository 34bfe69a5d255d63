"""What is stored, as index and memory know it together: removed, dropped and flushed here."""
