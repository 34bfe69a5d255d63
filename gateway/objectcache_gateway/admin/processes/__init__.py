"""Routes of the processes: health, metrics, the status page."""
