"""`python -m objectcache.cli`."""

from objectcache.cli import main

if __name__ == "__main__":
    main()
