"""`python -m prefill_worker --model DIR --listen HOST:PORT`"""

import sys

from baton.worker.main import main
from prefill_worker.role import ROLE

if __name__ == "__main__":
    sys.exit(main(ROLE))
