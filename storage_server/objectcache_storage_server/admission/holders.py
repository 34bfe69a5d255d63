"""Under which name a get holds turns and memory. Pure.

A tenant's small gets are counted apart from its others: each kind has a share of its own, so that
the many large ones of one client do not hold up the small ones of another that has the same key.
"""

from __future__ import annotations

SMALL = " (small gets)"  # behind a user's name, which has no space


def get_holder(tenant: str, *, is_small: bool) -> str:
    """The name for gets of this tenant."""
    return tenant + SMALL if is_small else tenant


def holders_tenant(holder: str) -> str:
    """Whose gets they are."""
    return holder.removesuffix(SMALL)
