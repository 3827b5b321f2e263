"""`python -m leakbound.cli`: the command line without the installed script."""

from leakbound.cli import main

main()
