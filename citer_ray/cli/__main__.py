"""`python -m citer_ray.cli`: the command line without an installed script."""

from citer_ray.cli import main

if __name__ == "__main__":
    main()
