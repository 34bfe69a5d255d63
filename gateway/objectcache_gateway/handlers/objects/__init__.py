"""Operations on objects."""
