"""`python -m objectcache_laboratory.demo`."""

import sys

from objectcache_laboratory.demo import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
