"""`python -m neox_lit` is `neox-lit`."""

from neox_lit.cli import main

if __name__ == "__main__":
    main()
