"""`python -m objectcache.cli`: the program `objectcache`, of which the SDK imports nothing."""

import runpy

if __name__ == "__main__":
    runpy.run_module("objectcache_operations", run_name="__main__", alter_sys=True)
