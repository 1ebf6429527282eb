"""`python -m hypersphere` is the command `hypersphere`."""

from hypersphere.cli import main

main()
