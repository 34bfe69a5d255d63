"""Who gets which bytes when (paper, sections 3.4 to 3.6). Pure: time is an argument everywhere.

Read in this order: `demand` (a delivery as the policies see it), `policies` (rates), `due_times`
(the plan of stall_dynamic), `link` (pacing), `flow` (a running delivery's account), `round_robin`
(fair shares), `line`, `lanes`, `rate_lane` and `urgent_lane` (whose turn it is), `terms` (the
configuration in bytes per second), `sides` (how the pool and the others divide the link), `pool`,
`division`, `for_life` and `epochs` (who gets which rate when), `decisions`, `scheduler` (all of it
together), `admission` (tenants' queues), `compute_windows` (how long a layer computes, by
`compute_profile` or `learned_windows`; `profile_files` alone reads files), `overlap` and
`lower_bound` (what a schedule costs, and how little it could).
"""
