"""`python -m decode_worker --model DIR --listen HOST:PORT`"""

import sys

from baton.worker.main import main
from decode_worker.role import ROLE


def load_table():
    """Return the states of a worker, whichever role's task is its first: it obeys the commands of both. Imports
    torch."""
    import decode_worker.states
    import prefill_worker.states
    from baton.worker.session.table import join_tables

    return join_tables(prefill_worker.states.TRANSITIONS, decode_worker.states.TRANSITIONS)


if __name__ == "__main__":
    sys.exit(main(ROLE, load_table))
