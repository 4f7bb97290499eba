"""`python -m jaxtwin` is the command `jaxtwin`."""

from jaxtwin.cli.main import main

if __name__ == "__main__":
    main()
