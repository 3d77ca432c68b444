"""``python -m raycollect``: the command line where the script is not on the path."""

from raycollect.cli.commands import main

if __name__ == "__main__":
    main()
