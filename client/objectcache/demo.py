"""`python -m objectcache.demo`: the laboratory's demo, of which the SDK imports nothing."""

import runpy

if __name__ == "__main__":
    runpy.run_module("objectcache_laboratory.demo", run_name="__main__", alter_sys=True)
