"""An engine of two parts: a catalog that says what is stored, and a blob store that holds it."""
