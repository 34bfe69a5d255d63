"""Operations on buckets, and listings."""
