"""Who gets which bytes when (paper, sections 3.4 to 3.6). Pure: time is an argument everywhere.

Read in this order: `demand` (a delivery as policies see it), `schedule_terms` (the configuration
in bytes per second), `lanes` (whose fragment is next), `rates` (who gets which rate, and when),
`scheduler` with its `scheduler_answers` (all of it together), `windows` (how long a layer computes;
it alone reads files), `ttft_model` and `lower_bound` (what a schedule costs, and at least could).
"""
