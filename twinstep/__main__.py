"""`python -m twinstep`: see `twinstep.command_line`."""

import sys

from twinstep.command_line import main

if __name__ == "__main__":
    sys.exit(main())
