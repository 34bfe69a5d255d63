"""What if these requests shared a link: `objectcache schedule`, without a server.

Read in this order: `request_rows` (the file), `simulation` (stall_dynamic under virtual time),
`prediction` (what each policy would give), `report` (tables and JSON), `__main__` (flags).
"""
