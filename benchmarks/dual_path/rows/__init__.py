"""What is measured, a file for each `--only`."""
