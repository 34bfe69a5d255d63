"""What every engine that gathers puts needs: memory for it, and checksums as bytes arrive."""
