"""`python -m objectcache.demo`."""

import sys

from objectcache.demo import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
