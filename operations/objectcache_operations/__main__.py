"""`python -m objectcache_operations`."""

from objectcache_operations import main

if __name__ == "__main__":
    main()
