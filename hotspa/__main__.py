"""`python -m hotspa` is `hotspa`."""

from hotspa.cli import main

if __name__ == "__main__":
    main()
