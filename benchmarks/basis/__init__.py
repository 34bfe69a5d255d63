"""What every question needs: rows and their report, the scale, a prefix, engine and server."""
