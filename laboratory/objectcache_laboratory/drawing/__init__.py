"""What our SVG pictures share: a time axis with round ticks, and the shapes on it."""
