"""Policies that assign rates, and when deliveries get them (paper, section 3.6). Pure.

Read in this order: `policies`, `rated_pool` (who has a rate and who waits), `divide_each_epoch` and
`divide_for_life` (who gets one at an epoch's end), `assign_at_epochs`.
"""
