"""Slices on their way from landing memory to engines, decoded by processes.

`jobs` says what a worker is asked and what it answers, and how pieces are cut into that; `worker`
is the process, `worker_process` its other end, `worker_pool` all of them with what waits, and
`piece_jobs` one delivery's pieces with them. `worker_sink` is its way into an engine's memory file,
`decoded_sink` into one of ours (`decoded_regions`), from which a fabric or a body takes it on. No
payload passes between processes: workers map the memory where it lies, and where it goes.
"""
